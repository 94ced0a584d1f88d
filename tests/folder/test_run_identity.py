"""Which run a folder belongs to: one identity per folder, a copy is another run, and nothing is guessed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from agl_async_ckpt.exceptions import DamagedStateError, FolderInUseError, StateWriteError
from agl_async_ckpt.folder import run_identity
from agl_async_ckpt.folder.run_identity import (
    begin_life,
    is_latest_life,
    note_first_step,
    read_run,
    require_latest_life,
)
from agl_async_ckpt.storage.layout import RUN_FILE_NAME


def test_new_folder_gets_an_identity_of_its_own(tmp_path: Path) -> None:
    """The folder is created with it, parents included, before anything is enqueued."""
    first = begin_life(tmp_path / "a" / "b")
    second = begin_life(tmp_path / "c")
    assert first.run_id != second.run_id
    assert first.parent_run_id is None
    assert first.first_step is None
    assert read_run(tmp_path / "a" / "b") == first


def test_folder_keeps_its_identity(tmp_path: Path) -> None:
    """Whatever it is resumed from: a parent is recorded at the birth only."""
    first = begin_life(tmp_path)
    again = begin_life(tmp_path, parent_run_id="other")
    assert (again.run_id, again.parent_run_id, again.created_at) == (first.run_id, None, first.created_at)


def test_each_life_has_a_number_and_a_token(tmp_path: Path) -> None:
    """Two that begin at the same moment, where locks are absent, may take the same number; never the same token."""
    lives = [begin_life(tmp_path) for _ in range(3)]
    assert [life.life for life in lives] == [1, 2, 3]
    assert len({life.life_id for life in lives}) == 3
    assert (lives[0].host, lives[0].pid) == (socket.gethostname(), os.getpid())


def test_only_the_latest_life_may_publish(tmp_path: Path) -> None:
    """The refusal names both, so that a person can end the right one."""
    older = begin_life(tmp_path)
    require_latest_life(tmp_path, older)
    newer = begin_life(tmp_path)
    require_latest_life(tmp_path, newer)
    assert not is_latest_life(tmp_path, older)
    with pytest.raises(FolderInUseError) as caught:
        require_latest_life(tmp_path, older)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert f"life 1, process {os.getpid()} on {socket.gethostname()}" in text
    assert f"life 2, process {os.getpid()} on {socket.gethostname()}" in text


@pytest.mark.parametrize("damage", ["gone", "unreadable"])
def test_lost_record_stops_no_life(tmp_path: Path, damage: str) -> None:
    """Somebody removed it under a running trainer: no other life is known of."""
    life = begin_life(tmp_path)
    if damage == "gone":
        (tmp_path / RUN_FILE_NAME).unlink()
    else:
        (tmp_path / RUN_FILE_NAME).write_bytes(b"{")
    require_latest_life(tmp_path, life)


def test_identity_of_before_the_lives_is_read(tmp_path: Path) -> None:
    """A folder that an older version wrote goes on with its run id, from life 1."""
    life = begin_life(tmp_path)
    path = tmp_path / RUN_FILE_NAME
    values = json.loads(path.read_text())
    for name in ("life", "life_id", "host", "pid"):
        del values[name]
    path.write_text(json.dumps(values))
    again = begin_life(tmp_path)
    assert (again.run_id, again.life) == (life.run_id, 1)


def test_fork_names_its_parent(tmp_path: Path) -> None:
    """A folder that begins from another run's checkpoint says which."""
    assert begin_life(tmp_path / "fork", parent_run_id="parent").parent_run_id == "parent"
    again = read_run(tmp_path / "fork")
    assert again is not None
    assert again.parent_run_id == "parent"


def test_copied_folder_is_another_run(tmp_path: Path) -> None:
    """Both may be alive on one server: the copy adopts and deletes nothing of the original's."""
    original = note_first_step(tmp_path / "a", begin_life(tmp_path / "a"), 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = begin_life(tmp_path / "b")
    assert copy.run_id != original.run_id
    assert copy.parent_run_id == original.run_id
    assert copy.first_step == 3, "its steps still have input states"
    assert begin_life(tmp_path / "a").run_id == original.run_id
    assert begin_life(tmp_path / "b").run_id == copy.run_id


def test_moved_folder_is_the_same_run(tmp_path: Path) -> None:
    """A rename within a file system keeps the identity."""
    original = begin_life(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert begin_life(tmp_path / "b").run_id == original.run_id


def test_first_step_only_moves_down(tmp_path: Path) -> None:
    """A step that is saved again after a rollback below the first one counts; later ones change nothing."""
    identity = begin_life(tmp_path)
    identity = note_first_step(tmp_path, identity, 5)
    written = (tmp_path / RUN_FILE_NAME).stat().st_mtime_ns
    assert note_first_step(tmp_path, identity, 6) is identity
    assert note_first_step(tmp_path, identity, 5) is identity
    assert (tmp_path / RUN_FILE_NAME).stat().st_mtime_ns == written
    identity = note_first_step(tmp_path, identity, 2)
    assert identity.first_step == 2
    assert read_run(tmp_path) == identity


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    """A later version may note more."""
    identity = begin_life(tmp_path)
    path = tmp_path / RUN_FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "red"}))
    assert read_run(tmp_path) == identity


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"null", b"7", b"[]", b'"run_id"', b"\xff", b"{}", b"[" * 100_000),
        *(
            b'{"run_id": 7}',
            b'{"run_id": "x", "first_step": "3"}',
            b'{"run_id": null}',
            b'{"run_id": "x", "life": "2"}',
        ),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_damaged_identity_is_refused_by_path(tmp_path: Path, data: bytes) -> None:
    """A new id in its place would leave the run's rollouts on the server for ever, so a person decides."""
    (tmp_path / RUN_FILE_NAME).write_bytes(data)
    with pytest.raises(DamagedStateError) as caught:
        begin_life(tmp_path)
    assert str(tmp_path / RUN_FILE_NAME) in str(caught.value)
    assert "remove it to give the folder a new run id" in str(caught.value)
    assert (tmp_path / RUN_FILE_NAME).read_bytes() == data


def test_directory_in_place_of_the_identity_is_refused(tmp_path: Path) -> None:
    """As any other damage."""
    (tmp_path / RUN_FILE_NAME).mkdir()
    with pytest.raises(DamagedStateError, match=RUN_FILE_NAME):
        read_run(tmp_path)


def test_folder_without_an_identity_has_none(tmp_path: Path) -> None:
    """Also one that does not exist."""
    assert read_run(tmp_path) is None
    assert read_run(tmp_path / "missing") is None


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_file_in_place_of_the_folder_is_named(tmp_path: Path, below: str) -> None:
    """The output folder cannot be made: said with its path, before the first step."""
    (tmp_path / "out").write_text("")
    with pytest.raises(StateWriteError) as caught:
        begin_life(tmp_path / "out" / below)
    assert f"The output folder {tmp_path / 'out' / below} cannot be written" in str(caught.value)
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_failed_write_leaves_no_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The error says that nothing was trained, and a later start begins clean."""

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_identity, "write_all", fail)
    with pytest.raises(StateWriteError, match="Nothing was trained") as caught:
        begin_life(tmp_path)
    assert caught.value.errno == number
    assert os.strerror(number) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_record_that_was_removed_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the next save of the running trainer, with a warning; the run id stays, so its rollouts are found again."""
    life = note_first_step(tmp_path, begin_life(tmp_path), 2)
    (tmp_path / RUN_FILE_NAME).unlink()
    assert note_first_step(tmp_path, life, 5) == life
    assert read_run(tmp_path) == life
    assert "was removed" in caplog.text
