"""The writing end of the container: a file object that hashes what it writes and closes with a trailer."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from agl_async_ckpt.storage.container import END_RECORD
from agl_async_ckpt.storage.files import begin_writeback, write_all
from agl_async_ckpt.storage.hashing import BLOCK, MAX_PENDING, StreamHasher
from agl_async_ckpt.storage.trailer import BLANK_DIGEST, DIGEST_END, Trailer

_WRITEBACK_EVERY = 4 * BLOCK


class TrailerWriter:
    """What `torch.save` writes to.

    Blocks are hashed in a helper thread while they are written, and the kernel is told to move them to the disk
    meanwhile: of 1 GiB a save takes half the time so, of 100 MB nine tenths. Small pieces are gathered; a large one is
    taken from where it lies, and hashed before `write` returns, since torch may free it then. The last 22 bytes, the
    zip end record, are held back until `finish` knows the length of the comment that follows them.

    An error is kept in `error` and raised again by every later call: torch replaces it by one of its own, and a write
    that failed once must not go on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()
        self._num_bytes = 0
        self._num_on_their_way = 0
        self._hasher = StreamHasher()
        self.error: BaseException | None = None

    def __enter__(self) -> TrailerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hasher.__exit__(kind, error, trace)

    def write(self, data: Any) -> int:
        """Take all of `data`; returns its length in bytes."""
        if self.error is not None:
            raise self.error
        try:
            view = memoryview(data).cast("B")
            if len(view) < BLOCK:
                self._buffer += view
                if len(self._buffer) >= BLOCK + END_RECORD.size:
                    self._put_all_but_the_end()
            else:
                self._put_large(view)
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: `finish` writes the rest."""

    def finish(self, make_trailer: Callable[[int], Trailer]) -> None:
        """Write the end record with its comment length, and the trailer.

        Args:
            make_trailer: Gets the number of bytes before the trailer.
        """
        self._put_all_but_the_end()
        *fields, comment_length = END_RECORD.unpack(self._buffer)
        if fields[0] != b"PK\x05\x06" or comment_length:
            raise ValueError("torch.save did not end with a zip end record without a comment")
        comment = make_trailer(self._num_bytes + END_RECORD.size).to_bytes()
        self._put(END_RECORD.pack(*fields, len(comment)))
        digest = self._hasher.finish()
        digest.update(comment)
        stated = len(comment) - len(BLANK_DIGEST) - len(DIGEST_END)
        write_all(self._fd, comment[:stated] + digest.hexdigest().encode() + DIGEST_END)

    def _put_all_but_the_end(self) -> None:
        if len(self._buffer) < END_RECORD.size:
            raise ValueError("torch.save wrote less than a zip end record")
        block, self._buffer = self._buffer, self._buffer[-END_RECORD.size :]
        self._put(memoryview(block)[: -END_RECORD.size])

    def _put_large(self, view: memoryview) -> None:
        """Put all but the end of a piece that is torch's memory, block by block."""
        if self._buffer:
            gathered, self._buffer = self._buffer, bytearray()
            self._put(memoryview(gathered))
        end = len(view) - END_RECORD.size
        try:
            for start in range(0, end, BLOCK):
                self._put(view[start : min(start + BLOCK, end)])
        finally:
            self._hasher.catch_up()  # also after an error: the memory may go, and no thread may be reading it
        self._buffer += view[end:]

    def _put(self, block: bytes | memoryview) -> None:
        self._hasher.update(block)
        write_all(self._fd, block)
        self._num_bytes += len(block)
        if self._num_bytes - self._num_on_their_way >= _WRITEBACK_EVERY:
            begin_writeback(self._fd, self._num_on_their_way, self._num_bytes - self._num_on_their_way)
            self._num_on_their_way = self._num_bytes
        self._hasher.catch_up(MAX_PENDING)
