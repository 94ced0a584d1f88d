"""The first pull after a resume: its head must be the rows that the checkpoint held as pulled and not enqueued."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path

from agl_async_ckpt.checkpoint.content import NoDigestError, row_digests
from agl_async_ckpt.exceptions import StateMismatchError, describe
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
        self._rows: list[dict[str, str]] = []
        try:
            self._rows = row_digests(tail)
        except NoDigestError as error:
            log.info("The first pull is not compared with the %d buffered rows: %s.", num_rows(tail), error)

    def check(self, pulled: Batch, buffered: Batch | None) -> None:
        """Compare; `buffered` is what the pull has left, and continues it. Columns that a pull adds do not matter.

        Raises:
            StateMismatchError: Names the first row and column that differ. Nothing of the pull was enqueued.
        """
        if not self._rows:
            return
        try:
            found = list(chain(row_digests(pulled), row_digests(buffered)))
        except NoDigestError as error:
            log.info("The first pull is not compared with the %d buffered rows: %s.", len(self._rows), error)
            return
        for index, saved in enumerate(self._rows):
            row = found[index] if index < len(found) else {}
            differing = [name for name in saved if row.get(name) != saved[name]]
            if differing:
                name = differing[0]
                raise StateMismatchError(
                    describe(
                        f"The first pull after the resume does not begin with the rows buffered in {self._step_dir}: "
                        f"row {index} of {len(self._rows)} differs in {', '.join(map(repr, differing))}.",
                        [
                            (f"content of {name!r} in checkpoint", saved[name]),
                            ("in the pull", row.get(name, "absent")),
                        ],
                        "Nothing was enqueued. Look for what changes the pull: an own trainer class, collate function "
                        "or hook.",
                    )
                )
