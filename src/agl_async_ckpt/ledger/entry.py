"""One line of the ledger: the start of a life, a step, a gap, or the end of training (docs/format.md).

An input is named by a text: 16 hexadecimal digits of its content digest, and `@<position>` behind them where the
dataset knows its row numbers. Siblings of a prompt group are one input. Equal rows without a position have the same
name: readers count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from agl_async_ckpt.storage.small_json import Bounds, build, parse_object

FORMAT_VERSION = 1

MAX_EPOCH = 1_000_000
"""A line that counts further is damaged; a reader counts up to it."""

Count = Annotated[int, Bounds(0, 2**48)]
Epoch = Annotated[int, Bounds(0, MAX_EPOCH)]

InputName: TypeAlias = str
"""`<16 hex digits>` or `<16 hex digits>@<dataset position>`."""

ResumeKind = Literal["none", "exact", "drop", "reset", "verl", "off"]
"""What a start began with: nothing, the exact position, that without what was in flight, a checkpoint whose position
was dropped, or what VERL restores by itself: of a checkpoint without a position, or with the extension off."""


@dataclass(frozen=True)
class Start:
    """A life has begun: its checkpoint is loaded, nothing is pulled yet.

    Attributes:
        run_id: Of the output folder.
        life: Counts the starts of the run, from 1.
        step: Step that it resumed from; 0 from scratch.
        epoch: As the trainer will count it while training.
        resume: What became of the input position.
        resumed_from: The step folder, or None.
        is_fork: That folder lies in another output folder.
        parent_run_id: Of the run that a fork continues.
        in_flight: Inputs put back as in flight, oldest first.
        buffered: Inputs put back into the buffered batch, in order.
        loader_rows: Rows of the current pass that the loader has handed out; None if unknown.
        num_rows: Rows that the sampler draws in a pass.
        loader_batch: Rows of a loader batch.
        drop_last: The loader leaves out what does not fill a batch.
        time: Unix seconds.
        each_row_once: A pass of the sampler draws each row of the dataset once; else which rows are due is unknown.
    """

    run_id: str
    life: Count
    step: Count
    epoch: Epoch
    resume: ResumeKind
    resumed_from: str | None
    is_fork: bool
    parent_run_id: str | None
    in_flight: tuple[InputName, ...]
    buffered: tuple[InputName, ...]
    loader_rows: Count | None
    num_rows: Count
    loader_batch: Annotated[int, Bounds(1, 2**48)]
    drop_last: bool
    time: float
    each_row_once: bool = True

    @property
    def rows_per_pass(self) -> int:
        """Rows that the loader hands out in a whole pass."""
        return self.rows_left(0)

    def rows_left(self, rows: int) -> int:
        """Return how many rows the loader still hands out in a pass of which `rows` are gone.

        Where those were cut into batches of another size, another remainder is left out than in a whole pass.
        """
        left = max(0, self.num_rows - rows)
        return left // self.loader_batch * self.loader_batch if self.drop_last else left


@dataclass(frozen=True)
class Step:
    """One training step is over, with or without a batch.

    Attributes:
        run_id: Of the output folder.
        life: The life that did it.
        step: As the trainer counts optimizer steps.
        epoch: As the trainer counts it after the pull.
        pulled: Inputs enqueued by this step, in order.
        drawn: (epoch, number of rows) of what the loader handed out in this step, in order; the rows are `handed_out`.
        trained: Inputs of which at least one sample was trained.
        dropped_by_trainer: Inputs that came back finished and of which the trainer used no sample.
        in_flight: Inputs enqueued and unfinished after the step, oldest first.
        buffered: Inputs handed out by the loader and not enqueued yet, in order.
        loader_rows: Rows of the current pass that the loader has handed out; None if unknown.
        time: Unix seconds.
        handed_out: Inputs that the loader handed out in this step, in order. None: the end of `pulled` followed by
            `buffered`, as it is unless the trainer sorts or filters what it pulls.
    """

    run_id: str
    life: Count
    step: Count
    epoch: Epoch
    pulled: tuple[InputName, ...]
    drawn: tuple[tuple[Epoch, Count], ...]
    trained: tuple[InputName, ...]
    dropped_by_trainer: tuple[InputName, ...]
    in_flight: tuple[InputName, ...]
    buffered: tuple[InputName, ...]
    loader_rows: Count | None
    time: float
    handed_out: tuple[InputName, ...] | None = None


@dataclass(frozen=True)
class Gap:
    """Steps are done that have no line, since the trainer did not show what it trained.

    Attributes:
        run_id: Of the output folder.
        life: The life that did them.
        step: The last of them.
        time: Unix seconds.
    """

    run_id: str
    life: Count
    step: Count
    time: float


@dataclass(frozen=True)
class End:
    """`fit()` has returned: training is over.

    Attributes:
        run_id: Of the output folder.
        life: The life that came to the end.
        step: The last step that was done.
        time: Unix seconds.
    """

    run_id: str
    life: Count
    step: Count
    time: float


Entry: TypeAlias = Start | Step | Gap | End

_EVENTS: dict[str, type[Entry]] = {"start": Start, "step": Step, "gap": Gap, "end": End}
_NAMES = {cls: event for event, cls in _EVENTS.items()}


def to_line(entry: Entry) -> bytes:
    """Return the line of an entry, with its newline."""
    values = {"event": _NAMES[type(entry)], "v": FORMAT_VERSION, **vars(entry)}  # `asdict` would copy every name
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parse_line(line: bytes) -> Entry:
    """Read a line; keys that are not known are ignored.

    Raises:
        ValueError: It is no line of a ledger, or of another version.
    """
    values = parse_object(line)
    event, version = values.get("event"), values.get("v")
    if event not in _EVENTS:
        raise ValueError(f"no line of a ledger (event {event!r:.80})")
    if version != FORMAT_VERSION:
        raise ValueError(f"version {version!r:.80} of the line is not {FORMAT_VERSION}")
    return build(_EVENTS[event], values)


def position_of(name: InputName) -> int | None:
    """Return the dataset position in the name of an input; None where the dataset did not know it."""
    _, _, position = name.partition("@")
    return int(position) if position.isdecimal() and len(position) <= 19 else None
