"""What became of every input of a run, over all its lives: was the promise kept?

Per epoch each row of the dataset is to be trained once. No loss is what an uninterrupted run leaves untrained too: rows
that do not fill a loader batch (drop_last), rows still buffered or in flight at the end, rows that came back and whose
samples the trainer dropped, and rows that the run has not reached.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_async_ckpt.ledger.entry import End, InputName, Start, position_of
from agl_async_ckpt.ledger.lineage import Lineage, trace
from agl_async_ckpt.ledger.reader import Ledger, read_ledger
from agl_async_ckpt.ledger.walk import Drawn, Problem, Walk, walk

CAUSES = {
    "none": "this start began from scratch",
    "exact": "the checkpoint was to hold them",
    "drop": "saved with in_flight=drop",
    "reset": "on_mismatch=reset",
    "verl": "the checkpoint did not hold them, or was not asked for them",
}


@dataclass
class EpochAccount:
    """The inputs of one epoch.

    The lists hold an input as often as it counts. `num_trained` of 0, 1 and 2 or more add up to `num_inputs`.

    Attributes:
        epoch: As the trainer counts it, from 1; counted on where a resume began to count again.
        stream: 0; one more after each reset of the position.
        num_inputs: Rows of the dataset, less those drawn before the account begins.
        num_trained: Times trained (2: two or more) -> number of inputs.
        lost: Drawn and never trained, because a resume did not bring them back.
        repeated: Trained, or pending, more than once.
        dropped_by_trainer: Came back finished; the trainer used none of their samples.
        in_flight: Enqueued and unfinished at the end.
        buffered: Handed out by the loader and not enqueued at the end.
        num_left_out: Rows that do not fill a loader batch.
        left_out: Their positions, where the dataset knows them.
        num_skipped: Rows that a resume has jumped over.
        num_not_drawn: Rows that the run has not reached.
        is_over: The loader has gone on to the next epoch.
    """

    epoch: int
    stream: int = 0
    num_inputs: int = 0
    num_trained: Counter[int] = field(default_factory=Counter[int])
    lost: list[InputName] = field(default_factory=list[InputName])
    repeated: list[InputName] = field(default_factory=list[InputName])
    dropped_by_trainer: list[InputName] = field(default_factory=list[InputName])
    in_flight: list[InputName] = field(default_factory=list[InputName])
    buffered: list[InputName] = field(default_factory=list[InputName])
    num_left_out: int = 0
    left_out: list[int] = field(default_factory=list[int])
    num_skipped: int = 0
    num_not_drawn: int = 0
    is_over: bool = False

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
            "is_over": self.is_over,
        }


@dataclass
class Audit:
    """The result.

    Attributes:
        ledger: What was read.
        lineage: Its surviving lines.
        epochs: In order.
        carried_in: Rows that were in flight or buffered when the account begins; they belong to what came before it.
        problems: Empty if the promise was kept.
        notes: What a reader should know and is no problem.
        walk: Every row that was drawn.
    """

    ledger: Ledger
    lineage: Lineage
    epochs: list[EpochAccount]
    carried_in: list[Drawn]
    problems: list[Problem]
    notes: list[str]
    walk: Walk

    @property
    def holds(self) -> bool:
        """Whether the promise was kept, as far as the ledger reaches."""
        return not self.problems

    @property
    def first(self) -> Start:
        """Where the account begins."""
        return self.lineage.parts[0].start

    @property
    def last_step(self) -> int:
        """The last surviving step."""
        steps = self.lineage.steps
        return steps[-1].step if steps else self.lineage.parts[-1].start.step

    @property
    def is_finished(self) -> bool:
        """Whether training came to its end; else it runs, or was killed."""
        return isinstance(self.lineage.parts[-1].end, End)

    @property
    def lost(self) -> list[InputName]:
        """Every lost input, as often as it was lost."""
        return [name for problem in self.problems if problem.kind == "lost" for name in problem.inputs]

    @property
    def repeated(self) -> list[InputName]:
        """Every input that was trained, or is pending, more than once in an epoch."""
        return [name for epoch in self.epochs for name in epoch.repeated]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        last = self.lineage.parts[-1].start
        return {
            "holds": self.holds,
            "ledger": str(self.ledger.path),
            "run_id": last.run_id,
            "first_step": self.first.step + 1,
            "last_step": self.last_step,
            "finished": self.is_finished,
            "lives": self.lineage.num_lives,
            "resumes": [{"life": s.life, "step": s.step, "kind": s.resume} for s in self.walk.resumes],
            "discarded_steps": self.lineage.num_discarded,
            "problems": [
                {
                    "kind": problem.kind,
                    "text": problem.text,
                    "inputs": list(problem.inputs),
                    "life": problem.life,
                    "step": problem.step,
                }
                for problem in self.problems
            ],
            "epochs": [epoch.as_json() for epoch in self.epochs],
            "carried_in": [row.name for row in self.carried_in],
            "notes": self.notes,
        }


def audit(path: Path) -> Audit:
    """Audit the run of an output folder, also while it trains.

    Args:
        path: The output folder, or its ledger.

    Raises:
        CheckpointNotFoundError: There is no ledger.
        DamagedStateError: It cannot be read, or does not hold the start of a life.
    """
    return audit_ledger(read_ledger(path))


def audit_ledger(ledger: Ledger) -> Audit:
    """Audit what was read.

    Raises:
        DamagedStateError: No start of a life is in it.
    """
    lineage = trace(ledger.entries)
    if not lineage.parts:
        raise _no_start(ledger)
    walked = walk(lineage)
    epochs = _epochs(walked, lineage)
    problems = [*walked.problems, *_losses(walked), *_repeats(epochs), *_skips(epochs)]
    carried_in = [row for row in walked.rows if row.epoch is None]
    return Audit(ledger, lineage, epochs, carried_in, problems, _notes(ledger, lineage, walked), walked)


def _epochs(walked: Walk, lineage: Lineage) -> list[EpochAccount]:
    """Count the rows of each epoch; marks rows that are repeated or replaced."""
    copies = _copies(walked)
    groups: dict[tuple[int, int], dict[InputName, list[Drawn]]] = defaultdict(lambda: defaultdict(list))
    for row in walked.rows:
        if row.epoch is not None:
            groups[row.epoch][row.name].append(row)
    first = lineage.parts[0].start
    accounts: list[EpochAccount] = []
    for key in sorted(groups):
        account = EpochAccount(key[1], key[0])
        num_copies = 0
        for name, rows in groups[key].items():
            num_copies += _count(account, rows, copies[key[0], name])
        shapes = walked.shapes[key]
        num_rows = shapes[-1].num_rows
        begun_before = key == (0, first.epoch) and bool(first.loader_rows)
        num_before = min(first.loader_rows or 0, num_rows - num_copies) if begun_before else 0
        account.num_inputs = num_rows - num_before
        account.is_over = any(later[0] == key[0] and later[1] > key[1] for later in groups)
        num_rest = account.num_inputs - num_copies
        account.num_trained[0] += max(0, num_rest)
        may_leave = max(start.loader_batch for start in shapes) - 1 if shapes[-1].drop_last else 0
        if account.is_over or _is_exhausted(lineage, walked, key):
            account.num_left_out = min(num_rest, may_leave)
            account.num_skipped = max(0, num_rest - may_leave)
        else:
            account.num_skipped = min(walked.skipped[key], max(0, num_rest))
            account.num_not_drawn = max(0, num_rest - account.num_skipped)
        if account.num_left_out and not account.num_skipped and not begun_before:
            positions = {position_of(name) for name in groups[key]}
            account.left_out = [] if None in positions else sorted(set(range(num_rows)) - positions)
        accounts.append(account)
    return accounts


def _is_exhausted(lineage: Lineage, walked: Walk, key: tuple[int, int]) -> bool:
    """Whether the loader has handed out the last batch of the newest epoch."""
    newest = max((row.epoch for row in walked.rows if row.epoch is not None), default=None)
    steps = lineage.parts[-1].steps
    if key != newest or not steps or steps[-1].loader_rows is None:
        return False
    start = lineage.parts[-1].start
    return start.num_rows - steps[-1].loader_rows < (start.loader_batch if start.drop_last else 1)


def _copies(walked: Walk) -> Counter[tuple[int, InputName]]:
    """(stream, name) -> equal rows in the dataset: as many as one undisturbed pass has drawn."""
    seen: Counter[tuple[int, tuple[int, int], InputName]] = Counter()
    copies: Counter[tuple[int, InputName]] = Counter()
    for row in walked.rows:
        if row.epoch is None:
            continue
        seen[row.segment, row.epoch, row.name] += 1
        key = (row.epoch[0], row.name)
        copies[key] = max(copies[key], seen[row.segment, row.epoch, row.name])
    return copies


def _count(account: EpochAccount, rows: list[Drawn], num_copies: int) -> int:
    """Count the rows of one name in one epoch; returns how many of the dataset's rows they are."""
    by_fate: dict[str, list[Drawn]] = defaultdict(list)
    for row in rows:
        by_fate[row.fate].append(row)
    kept = [row for row in rows if row.fate in ("trained", "dropped", "in_flight", "buffered")]
    num_due = min(num_copies, len(rows))
    num_lost = min(max(0, num_due - len(kept)), len(by_fate["lost"]))
    for row in by_fate["lost"][: len(by_fate["lost"]) - num_lost]:
        row.replaced = True
    for row in kept[num_due:]:
        row.repeated = True
        account.repeated.append(row.name)
    name, num_trained = rows[0].name, len(by_fate["trained"])
    num_twice = min(num_due, max(0, num_trained - num_due))
    num_once = min(num_trained, num_due) - num_twice
    account.num_trained.update({0: num_due - num_once - num_twice, 1: num_once, 2: num_twice})
    account.lost += [name] * num_lost
    account.dropped_by_trainer += [name] * len(by_fate["dropped"])
    account.in_flight += [name] * len(by_fate["in_flight"])
    account.buffered += [name] * len(by_fate["buffered"])
    return num_due


