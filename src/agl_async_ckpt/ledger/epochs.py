"""What the rows of each epoch add up to: each row of the dataset is to be trained once per epoch."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from agl_async_ckpt.ledger.entry import InputName, Start, position_of
from agl_async_ckpt.ledger.lineage import Lineage
from agl_async_ckpt.ledger.walk import Drawn, Walk


@dataclass
class EpochAccount:
    """The inputs of one epoch.

    The lists hold an input as often as it counts. `num_trained` of 0, 1 and 2 or more add up to `num_inputs`.

    Attributes:
        epoch: As the trainer counts it, from 1; counted on where a resume began to count again.
        stream: 0; one more after each reset of the position.
        num_inputs: Rows that a pass draws, less those drawn before the account begins.
        num_trained: Times trained (2: two or more) -> number of inputs.
        lost: Drawn and never trained, because a resume did not bring them back.
        repeated_rows: Trained, or pending, more than once: those that are more than the epoch needs.
        replaced_rows: Lost, and drawn again in the same epoch: no loss.
        dropped_by_trainer: The trainer left them out before they were enqueued, or used none of their samples.
        in_flight: Enqueued and unfinished at the end.
        buffered: Handed out by the loader and not enqueued at the end.
        num_left_out: Rows that do not fill a loader batch.
        left_out: Their positions, where the dataset knows them.
        num_skipped: Rows that a resume has jumped over.
        num_not_drawn: Rows that the run has not reached.
        num_unrecorded: Rows of which nothing is known, because the ledger lacks lines.
        is_over: The loader has gone on to the next epoch.
    """

    epoch: int
    stream: int = 0
    num_inputs: int = 0
    num_trained: Counter[int] = field(default_factory=Counter[int])
    lost: list[InputName] = field(default_factory=list[InputName])
    repeated_rows: list[Drawn] = field(default_factory=list[Drawn])
    replaced_rows: list[Drawn] = field(default_factory=list[Drawn])
    dropped_by_trainer: list[InputName] = field(default_factory=list[InputName])
    in_flight: list[InputName] = field(default_factory=list[InputName])
    buffered: list[InputName] = field(default_factory=list[InputName])
    num_left_out: int = 0
    left_out: list[int] = field(default_factory=list[int])
    num_skipped: int = 0
    num_not_drawn: int = 0
    num_unrecorded: int = 0
    is_over: bool = False

    @property
    def repeated(self) -> list[InputName]:
        """The names of `repeated_rows`."""
        return [row.name for row in self.repeated_rows]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "epoch": self.epoch,
            "stream": self.stream,
            "num_inputs": self.num_inputs,
            "trained_0": self.num_trained[0],
            "trained_1": self.num_trained[1],
            "trained_2_or_more": self.num_trained[2],
            "lost": self.lost,
            "repeated": self.repeated,
            "dropped_by_trainer": self.dropped_by_trainer,
            "in_flight_at_end": self.in_flight,
            "buffered_at_end": self.buffered,
            "num_left_out_by_loader": self.num_left_out,
            "left_out_positions": self.left_out,
            "num_skipped": self.num_skipped,
            "num_not_drawn": self.num_not_drawn,
            "num_unrecorded": self.num_unrecorded,
            "is_over": self.is_over,
        }


def count_epochs(walked: Walk, lineage: Lineage) -> list[EpochAccount]:
    """Count the rows of each epoch."""
    copies = _count_copies(walked)
    groups: dict[tuple[int, int], dict[InputName, list[Drawn]]] = defaultdict(lambda: defaultdict(list))
    for row in walked.rows:
        if row.epoch is not None:
            groups[row.epoch][row.name].append(row)
    first = lineage.parts[0].start
    accounts: list[EpochAccount] = []
    for key in sorted(groups):
        account = EpochAccount(key[1], key[0])
        num_copies = 0
        shapes = walked.shapes[key]
        each_row_once = all(start.each_row_once for start in shapes)
        for name, rows in groups[key].items():
            num_copies += _add_rows(account, rows, copies[key[0], name] if each_row_once else len(rows))
        num_rows = shapes[-1].num_rows
        begun_before = key == (0, first.epoch) and bool(first.loader_rows)
        num_before = min(first.loader_rows or 0, num_rows - num_copies) if begun_before else 0
        account.num_inputs = num_rows - num_before
        account.is_over = any(later[0] == key[0] and later[1] > key[1] for later in groups)
        num_rest = account.num_inputs - num_copies
        account.num_trained[0] += max(0, num_rest)
        may_leave = _may_leave_out(shapes)
        if key in walked.unrecorded:
            account.num_unrecorded = max(0, num_rest)
        elif account.is_over or _is_exhausted(lineage, walked, key):
            account.num_left_out = min(num_rest, may_leave)
            account.num_skipped = max(0, num_rest - may_leave)
        else:
            account.num_skipped = min(walked.skipped[key], max(0, num_rest))
            account.num_not_drawn = max(0, num_rest - account.num_skipped)
        if account.num_left_out and each_row_once and not account.num_skipped and not begun_before:
            positions = {position_of(name) for name in groups[key]}
            account.left_out = [] if None in positions else sorted(set(range(num_rows)) - positions)
        accounts.append(account)
    return accounts


def _may_leave_out(shapes: list[Start]) -> int:
    """Count the rows of a pass that fill no batch; at most that many where the batch size changed within the pass."""
    if not shapes[-1].drop_last:
        return 0
    if len({(start.num_rows, start.loader_batch) for start in shapes}) == 1:
        return shapes[-1].num_rows - shapes[-1].rows_per_pass
    return max(start.loader_batch for start in shapes) - 1


def _is_exhausted(lineage: Lineage, walked: Walk, key: tuple[int, int]) -> bool:
    """Tell whether the loader has handed out the last batch of the newest epoch."""
    newest = max((row.epoch for row in walked.rows if row.epoch is not None), default=None)
    steps = lineage.parts[-1].steps
    if key != newest or not steps or steps[-1].loader_rows is None:
        return False
    return lineage.parts[-1].start.rows_left(steps[-1].loader_rows) == 0


def _count_copies(walked: Walk) -> Counter[tuple[int, InputName]]:
    """Count (stream, name) -> equal rows in the dataset: as many as one undisturbed pass has drawn."""
    seen: Counter[tuple[int, tuple[int, int], InputName]] = Counter()
    copies: Counter[tuple[int, InputName]] = Counter()
    for row in walked.rows:
        if row.epoch is None:
            continue
        seen[row.segment, row.epoch, row.name] += 1
        key = (row.epoch[0], row.name)
        copies[key] = max(copies[key], seen[row.segment, row.epoch, row.name])
    return copies


def _add_rows(account: EpochAccount, rows: list[Drawn], num_copies: int) -> int:
    """Count the rows of one name in one epoch; returns how many of the dataset's rows they are."""
    by_fate: dict[str, list[Drawn]] = defaultdict(list)
    for row in rows:
        by_fate[row.fate].append(row)
    kept = [row for row in rows if row.fate in ("trained", "dropped", "in_flight", "buffered")]
    num_due = min(num_copies, len(rows))
    num_lost = min(max(0, num_due - len(kept)), len(by_fate["lost"]))
    account.replaced_rows += by_fate["lost"][: len(by_fate["lost"]) - num_lost]
    account.repeated_rows += kept[num_due:]
    name, num_trained = rows[0].name, len(by_fate["trained"])
    num_twice = min(num_due, max(0, num_trained - num_due))
    num_once = min(num_trained, num_due) - num_twice
    account.num_trained.update({0: num_due - num_once - num_twice, 1: num_once, 2: num_twice})
    account.lost += [name] * num_lost
    account.dropped_by_trainer += [name] * len(by_fate["dropped"])
    account.in_flight += [name] * len(by_fate["in_flight"])
    account.buffered += [name] * len(by_fate["buffered"])
    return num_due
