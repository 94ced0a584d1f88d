"""One writer per output folder: what a second trainer meets, and when the first one's lock is gone."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agl_async_ckpt.exceptions import FolderInUseError, StateWriteError
from agl_async_ckpt.folder import lock as lock_module
from agl_async_ckpt.folder.lock import OutputLock, current_holder, locks_work, read_holder
from agl_async_ckpt.storage.layout import LOCK_FILE_NAME

HOLDER = """
import os, sys, time
from pathlib import Path
from agl_async_ckpt.folder.lock import OutputLock
held = OutputLock(Path(sys.argv[1]), wait_s=float(sys.argv[2]))
if sys.argv[3] == "alone":
    print(-1, flush=True)
elif os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def is_held(lock: OutputLock) -> bool:
    """Whether this object has the lock, and no other of this process."""
    return lock._fd is not None


@contextmanager
def holder(folder: Path, *, wait_s: float = 0, with_child: bool = False) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that has the lock, and the pid of its forked child, if any; both are gone afterwards."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(wait_s), "with a child" if with_child else "alone"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_second_process_is_refused_with_host_and_pid(tmp_path: Path) -> None:
    """The message leads to the process that has to end first."""
    with holder(tmp_path) as (process, _), pytest.raises(FolderInUseError) as caught:
        OutputLock(tmp_path, wait_s=0)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert f"pid:   {process.pid}" in text
    assert f"host:  {socket.gethostname()}" in text
    assert "lock_wait_s" in text


