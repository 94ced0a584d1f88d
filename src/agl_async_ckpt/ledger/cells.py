"""What a cell of the picture can show."""

from __future__ import annotations

from enum import IntEnum


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
