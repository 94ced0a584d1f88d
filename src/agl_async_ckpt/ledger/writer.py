"""Appends lines to the ledger of an output folder.

A line reaches the kernel with one write, so a killed process loses none that it has finished; it reaches the disk at
the next `sync`, which a save calls before it commits the checkpoint that refers to it. The start of a process repairs
a last line that a power cut or a full disk has torn.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from agl_async_ckpt.exceptions import StateWriteError
from agl_async_ckpt.ledger.entry import Entry, parse_line, to_line
from agl_async_ckpt.storage.files import make_folders, sync_folder, write_all
from agl_async_ckpt.storage.layout import LEDGER_NAME

log = logging.getLogger(__name__)

_BLOCK = 2**16
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class LedgerWriter:
    """The ledger of one output folder, open for appending.

    What cannot be written (a full disk) waits in memory, with one warning, and is tried again with the next line; the
    next `sync` then raises if it still cannot.
    """

    def __init__(self, output_dir: Path) -> None:
        """Open the ledger, creating the folder and the file, and repair its end.

        Raises:
            StateWriteError: The folder cannot be written.
        """
        self.path = output_dir / LEDGER_NAME
        self._waiting: list[bytes] = []
        self._warned = False
        self._fd: int | None = None
        try:
            make_folders(output_dir)
            is_new = not self.path.exists()
            self._fd = os.open(self.path, _FLAGS, 0o666)
            if is_new:
                sync_folder(output_dir)
            self._size = self._repaired_size(self._fd)
        except OSError as error:
            self.close()
            raise self._error(error) from error

    def append(self, entry: Entry) -> None:
        """Hand a line to the kernel. Never raises: what fails is said once and tried again."""
        self._waiting.append(to_line(entry))
        try:
            self._write_waiting()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s cannot be written (%s): its lines wait in memory. The next save is refused unless it can.",
                    self.path,
                    error.strerror,
                )
            self._warned = True

    def sync(self) -> None:
        """Make every line durable.

        fsync is called once: after a failure the kernel may report success for data that is gone.

        Raises:
            StateWriteError: A line is not on disk.
        """
        try:
            self._reopen_if_gone()
            self._write_waiting()
            os.fsync(self._open_fd())
        except OSError as error:
            raise self._error(error) from error
        self._warned = False

    def close(self) -> None:
        """Close the file; what waits in memory is lost."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise OSError("the ledger is closed")
        return self._fd

    def _reopen_if_gone(self) -> None:
        """Begin the file again if somebody has removed or moved it: lines behind an unlinked name are lost."""
        old = self._open_fd()
        try:
            if os.path.samestat(os.fstat(old), self.path.stat()):
                return
        except FileNotFoundError:
            pass
        log.warning("%s was removed or replaced while this run trained: an audit will miss earlier steps.", self.path)
        make_folders(self.path.parent)
        self._fd = os.open(self.path, _FLAGS, 0o666)
        os.close(old)
        sync_folder(self.path.parent)
        self._size = self._repaired_size(self._fd)

    def _write_waiting(self) -> None:
        fd = self._open_fd()
        while self._waiting:
            try:
                write_all(fd, self._waiting[0])
            except OSError:
                os.ftruncate(fd, self._size)  # the part of a line that got through
                raise
            self._size += len(self._waiting.pop(0))

    def _repaired_size(self, fd: int) -> int:
        """Cut off an unfinished last line, or finish it if only its newline is missing."""
        size = os.fstat(fd).st_size
        end, tail = size, b""
        while end > 0 and b"\n" not in tail:
            start = max(0, end - _BLOCK)
            tail = os.pread(fd, end - start, start) + tail
            end = start
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return size
        try:
            parse_line(torn)
        except ValueError:
            os.ftruncate(fd, size - len(torn))
            log.info("Removed an unfinished line of %d bytes at the end of %s.", len(torn), self.path)
            return size - len(torn)
        os.write(fd, b"\n")
        return size + 1

    def _error(self, error: OSError) -> StateWriteError:
        return StateWriteError(
            f"The ledger {self.path} cannot be written: {error.strerror or error}.",
            act="Free space or fix the folder, or set agentlightning.async_checkpoint.ledger=false to train without an "
            "account of the inputs.",
            errno=error.errno,
        )
