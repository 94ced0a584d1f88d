"""The stream as a grid of cells: steps across, inputs down, what each input was in each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from agl_async_ckpt.ledger.audit import Audit
from agl_async_ckpt.ledger.walk import Drawn

if TYPE_CHECKING:
    pass


class Cell(IntEnum):
    """What an input was in a step. Where several share a cell, the highest shows: no loss hides behind the rest."""

    NOTHING = 0
    DONE = 1
    TRAINED = 2
    PULLED = 3
    IN_FLIGHT = 4
    DROPPED = 5
    REPEATED = 6
    LOST = 7


@dataclass(frozen=True)
class Grid:
    """The cells.

    Attributes:
        cells: (height, width) of `Cell`.
        first_step: The step of the left edge.
        num_steps: Steps that the width stands for.
        num_inputs: Rows drawn that the height stands for.
    """

    cells: Any
    first_step: int
    num_steps: int
    num_inputs: int


def build_grid(audit: Audit, *, max_height: int, max_width: int) -> Grid:
    """Draw every row that the loader has handed out, several to a cell where there are too many.

    Args:
        audit: Of the run.
        max_height: Cells down at most.
        max_width: Cells across at most.
    """
    import numpy as np  # here: an audit without a picture does without

    first, last = audit.first.step + 1, max(audit.last_step, audit.first.step + 1)
    rows = audit.walk.rows
    repeated = {id(row) for epoch in audit.epochs for row in epoch.repeated_rows}
    replaced = {id(row) for epoch in audit.epochs for row in epoch.replaced_rows}
    num_steps, num_inputs = last - first + 1, max(1, len(rows))
    height, width = min(num_inputs, max_height), min(num_steps, max_width)
    cells = np.zeros((height, width), dtype=np.uint8)
    for index, row in enumerate(rows):
        line = cells[index * height // num_inputs]
        for begin, end, cell in _spans(row, last, is_repeated=id(row) in repeated, is_replaced=id(row) in replaced):
            left = max(0, begin - first) * width // num_steps
            right = (min(end, last) - first) * width // num_steps + 1
            if right > left:
                np.maximum(line[left:right], cell, out=line[left:right])
    return Grid(cells, first, num_steps, num_inputs)


def _spans(row: Drawn, last: int, *, is_repeated: bool, is_replaced: bool) -> Iterator[tuple[int, int, Cell]]:
    """Return (first step, last step, what it was) of one row; later ones lie over earlier ones where they meet."""
    pulled, end = row.pulled_step, row.end_step
    if pulled is None:
        yield row.drawn_step, last if end is None else end, Cell.PULLED
    else:
        if end != pulled or row.fate == "lost":
            yield row.drawn_step, pulled, Cell.PULLED
        elif row.drawn_step < pulled:
            yield row.drawn_step, pulled - 1, Cell.PULLED
        until = last if end is None else end if row.fate in ("lost", "unrecorded") else end - 1
        if until > pulled:
            yield pulled + 1, until, Cell.IN_FLIGHT
    if is_repeated:
        yield end or pulled or row.drawn_step, last, Cell.REPEATED
    elif end is None:
        return
    elif row.fate == "trained":
        yield end, end, Cell.TRAINED
        yield end + 1, last, Cell.DONE
    elif row.fate == "dropped":
        yield end, last, Cell.DROPPED
    elif row.fate == "lost" and not is_replaced:
        yield min(end + 1, last), last, Cell.LOST