def _losses(walked: Walk) -> list[Problem]:
    """Put the inputs that resumes have lost together, per resume and place."""
    problems: list[Problem] = []
    for index, start in enumerate(walked.resumes):
        for buffered, place in ((False, "in flight"), (True, "buffered")):
            names = tuple(
                row.name
                for row in walked.rows
                if row.where_lost == index and not row.replaced and row.was_buffered == buffered
            )
            if names:
                text = (
                    f"{len(names)} input{'s' if len(names) > 1 else ''} {place} at step {start.step} "
                    f"{'were' if len(names) > 1 else 'was'} lost at the resume of life {start.life} "
                    f"({CAUSES[start.resume]})."
                )
                problems.append(Problem("lost", text, names, start.life, start.step))
    return problems


def _repeats(epochs: list[EpochAccount]) -> list[Problem]:
    return [
        Problem(
            "repeated",
            f"{len(epoch.repeated)} inputs are trained, or about to be, once more than epoch {epoch.epoch} needs.",
            tuple(epoch.repeated),
        )
        for epoch in epochs
        if epoch.repeated
    ]


def _skips(epochs: list[EpochAccount]) -> list[Problem]:
    return [
        Problem("skipped", f"{epoch.num_skipped} inputs of epoch {epoch.epoch} were never handed out by the loader.")
        for epoch in epochs
        if epoch.num_skipped
    ]


