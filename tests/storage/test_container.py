"""Every altered, cut or foreign file is told apart before anything is unpickled. Needs neither torch nor numpy."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.exceptions import (
    CheckpointNotFoundError,
    DamagedStateError,
    ForeignFormatError,
    StateFormatError,
    UnsupportedVersionError,
)
from agl_async_ckpt.storage import container
from agl_async_ckpt.storage.container import is_whole_zip, read_trailer, read_verified, verify
from agl_async_ckpt.storage.trailer import BLANK_DIGEST, MAX_TRAILER_BYTES
from agl_async_ckpt.storage.writer import TrailerWriter
from tests.storage.made import COUNTS, archive, trailer, write

READERS = [read_trailer, verify, read_verified]


def forge(path: Path, comment: bytes, zipped: bytes | None = None) -> Path:
    """Write a file with any trailer and, if it has a place for it, the right digest: what an attacker would."""
    body = archive() if zipped is None else zipped
    body = body[:-2] + struct.pack("<H", len(comment))
    if BLANK_DIGEST.encode() in comment:
        comment = comment.replace(BLANK_DIGEST.encode(), hashlib.sha256(body + comment).hexdigest().encode())
    path.write_bytes(body + comment)
    return path


def fields(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(trailer(len(archive())).to_bytes())
    return {**values, **changes, "sha256": BLANK_DIGEST}


def dump(values: dict[str, Any]) -> bytes:
    digest = values.pop("sha256")
    return json.dumps({**values, "sha256": digest}, separators=(",", ":")).encode()


def test_trailer_tells_what_was_written(tmp_path: Path) -> None:
    """Each field comes back, by the cheap reader and by the thorough ones."""
    path = write(tmp_path / "state.pt")
    found = read_trailer(path)
    assert dataclasses.replace(found, sha256=BLANK_DIGEST) == trailer(len(archive()))
    assert verify(path) == found
    again, content = read_verified(path)
    assert again == found
    with content:
        assert content.read() == path.read_bytes()


def test_digest_follows_the_written_rule(tmp_path: Path) -> None:
    """docs/format.md: SHA-256 over the whole file, the 64 digits before the last two bytes replaced by zeros."""
    data = write(tmp_path / "state.pt").read_bytes()
    assert hashlib.sha256(data[:-66] + b"0" * 64 + data[-2:]).hexdigest() == data[-66:-2].decode()
    assert data.endswith(b'"}')


def test_file_stays_a_zip_that_others_open(tmp_path: Path) -> None:
    """The trailer is an ordinary zip comment."""
    with zipfile.ZipFile(write(tmp_path / "state.pt")) as zipped:
        assert zipped.testzip() is None
        assert json.loads(zipped.comment)["global_step"] == 7


def test_any_single_altered_byte_is_damage(tmp_path: Path) -> None:
    """Every byte, in three ways, by both readers that hash; the cheap reader never crashes."""
    path = write(tmp_path / "state.pt")
    whole = path.read_bytes()
    for at in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            altered = bytearray(whole)
            altered[at] ^= flip
            path.write_bytes(altered)
            for reader in (verify, read_verified):
                with pytest.raises(DamagedStateError):
                    reader(path)
    for at in range(len(whole) - 600, len(whole)):
        altered = bytearray(whole)
        altered[at] ^= 0x01
        path.write_bytes(altered)
        with contextlib.suppress(StateFormatError):
            read_trailer(path)


def test_any_truncation_is_damage(tmp_path: Path) -> None:
    """Cut anywhere, the file has no trailer that reaches its end; all readers see that without hashing."""
    path = write(tmp_path / "state.pt")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        for reader in READERS:
            with pytest.raises(DamagedStateError):
                reader(path)


def test_lost_middle_is_damage_even_without_hashing(tmp_path: Path) -> None:
    """The trailer states the length before it."""
    path = write(tmp_path / "state.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + whole[60:])
    for reader in READERS:
        with pytest.raises(DamagedStateError):
            reader(path)


def test_added_bytes_are_damage(tmp_path: Path) -> None:
    """Bytes before, behind, or a second file behind."""
    path = write(tmp_path / "state.pt")
    whole = path.read_bytes()
    for data in (b"\0" + whole, whole + b"\0", whole + whole, whole + b"\n" * 70_000):
        path.write_bytes(data)
        for reader in (verify, read_verified):
            with pytest.raises(DamagedStateError):
                reader(path)


def test_cut_behind_an_embedded_zip_is_damage_and_not_foreign(tmp_path: Path) -> None:
    """A dataset of zip files must not make a truncated file look like a whole one of another format."""
    inner = archive(b"inner")
    path = write(tmp_path / "state.pt", archive(inner))
    whole = path.read_bytes()
    end = whole.index(inner) + len(inner)
    path.write_bytes(whole[:end])
    for reader in READERS:
        with pytest.raises(DamagedStateError):
            reader(path)


def test_cut_behind_an_embedded_state_is_damage(tmp_path: Path) -> None:
    """The same with a whole file of this format inside."""
    inner = write(tmp_path / "inner.pt").read_bytes()
    path = write(tmp_path / "state.pt", archive(inner))
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(inner) + len(inner)])
    for reader in READERS:
        with pytest.raises(DamagedStateError):
            reader(path)


@pytest.mark.parametrize(
    "comment",
    [b"", b"another program's comment", b"{}", b"a PK\x05\x06 inside"],
    ids=["none", "text", "json", "signature"],
)
def test_whole_zip_without_our_trailer_is_foreign(tmp_path: Path, comment: bytes) -> None:
    """Not "damaged": another writer's file, which the message says and which stays as it is."""
    path = forge(tmp_path / "state.pt", comment)
    for reader in READERS:
        with pytest.raises(ForeignFormatError, match="another format"):
            reader(path)
    assert is_whole_zip(path) == (comment == b"")


