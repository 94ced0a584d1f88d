"""Lines survive kills, torn ones are repaired, and a disk that is full is no secret."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import CheckpointNotFoundError, DamagedStateError, StateWriteError
from agl_async_ckpt.ledger.entry import End, Start, Step, parse_line, to_line
from agl_async_ckpt.ledger.reader import read_ledger
from agl_async_ckpt.ledger.writer import LedgerWriter
from agl_async_ckpt.storage.layout import LEDGER_NAME
from tests.ledger.story import Story, dataset

STORY = Story(dataset(20), 2, 5).start().steps(3).end()
LINES = [to_line(entry) for entry in STORY.entries]


def test_every_kind_of_line_comes_back_equal() -> None:
    """Start, steps, end."""
    assert [type(entry) for entry in STORY.entries] == [Start, Step, Step, Step, End]
    assert [parse_line(line) for line in LINES] == STORY.entries
    assert all(line.count(b"\n") == 1 and line.isascii() for line in LINES)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        LINES[1][:-9],
        LINES[1].replace(b'"step":1', b'"step":true'),
        LINES[1].replace(b'"pulled":[', b'"pulled":[7,'),
        LINES[0].replace(b'"none"', b'"other"'),
        LINES[0].replace(b'"v":1', b'"v":2'),
        LINES[0].replace(b'"event":"start"', b'"event":"pause"'),
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=["empty", "object", "list", "number", "cut", "bool", "item", "kind", "newer", "event", "bytes", "nested"],
)
def test_line_that_is_none_is_refused(line: bytes) -> None:
    """With ValueError and nothing else."""
    with pytest.raises(ValueError, match=r".+"):
        parse_line(line)


def test_unknown_keys_are_ignored() -> None:
    """A later version may add some."""
    assert parse_line(LINES[1].replace(b"{", b'{"later":1,', 1)) == STORY.entries[1]


@pytest.mark.parametrize("cut", [1, 2, 30, len(LINES[3]) - 1])
def test_torn_last_line_is_repaired_at_the_next_start(tmp_path: Path, cut: int) -> None:
    """The part of a line goes; one that lacks only its newline is finished."""
    path = tmp_path / LEDGER_NAME
    path.write_bytes(b"".join(LINES[:4])[:-cut])
    assert read_ledger(tmp_path).unfinished
    writer = LedgerWriter(tmp_path)
    writer.append(STORY.entries[4])
    writer.close()
    kept = 4 if cut == 1 else 3
    assert path.read_bytes() == b"".join([*LINES[:kept], LINES[4]])


def test_long_torn_line_and_file_of_one_torn_line_are_repaired(tmp_path: Path) -> None:
    """Also where the line is longer than what is read at once."""
    path = tmp_path / LEDGER_NAME
    path.write_bytes(b"x" * 200_000)
    LedgerWriter(tmp_path).close()
    assert path.read_bytes() == b""
    path.write_bytes(LINES[0] + b"x" * 200_000)
    LedgerWriter(tmp_path).close()
    assert path.read_bytes() == LINES[0]


def test_lines_are_there_for_a_reader_at_once_and_synced_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step costs no fsync; `sync` does exactly one."""
    synced: list[int] = []
    writer = LedgerWriter(tmp_path / "new" / "folder")
    monkeypatch.setattr(os, "fsync", synced.append)
    for entry in STORY.entries:
        writer.append(entry)
    assert list(read_ledger(tmp_path / "new" / "folder").entries) == STORY.entries
    assert synced == []
    writer.sync()
    assert len(synced) == 1
    writer.close()


