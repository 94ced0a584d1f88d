"""agl-server and agl-controller (local mode) as processes on loopback."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.rig.processes import free_port, start_process, wait_until

KEY = "scene-key"
MODEL = "rig/model"
START_WAIT_S = 180.0
STOP_WAIT_S = 15.0


class Services:
    """The two services of a scene; each can be killed and started again.

    Args:
        folder: Of the scene; logs go there, and agents find their plan there.
        pool: How many agents the controller runs at a time.
    """

    def __init__(self, folder: Path, *, pool: int = 50) -> None:
        self._folder = folder
        self._pool = pool
        self._server: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    @property
    def url(self) -> str:
        """Of agl-server."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start both; returns once the server answers."""
        self.start_controller()
        self.start_server()

    def start_server(self) -> None:
        """Start agl-server on the scene's port and wait until it answers."""
        self._server = start_process(
            "-m",
            "agentlightning.server",
            "host=127.0.0.1",
            f"port={self._port}",
            f"key={KEY}",
            f"default_proxy.model_name={MODEL}",
            f"hydra.run.dir={self._folder / 'hydra-server'}",
            log=self._folder / "server.log",
        )
        wait_until(self._healthy, "agl-server", timeout_s=START_WAIT_S)

    def start_controller(self) -> None:
        """Start agl-controller; it waits for the server by itself."""
        self._controller = start_process(
            "-m",
            "agentlightning.controller",
            "runner_type=local",
            f"agl_server.url={self.url}",
            f"agl_server.key={KEY}",
            "local_runner.poll_interval=0.1",
            f"local_runner.maximum_size={self._pool}",
            f"hydra.run.dir={self._folder / 'hydra-controller'}",
            log=self._folder / "controller.log",
            env={"SCENE_DIR": str(self._folder)},
        )

    def kill_server(self) -> None:
        """SIGKILL agl-server: every rollout and event is gone."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()

    def hold_controller(self) -> None:
        """SIGSTOP agl-controller: nothing is started, and no end is noticed, until `release_controller`."""
        assert self._controller is not None
        self._controller.send_signal(signal.SIGSTOP)

    def release_controller(self) -> None:
        """SIGCONT agl-controller."""
        assert self._controller is not None
        self._controller.send_signal(signal.SIGCONT)

    def kill_controller(self) -> None:
        """SIGKILL agl-controller: its agents live on, and nobody watches them."""
        assert self._controller is not None
        self._controller.kill()
        self._controller.wait()

    def stop(self) -> None:
        """End both; the controller ends its agents."""
        for process in (self._controller, self._server):
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGCONT)  # a held one would not notice
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def get(self, path: str) -> Any:
        """GET JSON from the server."""
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the server; its JSON answer, or None."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
            method=method,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as response:
            text = response.read()
        return json.loads(text) if text else None

    def rollouts(self) -> dict[str, dict[str, Any]]:
        """Every record on the server, by id."""
        states = "&".join(f"state_in={state}" for state in ("queuing", "running", "succeeded", "failed"))
        return {record["rollout_id"]: record for record in self.get(f"/api/rollouts?{states}&limit=100000")}

    def events(self, rollout_id: str) -> list[dict[str, Any]]:
        """The raw events of a rollout."""
        return self.get(f"/api/rollouts/{rollout_id}/events")

    def _healthy(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self._folder / "server.log").read_text()
        with contextlib.suppress(urllib.error.URLError, OSError):
            return self.get("/healthz") == {"status": "ok"}
        return False
