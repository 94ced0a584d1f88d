"""Start processes and be sure that all of them, and all that they start in turn, are gone afterwards. Linux only.

Ray's processes and the agents leave the session and the parent of whoever started them. The demo makes itself the
"child subreaper" of its descendants: an orphan becomes its own child, so walking down from its own pid always finds
every process that the demo has caused, and no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the demo, by way of its clean-up."""
TERMINATE_WAIT_S = 8.0
"""Time between SIGTERM and SIGKILL; agl-controller needs up to 5 s to end its agents."""

_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """In the child: ask for SIGTERM should the demo itself be killed with SIGKILL and have no chance to clean up."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Processes:
    """The processes of one run. Use as a context manager: leaving it ends them all."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed; the demo needs Linux")
        return self

    def __exit__(self, *_exc: object) -> None:
        # An impatient Ctrl-C must not cut the clean-up short.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        try:
            self.stop_all()
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, command: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path) -> subprocess.Popen[bytes]:
        """Start `command` in a session of its own, so that Ctrl-C reaches the demo only; output goes to `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._started[process.pid] = process
        return process

    def living(self, *, except_below: Iterable[int] = ()) -> list[psutil.Process]:
        """Living descendants of the demo, without the given pids and what is below them."""
        self._reap()
        spared = set(except_below)
        for pid in list(spared):
            with contextlib.suppress(psutil.NoSuchProcess):
                spared.update(child.pid for child in psutil.Process(pid).children(recursive=True))
        return [p for p in psutil.Process().children(recursive=True) if p.pid not in spared and _alive(p)]

    def kill_and_sweep(
        self,
        process: subprocess.Popen[bytes],
        *,
        spare: Iterable[int],
        patience_s: float,
        first: psutil.Process | None = None,
    ) -> None:
        """SIGKILL `process` and see to it that what it started is gone as well.

        Ray notices the death of its driver and ends by itself; what is left after `patience_s` is killed by pid.

        Args:
            process: The victim.
            spare: Pids that live on, with all that is below them.
            patience_s: Seconds to wait for the rest to end by itself.
            first: What `process` has started and is killed even before it.
        """
        spare = list(spare)
        if first:
            _signal([first], signal.SIGKILL)
        process.kill()
        process.wait()
        deadline = time.monotonic() + patience_s
        while self.living(except_below=spare) and time.monotonic() < deadline:
            time.sleep(0.2)
        while left := self.living(except_below=spare):
            _signal(left, signal.SIGKILL)
            time.sleep(0.1)

    def stop_all(self) -> None:
        """End everything: SIGTERM first, SIGKILL for what is left."""
        deadline = time.monotonic() + TERMINATE_WAIT_S
        _signal(self.living(), signal.SIGTERM)
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        while left := self.living():
            _signal(left, signal.SIGKILL)
            time.sleep(0.1)
        for process in self._started.values():
            process.wait()  # one that died after the last look

    def _reap(self) -> None:
        """Collect dead children: those started here through their Popen object, adopted orphans by pid."""
        for process in self._started.values():
            process.poll()
        for child in psutil.Process().children():
            if child.pid not in self._started:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        # psutil compares the start time first: a pid that was reused meanwhile is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