def test_full_disk_is_said_once_and_refuses_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on with one warning; the save raises; once there is space, no line is missing and none is torn."""
    writer = LedgerWriter(tmp_path)
    writer.append(STORY.entries[0])
    really_write = os.write

    def write(fd: int, data: Any) -> int:
        if len(data) > 10:
            return really_write(fd, bytes(data[: len(data) // 2]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(os, "write", write)
        for entry in STORY.entries[1:4]:
            writer.append(entry)
        assert [record.message for record in caplog.records] == [
            f"{tmp_path / LEDGER_NAME} cannot be written (No space left on device): its lines wait in memory. "
            "The next save is refused unless it can."
        ]
        assert (tmp_path / LEDGER_NAME).read_bytes() == LINES[0]
        with pytest.raises(StateWriteError, match="No space left") as caught:
            writer.sync()
        assert caught.value.errno == errno.ENOSPC
    writer.sync()
    writer.close()
    assert (tmp_path / LEDGER_NAME).read_bytes() == b"".join(LINES[:4])


def test_failed_fsync_is_an_error_that_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may report success the next time, for data that is gone."""
    writer = LedgerWriter(tmp_path)
    calls: list[int] = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateWriteError, match="Input/output error") as caught:
        writer.sync()
    assert caught.value.errno == errno.EIO
    assert len(calls) == 1
    writer.close()


def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "out").write_text("")
    with pytest.raises(StateWriteError, match="ledger=false"):
        LedgerWriter(tmp_path / "out")


def test_reader_names_what_is_missing(tmp_path: Path) -> None:
    """No path, no ledger in it, and a file that is none."""
    with pytest.raises(CheckpointNotFoundError, match="no such path"):
        read_ledger(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match=f"no {LEDGER_NAME}"):
        read_ledger(tmp_path)
    (tmp_path / LEDGER_NAME).write_bytes(b"no ledger\n")
    with pytest.raises(DamagedStateError, match="line 1"):
        read_ledger(tmp_path)


def test_reader_goes_on_after_a_line_that_it_cannot_read(tmp_path: Path) -> None:
    """A hole that a power cut left: the line is counted, the others are read."""
    path = tmp_path / LEDGER_NAME
    path.write_bytes(LINES[0] + b"\0" * 40 + b"\n" + LINES[1])
    ledger = read_ledger(path)
    assert list(ledger.entries) == STORY.entries[:2]
    assert [number for number, _ in ledger.damaged] == [2]
    assert read_ledger(tmp_path / "global_step_4").path == path


@pytest.mark.parametrize("damage", ["removed", "replaced", "folder removed"])
def test_ledger_that_was_taken_away_is_begun_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Lines behind an unlinked name would be lost silently; a save says so and goes on in a new file."""
    out = tmp_path / "out"
    story = Story(dataset(20), 2, 5).start().steps(2)
    writer = LedgerWriter(out)
    writer.append(story.entries[0])
    writer.sync()
    assert caplog.records == []
    if damage == "folder removed":
        shutil.rmtree(out)
    else:
        (out / LEDGER_NAME).unlink()
    if damage == "replaced":
        (out / LEDGER_NAME).write_bytes(b"")
    writer.append(story.entries[1])  # behind the unlinked name
    writer.sync()
    writer.append(story.entries[2])
    writer.close()
    assert "was removed or replaced" in caplog.text
    assert read_ledger(out).entries == (story.entries[2],)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", ["x"]),
        ("time", None),
        ("loader_rows", "1"),
        ("loader_batch", 0),
        ("epoch", 300_000_000),
        ("life", -1),
    ],
    ids=lambda value: str(value),
)
def test_start_line_of_wrong_values_is_damaged(name: str, value: Any) -> None:
    """A reader that took them would fail, or count for hours."""
    values = {**json.loads(LINES[0]), name: value}
    with pytest.raises(ValueError, match=name):
        parse_line(json.dumps(values).encode())


@pytest.mark.parametrize("drawn", [[[float("inf"), 1]], [[300_000_000, 1]], [[1, -1]], [[1]]], ids=str)
def test_step_line_of_wrong_counts_is_damaged(drawn: Any) -> None:
    """Also numbers that JSON knows and Python cannot count to."""
    values = {**json.loads(LINES[1]), "drawn": drawn}
    with pytest.raises(ValueError, match=r"drawn must be|Infinity is not allowed"):
        parse_line(json.dumps(values).encode())


def test_fifo_in_place_of_the_ledger_is_not_waited_for(tmp_path: Path) -> None:
    """It cannot be read, like any other damage."""
    os.mkfifo(tmp_path / LEDGER_NAME)
    with pytest.raises(DamagedStateError, match="not a regular file"):
        read_ledger(tmp_path)