@pytest.mark.parametrize(
    "data",
    [b"", b"P", b"\0" * 5000, b"PK\x05\x06" + b"\0" * 18, b"PK\x05\x06", b"PK\x03\x04" * 100, b'{"format": "json"}'],
    ids=["empty", "a byte", "zeros", "empty zip", "signature", "local headers", "json"],
)
def test_file_that_is_no_zip_is_damage(tmp_path: Path, data: bytes) -> None:
    """What a power cut or a stray editor leaves."""
    path = tmp_path / "state.pt"
    path.write_bytes(data)
    assert not is_whole_zip(path)
    for reader in READERS:
        with pytest.raises(DamagedStateError, match="state"):
            reader(path)


def test_empty_file_is_called_empty(tmp_path: Path) -> None:
    """What a full disk leaves in place of a file that is written without a temp file."""
    (tmp_path / "state.pt").touch()
    for reader in READERS:
        with pytest.raises(DamagedStateError, match="it is empty"):
            reader(tmp_path / "state.pt")


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    """Also below something that is no folder."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "state.pt", tmp_path / "none" / "state.pt", tmp_path / "file" / "state.pt"):
        assert not is_whole_zip(path)
        for reader in READERS:
            with pytest.raises(CheckpointNotFoundError, match="state"):
                reader(path)


def test_folder_fifo_and_loop_are_no_input_state(tmp_path: Path) -> None:
    """Said by name, without waiting for a writer of the FIFO."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for name, text in (("fifo", "regular file"), ("loop", "cannot be read"), ("folder", "a directory")):
        for reader in READERS:
            with pytest.raises(DamagedStateError, match=f"{name} .*{text}"):
                reader(tmp_path / name)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission and input errors keep the system's words, and leave no descriptor open."""
    path = write(tmp_path / "state.pt")
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(code: int) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

        return call

    for name, code in (("pread", errno.EIO), ("open", errno.EACCES)):
        with monkeypatch.context() as patch:
            patch.setattr(container.os, name, refuse(code))
            for reader in READERS:
                with pytest.raises(DamagedStateError, match=os.strerror(code)):
                    reader(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_newer_version_names_both(tmp_path: Path) -> None:
    """An older package says what to do instead of guessing."""
    path = forge(tmp_path / "state.pt", dump(fields(format_version=FORMAT_VERSION + 1, new_field=[1])))
    for reader in READERS:
        with pytest.raises(
            UnsupportedVersionError, match=rf"version {FORMAT_VERSION + 1};.*version {FORMAT_VERSION}\."
        ):
            reader(path)


def test_unknown_extra_fields_are_ignored(tmp_path: Path) -> None:
    """A later writer of the same version may say more."""
    path = forge(tmp_path / "state.pt", dump(fields(mood="good", more={"a": [1, None]})))
    assert verify(path).global_step == 7


WRONG: dict[str, dict[str, Any]] = {
    "step text": {"global_step": "7"},
    "step true": {"global_step": True},
    "step float": {"global_step": 7.0},
    "step negative": {"global_step": -1},
    "step huge": {"global_step": 2**63},
    "epoch zero": {"epoch": 0},
    "exhausted number": {"exhausted": 1},
    "run_id null": {"run_id": None},
    "run_id long": {"run_id": "x" * 2000},
    "parent number": {"parent_run_id": 1},
    "counts list": {"counts": []},
    "counts text": {"counts": {**COUNTS, "num_buffered_inputs": "1"}},
    "counts negative": {"counts": {**COUNTS, "num_buffered_inputs": -1}},
    "counts missing": {"counts": {"num_buffered_inputs": 1}},
    "saved_at text": {"saved_at": "now"},
    "saved_at infinite": {"saved_at": float("inf")},
    "saved_at not a number": {"saved_at": float("nan")},
    "written_by number": {"written_by": {"torch": 2}},
    "length": {"num_zip_bytes": 1},
    "version zero": {"format_version": 0},
    "version text": {"format_version": "1"},
    "version true": {"format_version": True},
    "format": {"format": "agl-async-ckpt input state?"},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_wrong_field_in_the_trailer_is_damage(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A trailer with the right digest and a wrong type or range is refused by the name of the field."""
    path = forge(tmp_path / "state.pt", dump(fields(**changes)))
    for reader in READERS:
        with pytest.raises(DamagedStateError, match="state"):
            reader(path)


@pytest.mark.parametrize("name", [name for name in fields() if name != "sha256"])
def test_missing_field_in_the_trailer_is_damage(tmp_path: Path, name: str) -> None:
    """Each field is needed."""
    values = fields()
    del values[name]
    with pytest.raises(DamagedStateError):
        verify(forge(tmp_path / "state.pt", dump(values)))


GOOD = dump(fields())
HOSTILE = {
    "no json": b'"sha256":"' + BLANK_DIGEST.encode() + b'"}',
    "a list": b'["agl-async-ckpt input state",{"sha256":"' + BLANK_DIGEST.encode() + b'"}',
    "deep": b'{"format":"agl-async-ckpt input state","x":'
    + b"[" * 15_000
    + b',"sha256":"'
    + BLANK_DIGEST.encode()
    + b'"}',
    "key twice": GOOD.replace(b'"epoch":2', b'"epoch":2,"epoch":2'),
    "long number": GOOD.replace(b'"epoch":2', b'"epoch":' + b"9" * 5000),
    "long ignored number": GOOD.replace(b'"epoch":2', b'"x":' + b"9" * 1000 + b',"epoch":2'),
    "large exponent": GOOD.replace(b'"epoch":2', b'"epoch":1e999'),
    "NaN": GOOD.replace(b'"epoch":2', b'"epoch":NaN'),
    "no ascii": GOOD.replace(b"run-1", "rün-1".encode()),
    "digest not last": GOOD.replace(b"}", b" }")[:-1] + b"}",
    "digest short": GOOD.replace(BLANK_DIGEST.encode(), b"00"),
    "digest no hex": GOOD.replace(BLANK_DIGEST.encode(), b"g" * 64),
    "too long": GOOD.replace(b"run-1", b"x" * MAX_TRAILER_BYTES),
    "padded": GOOD.replace(b"{", b"{" + b" " * MAX_TRAILER_BYTES, 1),
    "longest": GOOD.replace(b"run-1", b"x" * 60_000),
    "end record inside": GOOD.replace(b"run-1", b"PK\x05\x06" + b"\0" * 18),
}


@pytest.mark.parametrize("comment", HOSTILE.values(), ids=HOSTILE)
def test_hostile_trailer_is_damage(tmp_path: Path, comment: bytes) -> None:
    """Bounded in size, depth and number length; one error, whatever is wrong."""
    path = forge(tmp_path / "state.pt", comment)
    for reader in READERS:
        with pytest.raises(DamagedStateError, match="state"):
            reader(path)


def test_altered_version_is_damage_and_not_a_newer_format(tmp_path: Path) -> None:
    """The readers that hash look at the digest before they believe the version."""
    path = write(tmp_path / "state.pt")
    whole, said = path.read_bytes(), b'"format_version":%d'
    assert whole.count(said % FORMAT_VERSION) == 1
    path.write_bytes(whole.replace(said % FORMAT_VERSION, said % 9))
    for reader in (verify, read_verified):
        with pytest.raises(DamagedStateError):
            reader(path)


def test_directory_that_declares_too_much_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """A compressed entry, or entries larger than the file, would take memory that nobody asked for."""
    bomb = write(tmp_path / "bomb.pt", archive(bytes(10_000_000), zipfile.ZIP_DEFLATED))
    with pytest.raises(DamagedStateError, match="compressed"):
        read_verified(bomb)
    zipped = bytearray(archive())
    at = zipped.index(b"PK\x01\x02")
    struct.pack_into("<LL", zipped, at + 20, 2**31, 2**31)
    with pytest.raises(DamagedStateError, match="declare more"):
        read_verified(write(tmp_path / "large.pt", bytes(zipped)))
    broken = bytearray(archive())
    broken[at : at + 4] = b"XXXX"
    with pytest.raises(DamagedStateError, match="directory"):
        read_verified(write(tmp_path / "broken.pt", bytes(broken)))


def test_verified_bytes_are_the_ones_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read once: what is changed on disk afterwards does not reach the reader."""
    path = write(tmp_path / "state.pt")
    whole = path.read_bytes()
    preadv = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        num_bytes = preadv(fd, buffers, offset)
        path.write_bytes(b"replaced")
        return num_bytes

    monkeypatch.setattr(container.os, "preadv", spy)
    _, content = read_verified(path)
    assert path.read_bytes() == b"replaced"
    with content:
        assert content.read() == whole


def test_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be read is zero in memory, and the digest does not fit."""
    path = write(tmp_path / "state.pt", archive(os.urandom(100_000)))
    preadv = os.preadv

    def shrink(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(path, 50_000)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(container.os, "preadv", shrink)
    with pytest.raises(DamagedStateError, match="checksum"):
        read_verified(path)


def test_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A listing of damaged files must not use up the descriptors of a process."""
    damaged = write(tmp_path / "state.pt", archive(os.urandom(100_000)))
    data = bytearray(damaged.read_bytes())
    data[50_000] ^= 1
    damaged.write_bytes(data)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(DamagedStateError):
        read_verified(damaged)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_large_file_is_verified_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant memory: the digest is the same whatever the piece size, and each odd boundary is crossed."""
    path = write(tmp_path / "state.pt", archive(os.urandom(100_000)))
    wanted = verify(path)
    for size in (1009, 4096):
        monkeypatch.setattr(container, "BLOCK", size)
        assert verify(path) == wanted
        with read_verified(path)[1] as content:
            assert content.read() == path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 22, 23, 4 * 2**20 - 1, 4 * 2**20, 9 * 2**20 + 5])
@pytest.mark.parametrize("piece", [1, 1000, 10**8])
def test_writer_writes_all_it_is_given(tmp_path: Path, size: int, piece: int) -> None:
    """Whatever the pieces, the file is these bytes, with the comment length patched in, and the trailer."""
    if size > 10_000 and piece == 1:
        piece = 65_537
    zipped = archive(os.urandom(size))
    path = tmp_path / "state.pt"
    with path.open("wb") as file, TrailerWriter(file.fileno()) as writer:
        for start in range(0, len(zipped), piece):
            assert writer.write(memoryview(zipped)[start : start + piece]) == len(zipped[start : start + piece])
        writer.finish(trailer)
    data = path.read_bytes()
    assert data[: len(zipped) - 2] == zipped[:-2]
    assert verify(path).num_zip_bytes == len(zipped)


def test_writer_refuses_what_is_no_zip(tmp_path: Path) -> None:
    """A file that could not be read back is not finished."""
    for content in (b"", b"short", b"x" * 100, archive()[:-2] + b"\x05\x00"):
        with (tmp_path / "state.pt").open("wb") as file, TrailerWriter(file.fileno()) as writer:
            writer.write(content)
            with pytest.raises(ValueError, match="end record"):
                writer.finish(trailer)


def test_writer_raises_its_first_error_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A write that failed once must not go on: the kernel may report success for data that is gone."""
    calls: list[int] = []

    def fail(*_: Any) -> int:
        calls.append(1)
        raise OSError(errno.ENOSPC, "full")

    with (tmp_path / "state.pt").open("wb") as file, TrailerWriter(file.fileno()) as writer:
        monkeypatch.setattr(os, "write", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="full") as caught:
                writer.write(bytes(5 * 2**20))
            assert writer.error is caught.value
    assert len(calls) == 1


def test_writer_has_hashed_a_large_piece_when_it_returns(tmp_path: Path) -> None:
    """The memory is torch's, which may free it then: what is changed afterwards does not reach the digest."""
    zipped = archive(os.urandom(9 * 2**20))
    path = tmp_path / "state.pt"
    with path.open("wb") as file, TrailerWriter(file.fileno()) as writer:
        memory = bytearray(zipped[:-100])
        writer.write(memory)
        memory[:] = bytes(len(memory))
        writer.write(zipped[-100:])
        writer.finish(trailer)
    assert verify(path).num_zip_bytes == len(zipped)


def test_writer_keeps_no_copy_of_a_large_piece(tmp_path: Path) -> None:
    """A tail of a gigabyte is written from where it lies."""
    zipped = archive(bytes(32 * 2**20))
    with (tmp_path / "state.pt").open("wb") as file, TrailerWriter(file.fileno()) as writer:
        tracemalloc.start()
        try:
            writer.write(zipped)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        writer.finish(trailer)
    assert peak < 2**20
