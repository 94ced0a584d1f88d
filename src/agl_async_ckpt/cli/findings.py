"""Everything that a resume would look at in a folder, as a list of findings: the command `verify`.

A step is judged by `folder.judgement`, as the resume judges it. A **problem** is what a resume refuses, loses inputs
over, or has to repair; a **note** costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agl_async_ckpt.exceptions import AsyncCheckpointError, DamagedStateError, MissingStateError
from agl_async_ckpt.folder.decision import Position, abandoned_text, decide_latest
from agl_async_ckpt.folder.judgement import (
    StepJudgement,
    being_saved,
    dropped_text,
    has_state,
    is_pruned,
    judge_file,
    judge_step,
)
from agl_async_ckpt.folder.liveness import read_record
from agl_async_ckpt.folder.lock import current_holder
from agl_async_ckpt.folder.run_identity import RunIdentity, read_run
from agl_async_ckpt.folder.steps import StepInfo, TrackerProblem, read_tracker
from agl_async_ckpt.storage.files import leftover_temps
from agl_async_ckpt.storage.layout import ALIVE_FILE_NAME, FILE_NAME, TRACKER_NAME

NOT_ACTIVE = "saved while the extension was not active"


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        path: What it is about.
        reason: What is wrong, or worth knowing.
        act: The next safe act; empty for a note that needs none.
    """

    path: Path
    reason: str
    act: str = ""


