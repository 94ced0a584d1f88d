"""Processes that the tests start: bound to the life of the test process, output in a file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

# Ends with the test process, should that be killed and have no chance to clean up.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "  # PR_SET_PDEATHSIG, SIGTERM
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def start_process(*arguments: str, log: Path, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
    """Start `python <arguments>`, bound to the life of this process, output appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _BOUND, *arguments],
            env={**os.environ, "PYTHONPATH": _python_path(), **(env or {})},
            cwd=log.parent,
            stdout=kwargs.pop("stdout", output),
            stderr=output,
            **kwargs,
        )


def _python_path() -> str:
    """The repository first; then what the caller put there, such as another version of a framework."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def fork(action: Callable[[], object]) -> int:
    """Run `action` in a forked child, which never comes back into its caller; return its pid.

    It ends with status 0, or, once it has printed the error, with 1.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        action()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def free_port() -> int:
    """Find a port on loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = 60.0) -> Any:
    """Wait for a truthy value and return it.

    Raises:
        TimeoutError: Names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for: {what}")
        time.sleep(0.05)
