"""The writing end of the container: a file object that hashes what it writes and closes with a trailer."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from agl_async_ckpt.storage.container import END_RECORD
from agl_async_ckpt.storage.files import write_all
from agl_async_ckpt.storage.trailer import BLANK_DIGEST, DIGEST_END, Trailer

_BLOCK = 4 * 1024 * 1024
_MAX_PENDING = 4


class TrailerWriter:
    """What `torch.save` writes to.

    Blocks of 4 MiB are hashed in a helper thread while they are written: hashlib and write(2) both release the lock.
    A block is copied first, since torch frees the memory it hands over as soon as `write` returns. The last 22 bytes,
    the zip end record, are held back until `finish` knows the length of the comment that follows them.

    An error is kept in `error` and raised again by every later call: torch replaces it by one of its own, and a write
    that failed once must not go on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()
        self._num_bytes = 0
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="agl-async-ckpt-hash")
        self._pending: deque[Future[None]] = deque()
        self.error: BaseException | None = None

    def __enter__(self) -> TrailerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hasher.shutdown(cancel_futures=True)

    def write(self, data: Any) -> int:
        """Take all of `data`; returns its length in bytes."""
        if self.error is not None:
            raise self.error
        try:
            view = memoryview(data).cast("B")
            for start in range(0, len(view), _BLOCK):
                self._buffer += view[start : start + _BLOCK]
                if len(self._buffer) >= _BLOCK + END_RECORD.size:
                    self._put_all_but_the_end()
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Nothing to do: `finish` writes the rest."""

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
        while self._pending:
            self._pending.popleft().result()
        self._digest.update(comment)
        stated = len(comment) - len(BLANK_DIGEST) - len(DIGEST_END)
        write_all(self._fd, comment[:stated] + self._digest.hexdigest().encode() + DIGEST_END)

    def _put_all_but_the_end(self) -> None:
        if len(self._buffer) < END_RECORD.size:
            raise ValueError("torch.save wrote less than a zip end record")
        block, self._buffer = self._buffer, self._buffer[-END_RECORD.size :]
        self._put(memoryview(block)[: -END_RECORD.size])

    def _put(self, block: bytes | memoryview) -> None:
        self._pending.append(self._hasher.submit(self._digest.update, block))
        write_all(self._fd, block)
        self._num_bytes += len(block)
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft().result()
