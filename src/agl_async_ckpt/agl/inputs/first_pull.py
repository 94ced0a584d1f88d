"""The first pull after a resume: its head must be the rows that the checkpoint held as pulled and not enqueued."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.codec.content import NoDigestError, digests
from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.state import Batch, num_rows

log = logging.getLogger(__name__)


class FirstPull:
    """The buffered rows of a resume, remembered by their content when they are put back.

    A trainer of one's own can lose or change them on the way: by a pull that it overrides, a buffer under another
    name, or a column that it fills anew.

    Args:
        tail: The rows put back, or None.
        step_dir: The checkpoint, for the message.
    """

    def __init__(self, tail: Batch | None, step_dir: Path) -> None:
        self._step_dir = step_dir
        self._tail: Batch = tail or {}
        self._saved: dict[str, list[str]] = {}
        try:
            self._saved = {name: digests(column) for name, column in self._tail.items()}
        except NoDigestError as error:
            self._not_compared(error)

    def check(self, pulled: Batch, buffered: Batch | None) -> None:
        """Compare; `buffered` is what the pull has left, and continues it. Columns that a pull adds do not matter.

        Raises:
            StateMismatchError: Names the first row and column that differ. Nothing of the pull was enqueued.
        """
        try:
            differing = sorted(self._differing(pulled, buffered or {}))
        except NoDigestError as error:
            self._not_compared(error)
            return
        if not differing:
            return
        index, _, name, saved, found = differing[0]
        names = [differs[2] for differs in differing if differs[0] == index]
        raise StateMismatchError(
            f"The first pull after the resume does not begin with the rows buffered in {self._step_dir}: "
            f"row {index} of {num_rows(self._tail)} differs in {', '.join(map(repr, names))}.",
            [(f"content of {name!r} in checkpoint", saved), ("in the pull", found)],
            "Nothing was enqueued. Look for what changes the pull: an own trainer class, collate function or hook.",
        )

    def _differing(self, pulled: Batch, buffered: Batch) -> Iterator[tuple[int, int, str, str, str]]:
        """Give row, number and name of the column, saved and found digest of each value that differs."""
        num_pulled = num_rows(pulled)
        for number, (name, saved) in enumerate(self._saved.items()):
            for batch, rows in ((pulled, slice(0, num_pulled)), (buffered, slice(num_pulled, None))):
                expected = saved[rows]
                found = digests(batch[name][: len(expected)]) if name in batch else []
                if found != expected and found:
                    expected = self._as_joined(name, batch[name])[rows]
                for index, wanted in enumerate(expected):
                    digest = found[index] if index < len(found) else "absent"
                    if digest != wanted:
                        yield rows.start + index, number, name, wanted, digest

    def _as_joined(self, name: str, column: Any) -> list[str]:
        """Return the digests of a saved column once it is joined with `column`, of another type of numbers perhaps."""
        saved = self._tail[name]
        if digests(saved) != self._saved[name]:
            return self._saved[name]  # changed in place
        try:
            return digests(internals.joined_column([saved, column[:0]]))
        except (TypeError, ValueError, RuntimeError):
            return self._saved[name]

    def _not_compared(self, error: NoDigestError) -> None:
        log.info("The first pull is not compared with the %d buffered rows: %s.", num_rows(self._tail), error)