def _notes(ledger: Ledger, lineage: Lineage, walked: Walk) -> list[str]:
    first = lineage.parts[0].start
    notes: list[str] = []
    if first.is_fork:
        notes.append(f"A fork: it continues from {first.resumed_from}. What came before is in that folder's ledger.")
    elif first.step:
        notes.append(f"The ledger begins after step {first.step}: earlier steps are not audited.")
    if not first.is_fork and first.step and first.resume == "verl":
        notes.append(
            f"The checkpoint of step {first.step} did not hold the input position: what was pulled and not "
            "trained there is unknown."
        )
    resets = [start for start in walked.resumes if start.resume == "reset"]
    notes += [f"Life {start.life} dropped the position of step {start.step}: epochs count anew." for start in resets]
    if ledger.damaged:
        lines = ", ".join(str(number) for number, _ in ledger.damaged[:5])
        notes.append(f"{len(ledger.damaged)} lines of the ledger cannot be read (line {lines}).")
    if lineage.num_orphans:
        notes.append(f"{lineage.num_orphans} lines belong to a life whose start is missing; they were left out.")
    if ledger.unfinished:
        notes.append("The last line is unfinished: it is being written, or its writer was killed.")
    return notes


def _no_start(ledger: Ledger) -> Exception:
    from agl_async_ckpt.exceptions import DamagedStateError

    return DamagedStateError(f"{ledger.path} holds no start of a life: nothing can be audited yet.")
