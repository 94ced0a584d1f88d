"""Walks along the surviving lines and follows each input from the loader to its end.

`walk` looks at single inputs; what they add up to per epoch is in `audit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agl_async_ckpt.ledger.entry import InputName, Start, Step, position_of
from agl_async_ckpt.ledger.lineage import Lineage, Part
from agl_async_ckpt.words import plural

Fate = Literal["buffered", "in_flight", "trained", "dropped", "lost", "unrecorded"]

ProblemKind = Literal["lost", "repeated", "skipped", "epoch", "order", "gap", "unexplained"]


@dataclass
class Drawn:
    """One row that the loader has handed out: an input in one pass.

    Attributes:
        name: Of the input.
        epoch: (stream, epoch) it counts for; None if it was drawn before the account begins.
        segment: Rows of one segment and epoch come from one undisturbed pass of the loader.
        drawn_step: The step that drew it; the step before the account begins, if it was there already.
        pulled_step: The step that enqueued it, or None.
        end_step: The step that trained or dropped it, or the last step whose checkpoint knew it if it was lost.
        fate: What has become of it.
        where_lost: Index of the resume that lost it.
        was_buffered: When it was lost.
    """

    name: InputName
    epoch: tuple[int, int] | None
    segment: int
    drawn_step: int
    pulled_step: int | None = None
    end_step: int | None = None
    fate: Fate = "buffered"
    where_lost: int | None = None
    was_buffered: bool = False


@dataclass(frozen=True)
class Problem:
    """Something that breaks the promise, or keeps the audit from telling whether it was kept.

    Attributes:
        kind: What it is.
        text: One sentence for people.
        inputs: Names of the inputs, if it is about inputs.
        life: The life that began with it, if a resume is the cause.
        step: The step that it resumed from, or where it was seen.
    """

    kind: ProblemKind
    text: str
    inputs: tuple[InputName, ...] = ()
    life: int | None = None
    step: int | None = None


@dataclass
class Walk:
    """What the surviving lines say.

    Attributes:
        rows: Every row drawn, in the order of drawing.
        problems: Seen on the way.
        resumes: The starts that continue an earlier life of this ledger, in order.
        skipped: Epoch -> rows that a resume has jumped over.
        unrecorded: Epochs in which the ledger lacks lines.
        shapes: Epoch -> the starts of the lives that drew in it.
    """

    rows: list[Drawn] = field(default_factory=list[Drawn])
    problems: list[Problem] = field(default_factory=list[Problem])
    resumes: list[Start] = field(default_factory=list[Start])
    skipped: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    unrecorded: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    shapes: dict[tuple[int, int], list[Start]] = field(default_factory=dict[tuple[int, int], list[Start]])


def walk(lineage: Lineage) -> Walk:
    """Follow every input of a lineage."""
    walker = _Walker()
    for index, part in enumerate(lineage.parts):
        if index == 0:
            walker.on_first_start(part.start)
        else:
            walker.on_resume(lineage.parts[index - 1], part.start)
        for step in part.steps:
            walker.on_step(step)
    return walker.result


class _Walker:
    def __init__(self) -> None:
        self.result = Walk()
        self._in_flight: list[Drawn] = []
        self._buffered: list[Drawn] = []
        self._stream = 0
        self._segment = 0
        self._shift = 0
        self._last_step = 0
        self._loader_rows: int | None = None
        self._epoch = 0
        self._start: Start | None = None

    # --- starts -----------------------------------------------------------------------------------------------------

    def on_first_start(self, start: Start) -> None:
        """Begin the account with what a start has put back."""
        self._take_over(start)
        self._in_flight = [self._inherit(name, pulled=True) for name in start.in_flight]
        self._buffered = [self._inherit(name, pulled=False) for name in start.buffered]

    def on_resume(self, before: Part, start: Start) -> None:
        """Compare what a start has put back with what was there when its checkpoint was written."""
        result, saved_step = self.result, before.steps[-1].step if before.steps else before.start.step
        result.resumes.append(start)
        if saved_step < start.step:
            result.problems.append(missing_steps(saved_step + 1, start.step, start.life))
            for row in (*self._in_flight, *self._buffered):
                row.fate, row.end_step = "unrecorded", saved_step
            self._segment, self._shift = self._segment + 1, 0
            result.unrecorded |= {(self._stream, epoch) for epoch in range(self._epoch, start.epoch + 1)}
            self.on_first_start(start)
            return
        old = [*self._in_flight, *self._buffered]
        in_flight, gone, new = _match(self._in_flight, start.in_flight)
        buffered, gone_buffered, new_buffered = _match(self._buffered, start.buffered)
        for row in (*gone, *gone_buffered):
            row.was_buffered = row.fate == "buffered"
            row.fate, row.end_step, row.where_lost = "lost", start.step, len(result.resumes) - 1
        if new or new_buffered:
            self._note_unexplained((*new, *new_buffered), f"life {start.life} began with", start.step)
            in_flight += [self._inherit(name, pulled=True) for name in new]
            buffered += [self._inherit(name, pulled=False) for name in new_buffered]
        if not gone and not new and [row.name for row in (*in_flight, *buffered)] != [row.name for row in old]:
            text = f"Life {start.life} was given back what step {start.step} held, in another order."
            result.problems.append(Problem("order", text, life=start.life, step=start.step))
        self._in_flight, self._buffered = in_flight, buffered
        self._continue_loader(start)
        self._take_over(start)

    def _continue_loader(self, start: Start) -> None:
        """Tell whether the loader goes on where it was, and which epoch the next rows count for."""
        assert self._start is not None
        if start.resume == "reset":
            self._stream, self._segment, self._shift = self._stream + 1, self._segment + 1, 0
            return
        was, now = self._loader_rows, start.loader_rows
        expected = self._epoch
        continuous = was == now or now is None or was is None
        if not continuous and now == 0 and was is not None and was >= self._start.rows_per_pass:
            expected += 1
            text = f"The loader of life {start.life} began a pass as if it were the first: an earlier order again."
            self.result.problems.append(Problem("order", text, life=start.life, step=start.step))
        elif was is not None and now is not None and now > was:
            self.result.skipped[self._stream, expected] += now - was
        elif was is not None and now is not None and now < was and not start.each_row_once:  # else names are counted
            text = f"The loader of life {start.life} went back from row {was} of its pass to row {now}."
            self.result.problems.append(Problem("order", text, life=start.life, step=start.step))
        if start.epoch + self._shift != expected:
            text = (
                f"Life {start.life} counts epoch {start.epoch} where the run was in epoch {expected}: it trains more "
                "passes than were asked for."
                if start.epoch + self._shift < expected
                else f"Life {start.life} counts epoch {start.epoch} where the run was in epoch {expected}."
            )
            self.result.problems.append(Problem("epoch", text, life=start.life, step=start.step))
        self._shift = expected - start.epoch
        if not continuous or any(position_of(row.name) is not None for row in self.result.rows[-1:]):
            self._segment += 1  # names with positions need no trust in the loader: no row twice, whoever drew it

    def _take_over(self, start: Start) -> None:
        self._start, self._last_step = start, start.step
        self._loader_rows, self._epoch = start.loader_rows, start.epoch + self._shift

    def _inherit(self, name: InputName, *, pulled: bool) -> Drawn:
        row = Drawn(name, None, self._segment, self._last_step)
        if pulled:
            row.fate, row.pulled_step = "in_flight", self._last_step
        self.result.rows.append(row)
        return row

    # --- steps ------------------------------------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """Move every input as one step did."""
        follows_a_gap = step.step > self._last_step + 1
        if follows_a_gap:
            self.result.problems.append(missing_steps(self._last_step + 1, step.step - 1, step.life))
            epochs = range(self._epoch, step.epoch + self._shift + 1)
            self.result.unrecorded |= {(self._stream, epoch) for epoch in epochs}
        self._buffered += self._draw(step)
        pulled, rest, unknown = _match(self._buffered, step.pulled)
        if unknown:
            self._note_unexplained(unknown, "the step pulled", step.step)
            pulled += [self._inherit(name, pulled=False) for name in unknown]
        self._buffered, left_out, _ = _match(rest, step.buffered)
        for row in left_out:
            row.fate, row.end_step = "unrecorded" if follows_a_gap else "dropped", step.step
        for row in pulled:
            row.fate, row.pulled_step = "in_flight", step.step
        active = self._in_flight + pulled
        trained, active, unknown_trained = _match(active, step.trained)
        dropped, active, unknown_dropped = _match(active, step.dropped_by_trainer)
        for row in trained:
            row.fate, row.end_step = "trained", step.step
        for row in dropped:
            row.fate, row.end_step = "dropped", step.step
        still, gone, unknown_still = _match(active, step.in_flight)
        for row in gone:
            row.fate, row.end_step = "lost", step.step
        if gone:
            text = f"{plural(len(gone), 'input')} left what was in flight in step {step.step} without being trained."
            self.result.problems.append(Problem("lost", text, tuple(row.name for row in gone), step.life, step.step))
        strangers = (*unknown_trained, *unknown_dropped, *unknown_still)
        if strangers:
            self._note_unexplained(strangers, "the step had", step.step)
        self._in_flight = still + [self._inherit(name, pulled=True) for name in unknown_still]
        self._last_step, self._loader_rows, self._epoch = step.step, step.loader_rows, step.epoch + self._shift

    def _draw(self, step: Step) -> list[Drawn]:
        names = step.handed_out
        if names is None:
            names = [*step.pulled, *step.buffered][len(self._buffered) :]
        epochs = [epoch for epoch, count in step.drawn for _ in range(count)]
        epochs += [step.epoch] * (len(names) - len(epochs))
        assert self._start is not None
        rows: list[Drawn] = []
        for name, epoch in zip(names, epochs, strict=False):
            key = (self._stream, epoch + self._shift)
            rows.append(Drawn(name, key, self._segment, step.step))
            shapes = self.result.shapes.setdefault(key, [])
            if not shapes or shapes[-1] is not self._start:
                shapes.append(self._start)
        self.result.rows += rows
        return rows

    def _note_unexplained(self, names: Sequence[InputName], what: str, step: int) -> None:
        text = f"Step {step}: {what} {plural(len(names), 'input')} that no earlier line of the ledger accounts for."
        self.result.problems.append(Problem("unexplained", text, tuple(names), step=step))


def _match(rows: Sequence[Drawn], names: Iterable[InputName]) -> tuple[list[Drawn], list[Drawn], list[InputName]]:
    """Find the rows of `names`, equal names by count, older rows first.

    Returns:
        The rows found, in the order of `names`; the other rows, in their order; the names not found.
    """
    by_name: dict[InputName, list[Drawn]] = {}
    for row in reversed(rows):
        by_name.setdefault(row.name, []).append(row)
    found: list[Drawn] = []
    unknown: list[InputName] = []
    for name in names:
        if by_name.get(name):
            found.append(by_name[name].pop())
        else:
            unknown.append(name)
    taken = {id(row) for row in found}
    return found, [row for row in rows if id(row) not in taken], unknown


def missing_steps(first: int, last: int, life: int) -> Problem:
    """Note steps without a line."""
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    text = f"The ledger has no line of {which}: what was trained there cannot be told."
    return Problem("gap", text, life=life, step=first)