def test_second_process_waits_until_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says whom it waits for, once."""
    polls = []

    def poll(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            process.kill()
            process.wait()

    with holder(tmp_path) as (process, _), caplog.at_level(logging.INFO, "agl_async_ckpt"):
        monkeypatch.setattr(lock_module.time, "sleep", poll)
        lock = OutputLock(tmp_path, wait_s=30)
        assert is_held(lock)
        assert len(polls) == 3
        lock.release()
    told = [record.getMessage() for record in caplog.records if "Waiting" in record.getMessage()]
    assert len(told) == 1
    assert f"process {process.pid} on {socket.gethostname()}" in told[0]


def test_kill_frees_the_lock_though_a_forked_child_lives(tmp_path: Path) -> None:
    """Loader workers outlive a killed trainer by seconds; they write nothing, so nobody has to wait for them."""
    with holder(tmp_path, with_child=True) as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)  # still there
        lock = OutputLock(tmp_path, wait_s=0)
        assert is_held(lock)
        lock.release()


def test_own_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    """In the child the lock is gone; in the parent it stays."""
    lock = OutputLock(tmp_path, wait_s=0)
    pid = os.fork()
    if pid == 0:
        os._exit(int(is_held(lock)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_held(lock)
    assert not _free_for_others(tmp_path)
    lock.release()
    assert _free_for_others(tmp_path)


def test_second_trainer_of_the_same_process_takes_over(tmp_path: Path) -> None:
    """In a notebook the first one, which an error ended, is often still referenced; its release changes nothing."""
    first = OutputLock(tmp_path, wait_s=0)
    second = OutputLock(tmp_path / ".", wait_s=0)
    assert (is_held(first), is_held(second)) == (False, True)
    first.release()
    assert not _free_for_others(tmp_path)
    second.release()
    assert _free_for_others(tmp_path)


def test_lock_ends_with_its_object(tmp_path: Path) -> None:
    """A trainer that was dropped without an end of its own holds nothing."""
    lock = OutputLock(tmp_path, wait_s=0)
    assert not _free_for_others(tmp_path)
    del lock
    gc.collect()
    assert _free_for_others(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Training goes on: the life number guards what is published."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    OutputLock(tmp_path, wait_s=0).release()
    assert "cannot be locked" in caplog.text
    assert str(tmp_path / LOCK_FILE_NAME) in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EBADF])
def test_other_refusals_of_the_lock_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An I/O error is no reason to train without a lock: path, reason, next act; and the descriptor is closed."""

    def fail(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StateWriteError, match=os.strerror(number)) as caught:
        OutputLock(tmp_path, wait_s=0)
    assert caught.value.errno == number
    assert f"{tmp_path / LOCK_FILE_NAME} cannot be locked" in str(caught.value)
    assert "Nothing was trained." in str(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert (current_holder(tmp_path), locks_work(tmp_path)) == (None, False)


def test_held_lock_that_is_answered_by_eacces_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As SMB does, and every file system that makes fcntl's locks of it; once it is free the trainer has it."""
    real, polls = fcntl.flock, []

    def as_smb(fd: int, operation: int) -> None:
        try:
            real(fd, operation)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    def poll(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 2:
            process.kill()
            process.wait()

    monkeypatch.setattr(fcntl, "flock", as_smb)
    with holder(tmp_path) as (process, _), caplog.at_level(logging.INFO, "agl_async_ckpt"):
        with pytest.raises(FolderInUseError) as caught:
            OutputLock(tmp_path, wait_s=0)
        assert f"pid:   {process.pid}" in str(caught.value)
        assert "lock:  Permission denied, which some file systems answer for a lock that is held" in str(caught.value)
        assert current_holder(tmp_path) == f"process {process.pid} on {socket.gethostname()}"
        assert locks_work(tmp_path)
        monkeypatch.setattr(lock_module.time, "sleep", poll)
        OutputLock(tmp_path, wait_s=30).release()
    assert len(polls) == 2
    assert f"held by process {process.pid}" in caplog.text


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As at every start."""
    (tmp_path / LOCK_FILE_NAME).mkdir()
    with pytest.raises(StateWriteError, match="cannot be written") as caught:
        OutputLock(tmp_path, wait_s=0)
    assert f"{tmp_path} cannot be written ({LOCK_FILE_NAME}: Is a directory)" in str(caught.value)
    assert f"Make {LOCK_FILE_NAME} in trainer.default_local_dir writable" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"7", b'{"host": "a"}', b"\xff", b"[" * 9000),
        b'{"host": "a", "pid": Infinity, "since": 1}',
        b'{"host": "a", "pid": 1, "since": 1' + b"0" * 400 + b"}",
        b'{"host": "a", "pid": 1, "since": NaN}',
        b'{"host": "a", "pid": 1, "since": 1e20}',
    ],
    ids=lambda data: repr(data[:50]),
)
def test_unreadable_holder_is_unknown(tmp_path: Path, data: bytes) -> None:
    """The lock counts, not the text in its file."""
    (tmp_path / LOCK_FILE_NAME).write_bytes(data)
    assert read_holder(tmp_path) is None
    lock = OutputLock(tmp_path, wait_s=0)
    known = read_holder(tmp_path)
    assert known is not None
    assert known.pid == os.getpid()
    lock.release()


def _free_for_others(folder: Path) -> bool:
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run([sys.executable, "-c", code, str(folder / LOCK_FILE_NAME)], capture_output=True, check=False)
    return done.returncode == 0


def test_moved_folder_does_not_lend_its_lock_to_a_new_one_of_its_name(tmp_path: Path) -> None:
    """A trainer whose folder was moved away holds the moved one; another process may have the new one."""
    old = OutputLock(_made(tmp_path / "out"), wait_s=0)
    (tmp_path / "out").rename(tmp_path / "moved")
    with holder(_made(tmp_path / "out")), pytest.raises(FolderInUseError):
        OutputLock(tmp_path / "out", wait_s=0)
    assert is_held(old)
    old.release()


def test_released_lock_is_free_though_a_child_has_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked a moment ago has not closed its copy yet."""
    lock = OutputLock(tmp_path, wait_s=0)
    assert lock._fd is not None
    copy = os.dup(lock._fd)  # what a fork makes
    lock.release()
    assert _free_for_others(tmp_path)
    os.close(copy)


def test_fifo_in_place_of_the_lock_blocks_no_look(tmp_path: Path) -> None:
    """Who holds it is unknown then."""
    os.mkfifo(tmp_path / LOCK_FILE_NAME)
    assert read_holder(tmp_path) is None
    assert current_holder(tmp_path) is None


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
