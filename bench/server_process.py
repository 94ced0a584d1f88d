"""agl-server in a process of its own, on a free loopback port."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from tests.rig.processes import free_port

START_WAIT_S = 120.0


@contextmanager
def serving() -> Iterator[Any]:
    """Run a server; yields what stands for agent-lightning's rollout manager: an object with its client."""
    from agentlightning.client import AgentLightningSyncClient

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    loopback = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        command = [sys.executable, "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}", "key=bench"]
        process = subprocess.Popen(
            [*command, "default_proxy.model_name=policy", f"hydra.run.dir={folder}"],
            cwd=folder,
            env=os.environ | loopback,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with AgentLightningSyncClient(
                key="bench", base_url=url, timeout=120.0, trust_env=False, max_retries=0
            ) as client:
                _wait(url, process)
                yield SimpleNamespace(client=client)
        finally:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_WAIT_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise RuntimeError(f"agl-server ended with exit code {process.returncode}")
        try:
            if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"agl-server did not answer within {START_WAIT_S:g} s")