@dataclass
class Report:
    """What was found in one step, or in what lies beside the steps.

    Attributes:
        path: The step folder, the output folder, or the file.
        problems: What a resume refuses, loses inputs over, or has to repair.
        notes: What costs nothing.
        position: Of a step whose input state is whole.
        decoded: The input state was decoded.
        step: Its number, if it is a step.
    """

    path: Path
    step: int | None = None
    problems: list[Finding] = field(default_factory=list[Finding])
    notes: list[Finding] = field(default_factory=list[Finding])
    position: Position | None = None
    decoded: bool = False

    @property
    def sound(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify_step(info: StepInfo, steps: Sequence[StepInfo]) -> Report:
    """Judge one step as a resume from it would.

    Args:
        info: From a cheap look.
        steps: All steps beside it, from a cheap look, for the advice.
    """
    others = [step for step in reversed(steps) if step.complete and step.path != info.path]
    newest = next((step.path for step in sorted(others, key=lambda step: step.abandoned)), None)
    report = Report(info.path, info.step)
    if info.left_at is not None:
        report.notes.append(Finding(info.path, f"{abandoned_text(info.left_at)}: only a start that names it takes it"))
    writer = being_saved(info, current_holder(info.path.parent))
    if writer is not None:
        report.notes.append(Finding(info.path, f"being saved now, by {writer}"))
        return report
    try:
        judgement = judge_step(info.path)
    except DamagedStateError:  # the run's identity cannot be read, which is said of the folder
        judgement = StepJudgement(info.path)
    if judgement.is_plain or isinstance(judgement.error, MissingStateError):
        _judge_absence(info, judgement, report, newest)
        return report
    report.decoded = judgement.state is not None
    if judgement.error is not None:
        report.problems.append(_from_error(judgement.error, info.path / FILE_NAME, _advice(newest)))
    report.problems += [Finding(info.path, problem, _advice(newest)) for problem in judgement.problems]
    if judgement.state is not None:
        report.position = Position.of(judgement.state)
        dropped = dropped_text(judgement.state, info.path)
        report.notes += [] if dropped is None else [Finding(info.path, dropped)]
    return report


def verify_file(path: Path) -> Report:
    """Judge an input file that lies in no step folder: there is nothing to compare it with."""
    report = Report(path)
    judgement = judge_file(path)
    report.decoded = judgement.state is not None
    if judgement.error is not None:
        report.problems.append(_from_error(judgement.error, path, "Restore it from a copy."))
    report.notes.append(Finding(path, "it lies in no folder global_step_<N>: no seal, model or tracker was looked at"))
    return report


def verify_folder(folder: Path, steps: Sequence[StepInfo]) -> Report:
    """Judge what lies beside the steps: tracker, run, proof of life, leftovers of killed writers."""
    report = Report(folder)
    run: RunIdentity | None = None
    try:
        run = read_run(folder)
    except DamagedStateError as error:
        report.problems.append(_from_error(error, folder, ""))
    _judge_tracker(folder, steps, report)
    if run is not None and run.folder_inode != folder.stat().st_ino:
        report.notes.append(Finding(folder, "a copy of another run's folder: a resume gives it a run id of its own"))
    if run is None and report.sound and any(step.has_state for step in steps):
        report.notes.append(Finding(folder, "no run is on record here: a resume gives it a run id of its own"))
    _judge_proof_of_life(folder, run, report)
    report.notes += [
        Finding(path, "left behind by a writer that was killed; the next start removes it")
        for path in leftover_temps(folder)
    ]
    holder = current_holder(folder)
    if holder is not None:
        report.notes.append(Finding(folder, f"in use by {holder}: what it is saving now is not finished yet"))
    return report


def _judge_absence(info: StepInfo, judgement: StepJudgement, report: Report, newest: Path | None) -> None:
    if is_pruned(info.path) and not info.selected:
        report.notes.append(
            Finding(info.path, "no model and no input position (removed by retention?): no resume can take it")
        )
        return
    if judgement.error is not None:
        report.problems.append(_from_error(judgement.error, info.path, ""))
        return
    act = f"Resume from {newest}, or" if newest is not None else "To keep the position from now on,"
    report.problems.append(
        Finding(
            info.path,
            f"{NOT_ACTIVE}: it holds no input position. A resume from it skips the buffered rows and the prompts in "
            "flight of that save",
            f"{act} switch the extension on before training goes on: its next checkpoint is exact.",
        )
    )


def _judge_tracker(folder: Path, steps: Sequence[StepInfo], report: Report) -> None:
    path, tracker = folder / TRACKER_NAME, read_tracker(folder)
    if not report.sound:  # the run's identity cannot be read: no start gets as far as the tracker
        if isinstance(tracker, TrackerProblem):
            report.problems.append(Finding(path, tracker.message, "Repair the file above first."))
        return
    decision = decide_latest(folder)
    if decision.error is not None:
        report.problems.append(_from_error(decision.error, path, ""))
    elif decision.warning is not None:
        taken = (
            f"resumes from {decision.step_dir} and repairs the tracker" if decision.step_dir else "begins from scratch"
        )
        act = f"Nothing, if that is wanted: a start with resume_mode=auto {taken}."
        reason = decision.doubt if decision.step_dir and decision.doubt else decision.warning
        report.problems.append(Finding(path, reason, act))
    elif steps and all(not has_state(step.path) for step in steps):
        report.notes.append(Finding(folder, f"all {len(steps)} steps here were {NOT_ACTIVE}"))


def _judge_proof_of_life(folder: Path, run: RunIdentity | None, report: Report) -> None:
    path = folder / ALIVE_FILE_NAME
    try:
        known = read_record(folder)
    except DamagedStateError as error:
        kind = type(error.__cause__).__name__
        report.notes.append(
            Finding(path, f"cannot be read ({kind}): a resume runs rollouts again that ended before it")
        )
        return
    if known is not None and run is not None and known.run_id != run.run_id and known.lives:
        report.notes.append(Finding(path, "of another run: a resume takes no notice of it"))


def _advice(newest: Path | None) -> str:
    if newest is not None:
        return f"Resume from {newest} with trainer.resume_mode=resume_path and trainer.resume_from_path."
    return "There is no complete step beside it. Restore it from a copy, or resume from another output folder."


def _from_error(error: AsyncCheckpointError, path: Path, act: str) -> Finding:
    return Finding(path, error.said, error.act or act)
