"""The rig's server, agents included, as a process that can be killed: `python -m tests.rig.server_process <port>`."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.rig.processes import free_port, start_process, wait_until


class ServerProcess:
    """Handle of the process. Use as a context; a server that was started again serves at the same address.

    Args:
        log: Its output goes there.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> ServerProcess:
        self.start()
        wait_until(self._answers, "the server", timeout_s=120)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it; it answers some seconds later."""
        self._process = start_process("-m", "tests.rig.server_process", str(self._port), log=self._log)

    def kill(self) -> None:
        """SIGKILL: everything that it knows is gone, its agents too."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/healthz", trust_env=False, verify=False).status_code == 200
        except httpx.TransportError:
            return False


def main(port: int) -> None:
    """Serve until killed."""
    from tests.rig.server import AglServer

    server = AglServer()
    server.port = port
    server.start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
