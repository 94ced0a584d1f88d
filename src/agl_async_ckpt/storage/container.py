"""The container of an input state: a torch zip file whose zip comment is the trailer. See docs/format.md.

    local entries ... central directory ... end record (22 bytes) | trailer (JSON, the zip comment)

Every byte is verified before anything is unpickled, and what is unpickled are the very bytes that were verified.
Imports neither torch nor numpy nor pickle, so that a listing is cheap and safe.
"""

from __future__ import annotations

import hmac
import mmap
import os
import struct
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from agl_async_ckpt.exceptions import CheckpointNotFoundError, DamagedStateError, ForeignFormatError
from agl_async_ckpt.storage.files import open_regular
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
    with _open(path) as file:
        end, comment = file.find_trailer()
        return file.parse(comment, end)


def verify(path: str | os.PathLike[str]) -> Trailer:
    """Hash every byte of a file, in constant memory, and return its trailer.

    Raises:
        StateFormatError, CheckpointNotFoundError: As `read_trailer`.
    """
    with _open(path) as file:
        end, comment = file.find_trailer()
        with StreamHasher() as hasher:
            for offset in range(0, end, BLOCK):
                hasher.update(file.read(offset, min(BLOCK, end - offset)))
                hasher.catch_up(MAX_PENDING)
            return file.check(hasher.finish(), comment, end)


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
    with _open(path, where) as file:
        end, comment = file.find_trailer()
        content = os.fdopen(os.memfd_create(FILE_NAME), "rb")
        try:
            os.ftruncate(content.fileno(), file.size)
            view = memoryview(mmap.mmap(content.fileno(), file.size))  # unmapped with its last reader
            with StreamHasher() as hasher:
                for offset in range(0, end, BLOCK):
                    block = view[offset : min(offset + BLOCK, end)]
                    file.read_into(offset, block)
                    hasher.update(block)
                trailer = file.check(hasher.finish(), comment, end)
            view[end:] = comment
            file.check_directory(content)
        except BaseException:
            content.close()
            raise
    content.seek(0)
    return trailer, content


def is_whole_zip(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file looks like a complete torch zip with no comment, judged by its two ends."""
    try:
        with _open(path) as file:
            return file.ends_whole(file.read(max(0, file.size - END_RECORD.size), END_RECORD.size), file.size)
    except (CheckpointNotFoundError, DamagedStateError):
        return False


@contextmanager
def _open(path: str | os.PathLike[str], where: str = "") -> Generator[_File]:
    where = where or str(path)
    try:
        fd, size = open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.islink(path):  # noqa: PTH114 - a path of any kind
            raise DamagedStateError(f"{where} cannot be read: it is a link that leads nowhere.") from error
        raise CheckpointNotFoundError(f"There is no input state {where}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedStateError(f"{where} cannot be read: {reason}.") from error
    try:
        if size == 0:
            raise DamagedStateError(f"{where} is damaged: it is empty.")
        yield _File(fd, size, where)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _File:
    """An open file, and what errors call it."""

    fd: int
    size: int
    where: str

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes; fewer where the file has become shorter."""
        try:
            data = os.pread(self.fd, length, offset)
            while len(data) < length and (more := os.pread(self.fd, length - len(data), offset + len(data))):
                data += more
            return data
        except OSError as error:
            raise self.unreadable(error) from error

    def read_into(self, offset: int, block: memoryview) -> None:
        """Fill `block`; where the file has become shorter it stays zero, and the digest will not fit."""
        try:
            while block and (num_bytes := os.preadv(self.fd, [block], offset)):
                block, offset = block[num_bytes:], offset + num_bytes
        except OSError as error:
            raise self.unreadable(error) from error

    def find_trailer(self) -> tuple[int, bytes]:
        """Find the zip comment that reaches exactly to the end of the file; returns its offset and its bytes."""
        start = max(0, self.size - END_RECORD.size - _MAX_COMMENT)
        tail = self.read(start, self.size - start)
        at = tail.rfind(_SIGNATURE)
        while at >= 0:
            comment_at = at + END_RECORD.size
            if comment_at <= len(tail) and END_RECORD.unpack_from(tail, at)[-1] == len(tail) - comment_at:
                break
            at = tail.rfind(_SIGNATURE, 0, at + len(_SIGNATURE) - 1)
        if at < 0:
            raise self.damaged(f"it has no end record (truncated or altered, {self.size} bytes)")
        comment = tail[at + END_RECORD.size :]
        if not is_ours(comment):
            if not self.ends_whole(tail[at : at + END_RECORD.size], self.size - len(comment)):
                raise self.damaged("it has no trailer, and is no whole torch file either")
            raise ForeignFormatError(
                f"{self.where} is a whole file of another format (agent-lightning's own?): it has no trailer of "
                "agl-async-ckpt.",
                act="It was left as it is.",
            )
        if len(comment) > MAX_TRAILER_BYTES:
            raise self.damaged(f"its trailer takes {len(comment)} bytes; {MAX_TRAILER_BYTES} are allowed")
        return self.size - len(comment), comment

    def ends_whole(self, end_record: bytes, end: int) -> bool:
        """Tell whether the first entry is at 0, and the directory right before the end record, which ends at `end`."""
        if len(end_record) != END_RECORD.size or not end_record.startswith(_SIGNATURE):
            return False
        _, *_, directory_bytes, directory_at, _ = END_RECORD.unpack(end_record)
        gap = end - END_RECORD.size - directory_bytes - directory_at
        is_zip64 = 0xFFFFFFFF in (directory_bytes, directory_at)
        return self.read(0, 4) == _LOCAL_SIGNATURE and (is_zip64 or gap in (0, _ZIP64_END_BYTES))

    def check(self, digest: Any, comment: bytes, end: int) -> Trailer:
        """Compare digests first: a trailer that was altered must not be believed about its version."""
        digest.update(blank(comment))
        stated = comment[-len(BLANK_DIGEST) - len(DIGEST_END) : -len(DIGEST_END)]
        if not hmac.compare_digest(digest.hexdigest().encode(), stated):
            raise self.damaged("its content does not match its checksum")
        return self.parse(comment, end)

    def parse(self, comment: bytes, end: int) -> Trailer:
        """Read a trailer that begins at `end`."""
        trailer = parse_trailer(comment, self.where)
        if trailer.num_zip_bytes != end:
            raise self.damaged(f"{end} bytes stand before its trailer, which says {trailer.num_zip_bytes}")
        return trailer

    def check_directory(self, content: BinaryIO) -> None:
        """Refuse a directory that would make the loader take more memory than the file has bytes."""
        try:
            with zipfile.ZipFile(content) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeError) as error:
            raise self.damaged(f"its zip directory cannot be read ({error})") from error
        if any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries
        ):
            raise self.damaged("it holds a compressed entry, which torch never writes")
        if sum(entry.file_size for entry in entries) > self.size:
            raise self.damaged("its entries declare more bytes than the file has")

    def damaged(self, reason: str) -> DamagedStateError:
        """Say what is wrong with its content."""
        return DamagedStateError(f"{self.where} is damaged: {reason}.")

    def unreadable(self, error: OSError) -> DamagedStateError:
        """Say why it cannot be read."""
        return DamagedStateError(f"{self.where} cannot be read: {error.strerror}.")
