"""Which lines of a ledger survive: a resume from step N discards what came after N.

A life that resumes from step N continues the life that has written checkpoint N: the latest before it that has a line
of step N, or an earlier one with such a line if only that left in flight and buffered what the new life was given back
(an older checkpoint that was named by hand).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agl_async_ckpt.ledger.entry import End, Entry, Gap, Start, Step


@dataclass
class Part:
    """What is left of one life.

    Attributes:
        start: Its first line.
        steps: Its surviving steps, in order.
        reached: The last step that it is known to have done, with or without a line; 0 if none.
        end: Set if training came to its end in it, and nothing went on from before.
    """

    start: Start
    steps: list[Step] = field(default_factory=list[Step])
    reached: int = 0
    end: End | None = None


@dataclass(frozen=True)
class Lineage:
    """The surviving lines.

    Attributes:
        parts: The lives that lead to the latest one, in order; each but the latest has done steps that survive.
        num_lives: All starts that the ledger has seen.
        num_discarded: Steps that were done and thrown away by a resume.
        num_orphans: Lines without the start of their life.
    """

    parts: tuple[Part, ...] = ()
    num_lives: int = 0
    num_discarded: int = 0
    num_orphans: int = 0

    @property
    def steps(self) -> list[Step]:
        """Every surviving step, in order."""
        return [step for part in self.parts for step in part.steps]


def trace(entries: Iterable[Entry]) -> Lineage:
    """Follow the latest life of a ledger back to where its account begins.

    Args:
        entries: In the order of the file. A line belongs to the life that it names, wherever it stands: the last line
            of a dying process may come after the first one of the next.
    """
    lives: dict[tuple[str, int], Part] = {}
    num_steps = num_lives = num_orphans = 0
    for entry in entries:
        key = (entry.run_id, entry.life)
        if isinstance(entry, Start):
            lives.pop(key, None)  # only in a ledger put together by hand; the newer one counts
            lives[key] = Part(entry)
            num_lives += 1
        elif key not in lives:
            num_orphans += 1
        elif isinstance(entry, End | Gap):
            lives[key].reached = max(lives[key].reached, entry.step)
            lives[key].end = entry if isinstance(entry, End) else lives[key].end
        else:
            lives[key].steps.append(entry)
            num_steps += 1
    order = list(lives.values())
    for part in order:
        part.steps = sorted({step.step: step for step in part.steps}.values(), key=lambda step: step.step)
    parts = _chain(order)
    return Lineage(tuple(parts), num_lives, num_steps - sum(len(part.steps) for part in parts), num_orphans)


def _chain(order: Sequence[Part]) -> list[Part]:
    if not order:
        return []
    chain = [order[-1]]
    index = len(order) - 1
    while True:
        start = chain[0].start
        found = None if start.step == 0 or start.is_fork else _parent(order[:index], start)
        if found is None:
            return chain
        index = found
        parent = order[index]
        chain.insert(0, Part(parent.start, [step for step in parent.steps if step.step <= start.step]))


def _parent(earlier: Sequence[Part], start: Start) -> int | None:
    """Return the index of the life whose checkpoint a start has loaded."""
    saved = [
        (index, step)
        for index, part in enumerate(earlier)
        for step in part.steps
        if step.step == start.step and step.step > part.start.step
    ]
    if saved:
        fitting = [index for index, step in saved if start.resume == "exact" and _held(step) == _held(start)]
        return (fitting or [index for index, _ in saved])[-1]
    # Its line is missing (the ledger was off, or the trainer shows nothing): what is known before it.
    before = [
        index
        for index, part in enumerate(earlier)
        if (part.steps and part.steps[0].step <= start.step) or part.start.step < start.step <= part.reached
    ]
    return before[-1] if before else None


def _held(entry: Start | Step) -> Counter[str]:
    return Counter(entry.in_flight) + Counter(entry.buffered)
