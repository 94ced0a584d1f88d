"""`stop`: leaves a request that a trainer finds, and waits for it, and not for one that is not there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl_async_ckpt.cli import stop
from agl_async_ckpt.folder.lock import OutputLock
from agl_async_ckpt.folder.stop_request import StopRequest, read_request, remove_request
from agl_async_ckpt.storage.layout import LOCK_FILE_NAME, STOP_NAME, TRACKER_NAME
from tests.cli.conftest import Cli

Trainer = Callable[[Callable[[], None]], None]


@pytest.fixture
def trainer(out: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """Holds the folder like a trainer; acts once it has seen the request, then lets go."""
    monkeypatch.setattr(stop, "POLL_S", 0.02)
    lock = OutputLock(out, wait_s=0)
    threads: list[threading.Thread] = []

    def start(act: Callable[[], None]) -> None:
        def work() -> None:
            while read_request(out) is None:
                time.sleep(0.01)
            act()
            lock.release()

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(30)
    lock.release()


def test_stop_leaves_a_request_and_names_the_trainer(cli: Cli, out: Path) -> None:
    """It can be read back, with the time and what asked for it; the command does not wait."""
    lock = OutputLock(out, wait_s=0)
    before = time.time()
    result = cli("stop", out)
    lock.release()
    assert (result.code, result.err) == (0, "")
    assert f"on {socket.gethostname()} to stop after its step, in {out}" in result.out
    request = read_request(out)
    assert request is not None
    assert before <= request.requested_at <= time.time()
    assert (request.by, request.host) == ("agl-async-ckpt stop", socket.gethostname())


def test_stop_waits_until_the_trainer_has_let_go(cli: Cli, out: Path, trainer: Trainer) -> None:
    """Not only until the request is gone; then it names the newest checkpoint."""
    order: list[str] = []

    def act() -> None:
        (out / TRACKER_NAME).write_text("7")
        remove_request(out)
        time.sleep(0.2)
        order.append("let go")

    trainer(act)
    result = cli("stop", out, "--wait", "30")
    order.append("returned")
    assert (result.code, order) == (0, ["let go", "returned"])
    assert "The trainer has stopped; step 7 is its newest checkpoint." in result.out


def test_stop_says_that_a_trainer_has_died_instead(cli: Cli, out: Path, trainer: Trainer) -> None:
    """Its lock is free and the request is still there."""
    trainer(lambda: None)
    result = cli("stop", out, "--wait", "30")
    assert result.code == 0
    assert "The trainer has ended; step 6 is its newest checkpoint." in result.out


def test_stop_gives_up_after_its_time(cli: Cli, out: Path) -> None:
    """Exit code 1, the trainer named, and the request stays for it."""
    lock = OutputLock(out, wait_s=0)
    result = cli("stop", out, "--wait", "0.1")
    lock.release()
    assert result.code == 1
    assert "has not stopped within 0.1 s. The request stays." in result.err
    assert read_request(out) is not None


def test_stop_does_not_wait_for_a_trainer_that_is_not_there(cli: Cli, out: Path) -> None:
    """The last one ran on this host and its lock is free: a hook must not hold up the end for nothing."""
    OutputLock(out, wait_s=0).release()
    result = cli("stop", out, "--wait", "600")
    assert result.code == 0
    assert "no trainer writes there now" in result.out


def assert_waits_for_the_answer(cli: Cli, out: Path) -> None:
    """Not until the request is gone has the trainer stopped."""
    assert cli("stop", out, "--wait", "0.1").code == 1
    timer = threading.Timer(0.2, remove_request, [out])
    timer.start()
    result = cli("stop", out, "--wait", "30")
    timer.join()
    assert (result.code, "The trainer has stopped" in result.out) == (0, True)


def test_stop_waits_for_the_answer_where_locks_do_not_tell(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last trainer ran on another host, whose locks may not be seen here: the request has to be gone."""
    monkeypatch.setattr(stop, "POLL_S", 0.02)
    (out / LOCK_FILE_NAME).write_text('{"host": "elsewhere", "pid": 7, "since": 1.0}')
    assert_waits_for_the_answer(cli, out)


def test_stop_refuses_what_is_no_output_folder(cli: Cli, out: Path, tmp_path: Path) -> None:
    """A step of a run, a folder in which no run has begun: nothing is written there."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, text in ((out / "global_step_4", "is no output folder"), (empty, "No run has begun in")):
        result = cli("stop", path)
        assert (result.code, text in result.err) == (2, True)
        assert not (path / STOP_NAME).exists()


def test_stop_waits_for_the_answer_where_there_are_no_locks(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last trainer ran on this host, and nothing says that it is gone: some file systems lock nothing."""

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    OutputLock(out, wait_s=0).release()
    monkeypatch.setattr(stop, "POLL_S", 0.02)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert_waits_for_the_answer(cli, out)


