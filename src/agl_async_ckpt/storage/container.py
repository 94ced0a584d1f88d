"""The container of an input state: a torch zip file whose zip comment is the trailer. See docs/format.md.

    local entries ... central directory ... end record (22 bytes) | trailer (JSON, the zip comment)

Every byte is verified before anything is unpickled, and what is unpickled are the very bytes that were verified.
Imports neither torch nor numpy nor pickle, so that a listing is cheap and safe.
"""

from __future__ import annotations

import hmac
import mmap
import os
import stat
import struct
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, BinaryIO

from agl_async_ckpt.exceptions import CheckpointNotFoundError, DamagedStateError, ForeignFormatError
from agl_async_ckpt.storage.hashing import BLOCK, MAX_PENDING, StreamHasher
from agl_async_ckpt.storage.layout import FILE_NAME
from agl_async_ckpt.storage.trailer import (
    BLANK_DIGEST,
    DIGEST_END,
    MAX_TRAILER_BYTES,
    Trailer,
    blank,
    is_ours,
    parse_trailer,
)

END_RECORD = struct.Struct("<4s4H2LH")
"""Zip end record: signature, disk numbers (2), entries (2), directory size and offset, comment length."""

_SIGNATURE = b"PK\x05\x06"
_ZIP64_END_BYTES = 56 + 20
_LOCAL_SIGNATURE = b"PK\x03\x04"
_MAX_COMMENT = 0xFFFF


def read_trailer(path: str | os.PathLike[str]) -> Trailer:
    """Read the end of a file. Tells what the file says about itself; only `verify` tells whether it is whole.

    Raises:
        CheckpointNotFoundError: There is no such file.
        DamagedStateError: Truncated, altered, empty, unreadable, or not a regular file.
        ForeignFormatError: A whole torch file without a trailer of ours.
        UnsupportedVersionError: Of another format version.
    """
    with _open(path) as (fd, size):
        end, comment = _find_trailer(fd, size, path)
        return _sized(parse_trailer(comment, str(path)), end, path)


def verify(path: str | os.PathLike[str]) -> Trailer:
    """Hash every byte of a file, in constant memory, and return its trailer.

    Raises:
        StateFormatError, CheckpointNotFoundError: As `read_trailer`.
    """
    with _open(path) as (fd, size):
        end, comment = _find_trailer(fd, size, path)
        with StreamHasher() as hasher:
            for offset in range(0, end, BLOCK):
                hasher.update(_read(fd, offset, min(BLOCK, end - offset), path))
                hasher.settle(MAX_PENDING)
            return _checked(hasher.finish(), end, comment, path)


def read_verified(path: str | os.PathLike[str], where: str = "") -> tuple[Trailer, BinaryIO]:
    """Read a file into memory once, and verify these very bytes: nothing can change between check and use.

    Args:
        path: Of the file.
        where: What errors call it, if not by its path.

    Returns:
        The trailer, and a file that lies in memory only (memfd_create(2)): torch can map it instead of copying it.

    Raises:
        StateFormatError, CheckpointNotFoundError: As `read_trailer`; a zip directory that declares more than the file
            holds is damage too.
    """
    with _open(path, where) as (fd, size):
        path = where or path
        end, comment = _find_trailer(fd, size, path)
        content = os.fdopen(os.memfd_create(FILE_NAME), "rb")
        try:
            os.ftruncate(content.fileno(), size)
            view = memoryview(mmap.mmap(content.fileno(), size))  # unmapped with its last reader
            with StreamHasher() as hasher:
                for offset in range(0, end, BLOCK):
                    block = view[offset : min(offset + BLOCK, end)]
                    _read_into(fd, offset, block, path)
                    hasher.update(block)
                trailer = _checked(hasher.finish(), end, comment, path)
            view[end:] = comment
            _check_directory(content, size, path)
        except BaseException:
            content.close()
            raise
    content.seek(0)
    return trailer, content


def is_whole_zip(path: str | os.PathLike[str]) -> bool:
    """Whether a file looks like a complete torch zip with no comment, judged by its two ends."""
    try:
        with _open(path) as (fd, size):
            tail = _read(fd, max(0, size - END_RECORD.size), END_RECORD.size, path)
            return _ends_whole(fd, tail, size, path)
    except (CheckpointNotFoundError, DamagedStateError):
        return False


