"""One writer per output folder: a lock that its holder's death releases, whatever kind of death.

`flock(2)` belongs to the open file: it is gone with the process, also after SIGKILL. A forked child inherits the open
file and would keep a dead trainer's lock for as long as it lives, as loader workers do for seconds, so children close
their copy at once. On file systems without locks, or with locks that each node keeps for itself, the life number of
`run_identity` has to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from agl_async_ckpt.exceptions import DamagedStateError, FolderInUseError, StateWriteError
from agl_async_ckpt.storage.files import unwritable
from agl_async_ckpt.storage.layout import LOCK_FILE_NAME
from agl_async_ckpt.storage.small_json import Bounds, read_json

log = logging.getLogger(__name__)

POLL_S = 0.2
_HELD = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})
"""Answers for a lock that another process has; EACCES where fcntl locks stand for it (SMB, some NFS): see fcntl(2)."""
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_MAX_HOLDER_BYTES = 4096
_MAX_TIME_S = 2**35
"""Unix seconds, in the year 3058; a later time cannot be written as a date everywhere."""
_guard = threading.Lock()
_held: weakref.WeakSet[OutputLock] = weakref.WeakSet()


@dataclass(frozen=True)
class Holder:
    """A process that took a lock, for people.

    Attributes:
        host: Where it runs.
        pid: Its number there.
        since: Unix seconds.
    """

    host: str
    pid: int
    since: Annotated[float, Bounds(0, _MAX_TIME_S)]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class OutputLock:
    """The lock of one output folder, held from its creation to `release`, or to the end of the process.

    A second trainer in the same process takes it over: the first one's `fit()` cannot be running any more, and its
    life number stops it if it is.
    """

    def __init__(self, output_dir: Path, *, wait_s: float) -> None:
        """Take the lock.

        Args:
            output_dir: An existing folder.
            wait_s: How long to wait for another process to release it, seconds.

        Raises:
            FolderInUseError: It is still held then; names the holder's host and process.
            StateWriteError: The lock file cannot be opened for writing, or the file system refuses to lock it.
        """
        self.path = output_dir / LOCK_FILE_NAME
        self._fd: int | None = None
        with _guard:
            for other in list(_held):
                if other._fd is not None and _is_file(other._fd, self.path):
                    self._fd, other._fd = other._fd, None
        if self._fd is None:
            self._fd = _open(self.path)
            try:
                self._wait(wait_s)
            except BaseException:
                self.release()
                raise
        with _guard:
            _held.add(self)
        self._note_holder()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Let the next trainer in. The file stays: removing it would let two hold two files of one name."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                # Closing alone would leave it with a child that was forked a moment ago and has not closed its copy.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close this process's copy without unlocking: for a forked child."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _wait(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        told = False
        assert self._fd is not None
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    log.warning(
                        "%s cannot be locked (%s): a second trainer in this output folder is noticed only when one "
                        "saves.",
                        self.path,
                        error.strerror,
                    )
                    return
                if error.errno not in _HELD:
                    raise _refused(self.path, error) from error
                if time.monotonic() >= deadline:
                    raise _in_use(self.path, wait_s, error) from None
                if not told:
                    log.info(
                        "Waiting up to %g s for %s, held by %s.", wait_s, self.path, _name_holder(self.path.parent)
                    )
                    told = True
                time.sleep(POLL_S)
            else:
                return

    def _note_holder(self) -> None:
        text = json.dumps(asdict(Holder(socket.gethostname(), os.getpid(), time.time()))) + "\n"
        assert self._fd is not None
        with contextlib.suppress(OSError):  # for people only; a full disk shows elsewhere
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)


def read_holder(output_dir: Path) -> Holder | None:
    """Read who took the lock of an output folder last; None if unknown."""
    try:
        return read_json(output_dir / LOCK_FILE_NAME, Holder, _MAX_HOLDER_BYTES)
    except DamagedStateError:
        return None


def current_holder(output_dir: Path) -> str | None:
    """Say which process writes into an output folder now; None if no other does, or if locks do not tell.

    Tries the lock for an instant, read-only, and lets go of it: a start that comes just then tries again after
    `POLL_S`.
    """
    return _name_holder(output_dir) if _is_locked(output_dir) else None


def locks_work(output_dir: Path) -> bool:
    """Tell whether the lock of an output folder can be asked for at all: some file systems have no locks."""
    return _is_locked(output_dir) is not None


def _is_locked(output_dir: Path) -> bool | None:
    """Tell whether another process has the lock; None if that cannot be told."""
    try:
        fd = os.open(output_dir / LOCK_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in _HELD else None
    finally:
        os.close(fd)
    return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise unwritable(path.parent, error) from error


def _refused(path: Path, error: OSError) -> StateWriteError:
    return StateWriteError(
        f"{path} cannot be locked ({error.strerror}).",
        act="Nothing was trained. Repair the file system of trainer.default_local_dir, or set another one.",
        errno=error.errno,
    )


def _in_use(path: Path, wait_s: float, error: OSError) -> FolderInUseError:
    holder, rows = read_holder(path.parent), [("host", "unknown"), ("pid", "unknown"), ("since", "unknown")]
    if holder is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
        rows = [("host", holder.host), ("pid", str(holder.pid)), ("since", since)]
    if error.errno == errno.EACCES:
        rows.append(("lock", f"{error.strerror}, which some file systems answer for a lock that is held"))
    return FolderInUseError(
        f"Another trainer writes into {path.parent}; waited {wait_s:g} s for it to end.",
        rows,
        "End that one first, or set another trainer.default_local_dir. "
        "agentlightning.async_checkpoint.lock_wait_s sets how long to wait.",
    )


def _name_holder(output_dir: Path) -> str:
    return str(read_holder(output_dir) or "an unknown process")


def _is_file(fd: int, path: Path) -> bool:
    """Tell whether an open file is the one that bears the name now: not after its folder was moved away."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _leave_to_parent() -> None:
    """Close the copies in a forked child: they would keep a dead parent's locks."""
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have held it at the fork
    for lock in list(_held):
        lock.forget()  # an unlock here would unlock the parent


os.register_at_fork(after_in_child=_leave_to_parent)
