"""What a start would do from a folder, and why, without a trainer and without a change: the command `plan`.

Decision, checks and texts are the resume's own. What only a run knows is not in it: whether its dataset and settings
fit the checkpoint, and what the server still holds of the rollouts in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.folder.decision import Decision, Position, decide_latest, position_text, tracker_to_write
from agl_async_ckpt.folder.judgement import dropped_text, judge_step, plain_step_text
from agl_async_ckpt.folder.lock import current_holder
from agl_async_ckpt.folder.run_identity import read_run
from agl_async_ckpt.storage.layout import TRACKER_NAME

Action = Literal["resume", "resume_without_position", "scratch", "refuse"]


@dataclass(frozen=True)
class ResumePlan:
    """What a start would do.

    Attributes:
        action: "resume" exactly, "resume_without_position" (what VERL saved, inputs are skipped), start from
            "scratch", or "refuse" with `text` as its error.
        step_dir: The folder it resumes from.
        text: As the start logs it, or raises it.
        warnings: As the start logs them.
        notes: What only a look from outside has to say.
        position: What is restored.
        repairs_tracker: The tracker is made to name `step_dir`.
    """

    action: Action
    step_dir: Path | None
    text: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    position: Position | None = None
    repairs_tracker: bool = False


def plan_latest(folder: Path) -> ResumePlan:
    """Plan a start with `trainer.resume_mode=auto` and `trainer.default_local_dir` = `folder`."""
    try:
        plan = _plan(decide_latest(folder))
        run = read_run(folder)
    except AsyncCheckpointError as error:
        return _refusal(error, _holder_notes(folder))
    notes = [*plan.notes, *_holder_notes(folder)]
    if plan.action == "resume" and (run is None or run.folder_inode != folder.stat().st_ino):
        notes.append(
            f"{folder} belongs to no run that is on record (a copy?): the start gets a run id of its own, adopts "
            "nothing from the server, and creates the rollouts in flight again."
        )
    repairs = plan.step_dir is not None and tracker_to_write(folder, plan.step_dir) is not None
    if repairs:
        notes.append(f"The start repairs {TRACKER_NAME}, once the step is verified.")
    return replace(plan, notes=tuple(notes), repairs_tracker=repairs)


def plan_explicit(step_dir: Path) -> ResumePlan:
    """Plan a start with `trainer.resume_mode=resume_path` and `trainer.resume_from_path` = `step_dir`."""
    try:
        return _plan(Decision(step_dir, "which trainer.resume_from_path names"))
    except AsyncCheckpointError as error:
        return _refusal(error)


def _plan(decision: Decision) -> ResumePlan:
    if decision.error is not None:
        return _refusal(decision.error)
    warnings = () if decision.warning is None else (decision.warning,)
    step_dir = decision.step_dir
    if step_dir is None:
        return ResumePlan("scratch", None, f"Training from scratch: {decision.reason}.", warnings)
    judgement = judge_step(step_dir)
    if judgement.refusal is not None:
        return _refusal(judgement.refusal)
    state = judgement.state
    if state is None:
        text = f"Resuming from {step_dir}, {decision.reason}, with what VERL saved: the extension was not active then."
        return ResumePlan("resume_without_position", step_dir, text, (*warnings, plain_step_text(step_dir)))
    dropped = dropped_text(state, step_dir)
    position = Position.of(state)
    return ResumePlan(
        "resume",
        step_dir,
        position_text(step_dir, decision.reason, position),
        warnings if dropped is None else (*warnings, dropped),
        position=position,
    )


def _refusal(error: AsyncCheckpointError, notes: tuple[str, ...] = ()) -> ResumePlan:
    return ResumePlan("refuse", None, str(error), notes=notes)


def _holder_notes(folder: Path) -> tuple[str, ...]:
    holder = current_holder(folder)
    if holder is None:
        return ()
    return (f"{folder} is in use by {holder}: a start now would wait for it to end, and then be refused.",)
