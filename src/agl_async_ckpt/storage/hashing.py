"""SHA-256 of a stream, in a helper thread beside the reading or writing of it."""

from __future__ import annotations

import hashlib
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BLOCK = 4 * 1024 * 1024
"""Size of the blocks to hash, bytes: large beside what handing over costs, small beside the memory of a trainer."""

MAX_PENDING = 4
_INLINE = 1024 * 1024
"""A block up to this size is hashed in less time than a thread takes to start."""


class StreamHasher:
    """Hashes blocks in the order in which they come; hashlib releases the lock, as read(2) and write(2) do.

    A block is not copied: it must stay as it is until `catch_up` has waited for it.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> StreamHasher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def update(self, block: bytes | bytearray | memoryview) -> None:
        """Hash a block, or hand it to the thread; does not wait."""
        if len(block) <= _INLINE and not self._pending:
            self._digest.update(block)
            return
        if self._pool is None:
            # Here, because a listing of many small files needs no thread, and the import takes longer than it.
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(1, thread_name_prefix="agl-async-ckpt-hash")
        self._pending.append(self._pool.submit(self._digest.update, block))

    def catch_up(self, max_pending: int = 0) -> None:
        """Wait until at most so many blocks are still to be hashed."""
        while len(self._pending) > max_pending:
            self._pending.popleft().result()

    def finish(self) -> Any:
        """Wait for every block, and return the hashlib object, to be gone on with."""
        self.catch_up()
        return self._digest
