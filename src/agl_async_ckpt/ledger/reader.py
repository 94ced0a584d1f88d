"""Reads the ledger of an output folder, also while it is being written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agl_async_ckpt.exceptions import CheckpointNotFoundError, DamagedStateError
from agl_async_ckpt.ledger.entry import Entry, Start, parse_line
from agl_async_ckpt.storage.files import read_small
from agl_async_ckpt.storage.layout import LEDGER_NAME

_MAX_BYTES = 2**40  # a ledger may be long; what matters is that a FIFO of its name is not waited for


@dataclass(frozen=True)
class Ledger:
    """The lines of a ledger.

    Attributes:
        path: The file.
        entries: In the order of the file.
        damaged: (line number, what is wrong) of lines that could not be read; not of an unfinished last one.
        unfinished: The file ends within a line: it is being written, or its writer was killed in that moment.
    """

    path: Path
    entries: tuple[Entry, ...]
    damaged: tuple[tuple[int, str], ...] = ()
    unfinished: bool = False

    @property
    def starts(self) -> list[Start]:
        """The lives, in the order of the file."""
        return [entry for entry in self.entries if isinstance(entry, Start)]

    @property
    def last(self) -> Entry | None:
        """The newest line."""
        return self.entries[-1] if self.entries else None


def _ledger_path(path: Path) -> Path:
    """Return the ledger of an output folder, of a step folder in one, or the file itself, whatever it is called."""
    if path.name == LEDGER_NAME or path.is_file():
        return path
    if not (path / LEDGER_NAME).exists() and (path.parent / LEDGER_NAME).exists():
        return path.parent / LEDGER_NAME
    return path / LEDGER_NAME


def read_ledger(path: Path) -> Ledger:
    """Read a ledger.

    Args:
        path: An output folder, a step folder in one, or the file.

    Raises:
        CheckpointNotFoundError: There is no ledger.
        DamagedStateError: It cannot be read, or holds no line that can.
    """
    file = _ledger_path(path)
    try:
        content = read_small(file, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        what = "no such path" if not path.exists() else f"no {LEDGER_NAME} in it"
        raise CheckpointNotFoundError(
            f"{path} has no ledger: {what}.",
            act="Name the output folder (trainer.default_local_dir) of an asynchronous run with the extension loaded. "
            "A run that has trained without it, or with agentlightning.async_checkpoint.ledger=false, cannot be "
            "audited.",
        ) from None
    except OSError as error:
        raise DamagedStateError(f"{file} cannot be read: {error.strerror}.") from error
    lines = content.split(b"\n")
    unfinished = bool(lines.pop())
    entries: list[Entry] = []
    damaged: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(parse_line(line))
        except ValueError as error:
            damaged.append((number, str(error)))
    if damaged and not entries:
        raise DamagedStateError(f"{file} is no ledger: line {damaged[0][0]}: {damaged[0][1]}.")
    return Ledger(file, tuple(entries), tuple(damaged), unfinished)