@contextmanager
def _open(path: str | os.PathLike[str], where: str = "") -> Generator[tuple[int, int]]:
    """Open a regular file; yields its descriptor and its size in bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"There is no input state {where or path}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedStateError(f"{where or path} cannot be read: {reason}.") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
            raise DamagedStateError(f"{where or path} is {kind}, not an input state.")
        if info.st_size == 0:
            raise DamagedStateError(f"{where or path} is damaged: it is empty.")
        yield fd, info.st_size
    finally:
        os.close(fd)


def _read(fd: int, offset: int, length: int, path: str | os.PathLike[str]) -> bytes:
    try:
        data = os.pread(fd, length, offset)
        while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
            data += more
        return data
    except OSError as error:
        raise DamagedStateError(f"{path} cannot be read: {error.strerror}.") from error


def _read_into(fd: int, offset: int, block: memoryview, path: str | os.PathLike[str]) -> None:
    """Fill `block`; where the file has become shorter it stays zero, and the digest will not fit."""
    try:
        while block and (num_bytes := os.preadv(fd, [block], offset)):
            block, offset = block[num_bytes:], offset + num_bytes
    except OSError as error:
        raise DamagedStateError(f"{path} cannot be read: {error.strerror}.") from error


def _find_trailer(fd: int, size: int, path: str | os.PathLike[str]) -> tuple[int, bytes]:
    """Find the zip comment that reaches exactly to the end of the file; returns its offset and its bytes."""
    start = max(0, size - END_RECORD.size - _MAX_COMMENT)
    tail = _read(fd, start, size - start, path)
    at = tail.rfind(_SIGNATURE)
    while at >= 0:
        comment_at = at + END_RECORD.size
        if comment_at <= len(tail) and END_RECORD.unpack_from(tail, at)[-1] == len(tail) - comment_at:
            break
        at = tail.rfind(_SIGNATURE, 0, at + len(_SIGNATURE) - 1)
    if at < 0:
        raise DamagedStateError(f"{path} is damaged: it has no end record (truncated or altered, {size} bytes).")
    comment = tail[at + END_RECORD.size :]
    if not is_ours(comment):
        end_record = tail[at : at + END_RECORD.size]
        if not _ends_whole(fd, end_record, size - len(comment), path):
            raise DamagedStateError(f"{path} is damaged: it has no trailer, and is no whole torch file either.")
        raise ForeignFormatError(
            f"{path} is a whole file of another format (agent-lightning's own?): it has no trailer of agl-async-ckpt.",
            act="It was left as it is.",
        )
    if len(comment) > MAX_TRAILER_BYTES:
        raise DamagedStateError(
            f"{path} is damaged: its trailer takes {len(comment)} bytes; {MAX_TRAILER_BYTES} are allowed."
        )
    return size - len(comment), comment


def _ends_whole(fd: int, end_record: bytes, size: int, path: str | os.PathLike[str]) -> bool:
    """Whether the first entry is at 0 and the directory ends right before the end record, with nothing cut between."""
    if len(end_record) != END_RECORD.size or not end_record.startswith(_SIGNATURE):
        return False
    _, *_, directory_bytes, directory_at, _ = END_RECORD.unpack(end_record)
    gap = size - END_RECORD.size - directory_bytes - directory_at
    is_zip64 = 0xFFFFFFFF in (directory_bytes, directory_at)
    return _read(fd, 0, 4, path) == _LOCAL_SIGNATURE and (is_zip64 or gap in (0, _ZIP64_END_BYTES))


def _checked(digest: Any, end: int, comment: bytes, path: str | os.PathLike[str]) -> Trailer:
    """Compare digests first: a trailer that was altered must not be believed about its version."""
    digest.update(blank(comment))
    stated = comment[-len(BLANK_DIGEST) - len(DIGEST_END) : -len(DIGEST_END)]
    if not hmac.compare_digest(digest.hexdigest().encode(), stated):
        raise DamagedStateError(f"{path} is damaged: its content does not match its checksum.")
    return _sized(parse_trailer(comment, str(path)), end, path)


def _sized(trailer: Trailer, end: int, path: str | os.PathLike[str]) -> Trailer:
    if trailer.num_zip_bytes != end:
        raise DamagedStateError(
            f"{path} is damaged: {end} bytes stand before its trailer, which says {trailer.num_zip_bytes}."
        )
    return trailer


def _check_directory(content: BinaryIO, size: int, path: str | os.PathLike[str]) -> None:
    """Refuse a directory that would make the loader take more memory than the file has bytes."""
    try:
        with zipfile.ZipFile(content) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeError) as error:
        raise DamagedStateError(f"{path} is damaged: its zip directory cannot be read ({error}).") from error
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise DamagedStateError(f"{path} is damaged: it holds a compressed entry, which torch never writes.")
    if sum(entry.file_size for entry in entries) > size:
        raise DamagedStateError(f"{path} is damaged: its entries declare more bytes than the file has.")
