"""What became of every input of a run, over all its lives: was the promise kept?

Per epoch each row of the dataset is to be trained once. No loss is what an uninterrupted run leaves untrained too: rows
that do not fill a loader batch (drop_last), rows still buffered or in flight at the end, rows that came back and whose
samples the trainer dropped, and rows that the run has not reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_async_ckpt.exceptions import DamagedStateError
from agl_async_ckpt.ledger.entry import End, InputName, Start
from agl_async_ckpt.ledger.epochs import EpochAccount, count_epochs
from agl_async_ckpt.ledger.lineage import Lineage, trace
from agl_async_ckpt.ledger.reader import Ledger, read_ledger
from agl_async_ckpt.ledger.walk import Drawn, Problem, Walk, missing_steps, walk
from agl_async_ckpt.words import plural

CAUSES = {
    "none": "this start began from scratch",
    "exact": "the checkpoint was to hold them",
    "drop": "saved with in_flight=drop",
    "reset": "on_mismatch=reset",
    "verl": "the checkpoint held no position: saved with enabled=false or without the extension",
    "off": "enabled=false: the position was not put back",
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

    @property
    def num_others(self) -> int:
        """How many problems are neither a loss nor a repetition."""
        return sum(problem.kind not in ("lost", "repeated") for problem in self.problems)

    @property
    def is_unknown(self) -> bool:
        """Whether there are problems, and none of them says anything of the promise: the ledger lacks lines."""
        return bool(self.problems) and all(problem.kind in ("gap", "unexplained") for problem in self.problems)

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
        raise DamagedStateError(f"{ledger.path} holds no start of a life: nothing can be audited.")
    walked = walk(lineage)
    epochs = count_epochs(walked, lineage)
    problems = [
        *walked.problems,
        *_find_missing_lines(lineage),
        *_find_losses(walked, epochs),
        *_find_repeats(epochs),
        *_find_skips(epochs),
    ]
    carried_in = [row for row in walked.rows if row.epoch is None]
    return Audit(ledger, lineage, epochs, carried_in, problems, _compose_notes(ledger, lineage, walked), walked)


def _find_missing_lines(lineage: Lineage) -> list[Problem]:
    """Tell which lines must have been there: the start of a life, the last steps of one that came to its end."""
    problems: list[Problem] = []
    if lineage.num_orphans:
        text = (
            f"{plural(lineage.num_orphans, 'line belongs', 'lines belong')} to a life whose start is missing; left out."
        )
        problems.append(Problem("gap", text))
    part = lineage.parts[-1]
    last = part.steps[-1].step if part.steps else part.start.step
    if part.reached > last:
        problems.append(missing_steps(last + 1, part.reached, part.start.life))
    return problems


def _find_losses(walked: Walk, epochs: list[EpochAccount]) -> list[Problem]:
    """Put the inputs that resumes have lost together, per resume and place."""
    replaced = {id(row) for epoch in epochs for row in epoch.replaced_rows}
    problems: list[Problem] = []
    for index, start in enumerate(walked.resumes):
        for buffered, place in ((False, "in flight"), (True, "buffered")):
            names = tuple(
                row.name
                for row in walked.rows
                if row.where_lost == index and id(row) not in replaced and row.was_buffered == buffered
            )
            if names:
                text = (
                    f"{plural(len(names), 'input')} {place} at step {start.step} "
                    f"{'was' if len(names) == 1 else 'were'} lost at the resume of life {start.life} "
                    f"({CAUSES[start.resume]})."
                )
                problems.append(Problem("lost", text, names, start.life, start.step))
    return problems


def _find_repeats(epochs: list[EpochAccount]) -> list[Problem]:
    return [
        Problem(
            "repeated",
            f"{plural(len(epoch.repeated), 'input is', 'inputs are')} trained, or about to be, once more than epoch "
            f"{epoch.epoch} needs.",
            tuple(epoch.repeated),
        )
        for epoch in epochs
        if epoch.repeated
    ]


def _find_skips(epochs: list[EpochAccount]) -> list[Problem]:
    return [
        Problem("skipped", f"{plural(epoch.num_skipped, 'row')} of epoch {epoch.epoch} never came out of the loader.")
        for epoch in epochs
        if epoch.num_skipped
    ]


def _compose_notes(ledger: Ledger, lineage: Lineage, walked: Walk) -> list[str]:
    first = lineage.parts[0].start
    notes: list[str] = []
    if first.is_fork:
        notes.append(f"A fork: it continues from {first.resumed_from}. What came before is in that folder's ledger.")
    elif first.step:
        notes.append(f"The ledger begins after step {first.step}: earlier steps are not audited.")
    if not first.is_fork and first.step and first.resume in ("verl", "off"):
        notes.append(
            f"The first start resumed from step {first.step} without the input position ({CAUSES[first.resume]}): what "
            "was pulled and not trained there is unknown."
        )
    if not all(part.start.each_row_once for part in lineage.parts):
        notes.append(
            "Which rows the sampler owes in an epoch is its own affair: each draw counts as an input, and a row that "
            "was drawn twice is no repetition."
        )
    resets = [start for start in walked.resumes if start.resume == "reset"]
    notes += [f"Life {start.life} dropped the position of step {start.step}: epochs count anew." for start in resets]
    if ledger.damaged:
        lines = ", ".join(str(number) for number, _ in ledger.damaged[:5])
        notes.append(f"{plural(len(ledger.damaged), 'line')} of the ledger cannot be read (line {lines}).")
    if ledger.unfinished:
        notes.append("The last line is unfinished: it is being written, or its writer was killed.")
    return notes
