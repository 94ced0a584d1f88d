"""What the suite has tried, added up over all tests and shown at the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

PROPERTY = "faults"

LABELS = {
    "crash points": "killed before a system call of a save",
    "injected errors": "errors that a system call of a save returned",
    "short writes": "saves whose writes moved less than they were given",
    "full disks": "saves on a full file system or beyond a file size limit",
    "power cuts": "file systems that lost what was not durable",
    "reads": "reads beside a writer",
    "corruptions": "altered, cut or rearranged files, each refused by one named error",
    "fuzzed inputs": "hostile or random files given to the readers of small files",
    "hostile files": "pickles that would run code or take memory, refused without side effect",
    "broken writers caught": "writers with a known fault, convicted by the checks above",
}
"""Figure -> what it counts, in the order of the table."""

Count = Callable[[str, int], None]
"""Adds to a figure."""


def add_up(properties: Iterable[tuple[str, Any]]) -> Counter[str]:
    """Sum the figures among the properties that tests have recorded."""
    total: Counter[str] = Counter()
    for name, value in properties:
        if name == PROPERTY:
            total.update({value[0]: value[1]})
    return total
