"""agl-server and agl-controller (local mode) as processes on a loopback port."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from cpu_training.processes import Processes
from cpu_training.settings import ASYNC_BATCH, ROLLOUTS_PER_INPUT

HOST = "127.0.0.1"
START_WAIT_S = 90.0


class DemoError(Exception):
    """The demo cannot go on; the message is one paragraph for the user."""


def last_lines(log: Path, count: int = 8) -> str:
    """The end of a log file, indented, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line[:200]}" for line in lines[-count:]) or "    (empty)"


def choose_port(wanted: int | None) -> int:
    """A loopback port for agl-server: `wanted` if it is free, any free one if None.

    Raises:
        DemoError: `wanted` is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            raise DemoError(
                f"Port {wanted} on {HOST} cannot be used for agl-server: {error.strerror}. "
                "Choose another with --port, or leave --port out to let the demo find a free one."
            ) from error
        return probe.getsockname()[1]


class Services:
    """The two services of a run."""

    def __init__(self, processes: Processes, *, port: int, model_dir: Path, run_dir: Path, env: Mapping[str, str]):
        self.url = f"http://{HOST}:{port}"
        self.key = secrets.token_hex(8)
        self._processes = processes
        self._port = port
        self._model_dir = model_dir
        self._run_dir = run_dir
        self._env = env
        self._running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    @property
    def pids(self) -> list[int]:
        """Pids of the running services."""
        return [process.pid for process, _ in self._running.values()]

    def start_server(self, while_waiting: Callable[[], None]) -> None:
        """Start agl-server and wait until it answers.

        Raises:
            DemoError: It ended, or did not answer in time.
        """
        self._start(
            "agl-server",
            "agentlightning.server",
            f"host={HOST}",
            f"port={self._port}",
            f"key={self.key}",
            f"default_proxy.model_name={self._model_dir}",
        )
        deadline = time.monotonic() + START_WAIT_S
        while not self._healthy():
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(
                    f"agl-server did not answer at {self.url} within {START_WAIT_S:.0f} s. "
                    f"Its log is {self._running['agl-server'][1]}."
                )
            while_waiting()

    def start_controller(self) -> None:
        """Start agl-controller, which runs an agent process per rollout."""
        self._start(
            "agl-controller",
            "agentlightning.controller",
            "runner_type=local",
            f"agl_server.url={self.url}",
            f"agl_server.key={self.key}",
            "local_runner.poll_interval=0.2",
            f"local_runner.maximum_size={ASYNC_BATCH * ROLLOUTS_PER_INPUT}",
        )

    def num_rollouts(self) -> int:
        """Rollouts that the server holds, in any state."""
        states = "&".join(f"state_in={state}" for state in ("queuing", "running", "succeeded", "failed"))
        request = urllib.request.Request(
            f"{self.url}/api/rollouts?{states}", headers={"Authorization": f"Bearer {self.key}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10.0) as response:
            return len(json.load(response))

    def kill_server(self) -> None:
        """SIGKILL agl-server: all rollouts and events it held are gone."""
        process, _ = self._running.pop("agl-server")
        process.kill()
        process.wait()

    def check(self) -> None:
        """Raise DemoError if a service has ended."""
        for name, (process, log) in self._running.items():
            if process.poll() is not None:
                raise DemoError(
                    f"{name} ended unexpectedly with exit code {process.returncode}. Its log is {log}; it ends with\n"
                    + last_lines(log)
                )

    def _start(self, name: str, module: str, *overrides: str) -> None:
        log = self._run_dir / "logs" / f"{name}.log"
        # Hydra writes the composed config of each service into a folder; keep it in the run's own.
        hydra_dir = self._run_dir / "logs" / f"{name}-hydra"
        command = [sys.executable, "-m", module, *overrides, f"hydra.run.dir={hydra_dir}"]
        self._running[name] = (self._processes.start(command, env=self._env, log=log, cwd=self._run_dir), log)

    def _healthy(self) -> bool:
        # A proxy in the environment must not be asked about a loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/healthz", timeout=2.0) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False
