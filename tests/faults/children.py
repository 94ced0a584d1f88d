"""A case in a forked child of the test process, watched or disturbed by strace.

The test process has imported torch and VERL and holds the trainers; forking it costs milliseconds, importing twelve
seconds. A child never comes back into pytest.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.calls import TRACED, Call, parse_trace
from tests.rig.processes import fork

PATIENCE_S = 60


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        killed: By a signal.
        error: Class name and message of what it raised, or None.
        is_os_error: It was an OSError, which StateWriteError is too.
        value: What it returned.
        calls: What it did to files, if it was traced.
    """

    killed: bool
    error: str | None = None
    is_os_error: bool = False
    value: Any = None
    calls: list[Call] = field(default_factory=list)

    @property
    def returned(self) -> bool:
        """It came to its end without an error."""
        return not self.killed and self.error is None


def why_no_tracing() -> str | None:
    """The reason why strace cannot be used here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        ended = run_child(lambda: 7, trace_in=Path("/"))
    except (OSError, RuntimeError) as error:
        return f"strace cannot attach to a process here: {error}"
    return None if ended.value == 7 else "strace disturbs the process that it watches"


def run_child(
    action: Callable[[], Any],
    *,
    trace_in: Path | None = None,
    inject: str | None = None,
    patience_s: float = PATIENCE_S,
) -> Ended:
    """Run `action` in a forked child.

    Args:
        action: What the child does; its result and errors come back.
        trace_in: Record the calls about files in this folder.
        inject: strace's expression, such as `fsync:signal=SIGKILL:when=2` (killed before the call has any effect) or
            `fsync:error=EIO:when=2` (the call has no effect and returns the error).
        patience_s: How long it may take.
    """
    ours, theirs = socket.socketpair()
    go_read, go_write = os.pipe()
    pid = fork(lambda: _be_child(action, theirs, go_read, go_write, ours))
    theirs.close()
    os.close(go_read)
    tracer: _Tracer | None = None
    reaped = False
    try:
        ours.settimeout(patience_s)
        assert ours.recv(1), "the child did not begin"  # else its first calls could be counted, or not
        if trace_in is not None or inject is not None:
            tracer = _Tracer(pid, inject, TRACED if trace_in is not None else (str(inject).partition(":")[0],))
        os.close(go_write)
        go_write = -1
        report = _receive(ours)
        _, status = os.waitpid(pid, 0)
        reaped = True
        calls = tracer.finish(trace_in) if tracer else []
    finally:
        ours.close()
        if go_write >= 0:
            os.close(go_write)
        if not reaped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if tracer:
            tracer.close()
    if os.WIFSIGNALED(status):
        return Ended(killed=True, calls=calls)
    if report is None:
        raise RuntimeError(f"the child ended with status {status} and without a word")
    error, is_os_error, value = report
    return Ended(False, error, is_os_error, value, calls)


def _be_child(
    action: Callable[[], Any], report: socket.socket, go_read: int, go_write: int, other: socket.socket
) -> None:
    gc.disable()  # a finaliser at a random place would make the trace differ
    os.close(go_write)
    other.close()
    report.sendall(b".")
    select.select([go_read], [], [])  # until strace is there; not among the traced calls
    result: tuple[str | None, bool, Any]
    try:
        result = (None, False, action())
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError):
            text += "\n" + "".join(traceback.format_exception(error)[-4:])
        result = (text, isinstance(error, OSError), None)
    # `send` is no file call: the report is never hit by what was meant for the save.
    report.sendall(pickle.dumps(result))


def _receive(connection: socket.socket) -> Any:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return pickle.loads(data) if data else None


class _Tracer:
    """strace on a running process and its threads; each thread's calls in a file of its own."""

    def __init__(self, pid: int, inject: str | None, traced: Sequence[str]) -> None:
        self._pid = pid
        self._folder = Path(tempfile.mkdtemp(prefix="faults-trace-"))
        command = ["strace", "-ff", "-y", "-s", "0", "-p", str(pid), "-o", str(self._folder / "trace")]
        command += ["-e", f"trace={','.join(traced)}", "-e", "signal=none"]
        command += ["-e", f"inject={inject}"] if inject else []
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if b"attached" not in line:
            self.close()
            raise RuntimeError(line.decode(errors="replace").strip() or "it says nothing")

    def finish(self, inside: Path | None) -> list[Call]:
        """Wait for its end, which follows the child's; the child's calls about files in `inside`."""
        self._process.wait(PATIENCE_S)
        trace = self._folder / f"trace.{self._pid}"
        return parse_trace(trace.read_text(), inside) if inside is not None else []

    def close(self) -> None:
        """Leave nothing behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)