def test_stop_sees_a_trainer_whose_lock_is_answered_by_eacces(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB's answer for a held lock: it is named, and waited for."""

    def held(fd: int, operation: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    OutputLock(out, wait_s=0).release()
    monkeypatch.setattr(stop, "POLL_S", 0.02)
    monkeypatch.setattr(fcntl, "flock", held)
    result = cli("stop", out, "--wait", "0.1")
    assert result.code == 1
    assert f"Asked process {os.getpid()} on {socket.gethostname()} to stop after its step" in result.out
    assert "has not stopped within 0.1 s. The request stays." in result.err


def test_stop_says_that_the_lock_does_not_tell(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that a trainer is there, nor that none is."""

    def fail(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    OutputLock(out, wait_s=0).release()
    monkeypatch.setattr(fcntl, "flock", fail)
    result = cli("stop", out)
    assert (result.code, "no trainer" in result.out) == (0, False)
    assert "Whether a trainer writes there, its lock does not tell." in result.out


def test_stop_says_that_its_request_is_gone_though_the_trainer_is_not(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has removed it, or the trainer has seen it and takes its time: it is not said to be there."""
    monkeypatch.setattr(stop, "POLL_S", 0.02)
    lock = OutputLock(out, wait_s=0)
    timer = threading.Timer(0.1, remove_request, [out])
    timer.start()
    result = cli("stop", out, "--wait", "0.5")
    timer.join()
    lock.release()
    assert result.code == 1
    assert result.err.startswith("agl-async-ckpt: Process ")
    assert "The request is gone" in result.err


def test_stop_in_a_folder_that_cannot_be_written_names_the_request(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the temporary file that it would have come from; and what to do instead."""

    def refuse(output_dir: Path, by: str) -> StopRequest:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{output_dir}/.{STOP_NAME}.1.0123abcd.tmp")

    monkeypatch.setattr(stop, "request_stop", refuse)
    result = cli("stop", out)
    assert (result.code, ".tmp" in result.err, "Traceback" in result.err) == (2, False, False)
    assert f"{out / STOP_NAME} cannot be left: Permission denied.\n" in result.err
    assert "SIGTERM" in result.err


def test_stop_with_a_folder_in_the_place_of_its_request_names_it(cli: Cli, out: Path) -> None:
    """A rename onto it fails; no temporary file is left."""
    (out / STOP_NAME).mkdir()
    before = sorted(path.name for path in out.iterdir())
    result = cli("stop", out)
    assert result.code == 2
    assert f"{out / STOP_NAME} cannot be left: Is a directory." in result.err
    assert sorted(path.name for path in out.iterdir()) == before


def test_stop_says_what_is_wrong_with_the_tracker(cli: Cli, out: Path, trainer: Trainer) -> None:
    """A torn one is not "no checkpoint"."""
    trainer(lambda: (out / TRACKER_NAME).write_text(""))
    result = cli("stop", out, "--wait", "30")
    assert f"The trainer has ended; {out / TRACKER_NAME} holds no number (it is empty)." in result.out


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan", "soon", "10m", ""])
def test_stop_refuses_a_wait_that_is_no_time(cli: Cli, out: Path, seconds: str) -> None:
    """By argparse, in words that a user knows."""
    result = cli("stop", out, f"--wait={seconds}")
    assert result.code == 2
    assert f"argument --wait: must be a number of seconds, 0 or more, got {seconds!r}" in result.err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"requested_at": 1}',
        '{"requested_at": 1, "by": "", "host": "", "pid": Infinity}',
        f'{{"requested_at": 1{"0" * 400}, "by": "", "host": "", "pid": 1}}',
        "x" * 10_000,
    ],
)
def test_any_content_is_a_request_of_the_time_of_the_file(tmp_path: Path, content: str) -> None:
    """`touch`, `echo`, or a file that was cut: whoever leaves one means it."""
    path = tmp_path / STOP_NAME
    path.write_text(content)
    request = read_request(tmp_path)
    assert request == StopRequest(path.stat().st_mtime, by=f"the file {path}")
    assert str(request) == f"the file {path}"
    remove_request(tmp_path)
    assert read_request(tmp_path) is None
    remove_request(tmp_path)  # nothing there is no error
