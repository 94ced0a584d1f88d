"""Where an automatic resume begins, and why: the step that the tracker names, or what VERL does not tolerate.

A look at the folder, without a trainer: the resume acts on it and logs it, the command `plan` prints it. Imports
neither torch nor numpy, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_async_ckpt.exceptions import AsyncCheckpointError, StateMismatchError
from agl_async_ckpt.folder.run_identity import read_run
from agl_async_ckpt.folder.steps import StepInfo, TrackerProblem, list_steps, read_tracker
from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage.layout import SEAL_NAME, TRACKER_NAME, parse_step
from agl_async_ckpt.storage.trailer import Trailer
from agl_async_ckpt.words import plural

MAX_LISTED = 8


@dataclass(frozen=True)
class Decision:
    """Where a start begins.

    Attributes:
        step_dir: `global_step_<N>` to resume from; None to train from scratch.
        reason: Why, to follow the path or "training from scratch".
        doubt: What is wrong with the folder, though the start goes on.
        error: Why the start is refused; then there is no `step_dir`.
    """

    step_dir: Path | None = None
    reason: str = ""
    doubt: str | None = None
    error: AsyncCheckpointError | None = None

    @property
    def warning(self) -> str | None:
        """What a start logs of its doubt."""
        if self.doubt is None:
            return None
        if self.step_dir is None:
            return f"{self.doubt}: training from scratch."
        return f"{self.doubt}. Resuming from {self.reason}, {self.step_dir}."


@dataclass(frozen=True)
class Position:
    """The numbers of a saved position.

    Attributes:
        global_step: Optimizer steps done.
        epoch: 1-based.
        counts: `InputState.counts`.
    """

    global_step: int
    epoch: int
    counts: Mapping[str, int]

    @classmethod
    def of(cls, saved: InputState | Trailer) -> Position:
        """Take the numbers of a state, or of a file that was not unpickled."""
        return cls(saved.global_step, saved.epoch, saved.counts)


def decide_latest(folder: Path) -> Decision:
    """Decide what `trainer.resume_mode=auto` does: the tracker's step, or the newest complete one if it misleads.

    A selected step without an input state (the plain trainer's) or with a damaged one (no crash leaves that behind) is
    kept: whoever reads it says what that means.
    """
    try:
        return _decide_latest(folder)
    except AsyncCheckpointError as error:  # the run's identity cannot be read
        return Decision(error=error)


def _decide_latest(folder: Path) -> Decision:
    steps = list_steps(folder)
    tracker = read_tracker(folder)
    selected = next((step for step in steps if step.selected), None)
    chosen = f"which {TRACKER_NAME} names"
    if selected is not None and not selected.abandoned and (selected.complete or not selected.has_state):
        return Decision(selected.path, chosen)
    if not steps:
        if tracker is None:
            return Decision(reason=f"there is no checkpoint in {folder}")
        doubt = f"{_doubt(folder, tracker, None)}, and there is no checkpoint beside it"
        return Decision(reason=doubt, doubt=doubt)
    branch = [step for step in steps if not step.abandoned]
    newest = next((step for step in reversed(branch) if step.complete), None)
    if newest is None and (fact := _nothing_to_lose(folder, steps, branch, tracker)) is not None:
        return Decision(reason=fact, doubt=fact)
    if newest is None:
        return Decision(error=_none_complete(folder, steps))
    if selected is not None and not selected.abandoned and selected.trailer is None:
        return Decision(selected.path, chosen)
    return Decision(
        newest.path,
        "the newest complete checkpoint",
        _doubt(folder, tracker, selected),
    )


def tracker_to_write(folder: Path, step_dir: Path) -> int | None:
    """Return the step that a start from `step_dir` makes the tracker of its output folder name; None to leave it.

    After going back by `resume_path` too: until the first save an automatic start would take the step that was left.
    """
    step = parse_step(step_dir)
    is_own = step_dir.parent.resolve() == folder.resolve()
    return step if is_own and read_tracker(folder) != step else None


def position_text(step_dir: Path, reason: str, position: Position) -> str:
    """Say what a resume restores: in its log, and in `plan` beforehand.

    Args:
        step_dir: The checkpoint folder.
        reason: Why this one, as in `Decision`.
        position: What it holds.
    """
    counts = position.counts
    num_groups = counts["num_carry_over_groups"]
    rollouts = (
        f" ({plural(counts['num_carry_over_rollouts'], 'rollout')}, {counts['num_finished_rollouts']} finished)"
        if num_groups
        else ""
    )
    return (
        f"Resuming the input stream from {step_dir}, {reason}: step {position.global_step}, epoch {position.epoch}, "
        f"{plural(counts['num_buffered_inputs'], 'buffered input')} and {plural(num_groups, 'prompt group')} in flight"
        f"{rollouts}."
    )


def abandoned_text(left_at: int) -> str:
    """Say why a step is not of the training that goes on."""
    how = f"went back to step {left_at}" if left_at else "began anew"
    return f"of a branch that was left when the training {how}"


def _names_nothing(tracker: int | TrackerProblem | None) -> bool:
    """Tell whether no step was ever named: VERL opens the tracker, which empties it, before it writes the number."""
    return tracker is None or (isinstance(tracker, TrackerProblem) and tracker.kind in ("empty", "nul"))


def _nothing_to_lose(
    folder: Path, steps: list[StepInfo], branch: list[StepInfo], tracker: int | TrackerProblem | None
) -> str | None:
    """Say that this training has begun from scratch and has no save that returned; None if it has lost one.

    The seal is written last. A tracker that names the step without one is what a power cut can leave of VERL's unsynced
    files, or else a copy of a part of the folder, which another inode tells. Not for a fork, which began from a
    checkpoint elsewhere, nor for a training that went back to a step of this folder.
    """
    run = read_run(folder)
    if run is None:
        return None
    if run.branch:
        branch = [step for step in branch if step.has_state or step.selected]
        began_at = run.branch[-1][1]
    else:
        began_at = 0 if run.parent_run_id is None and [step.step for step in branch] == [run.first_step] else 1
    if began_at > 0 or len(branch) > 1:
        return None
    unfinished = branch[0] if branch else None
    if run.branch:
        left = [step.path for step in steps if step.abandoned and step.complete]
        beside = f" ({left[-1]} is of the one before; trainer.resume_from_path can name it)" if left else ""
        fact = f"The training that {folder} belongs to now began from scratch, and no save of it has finished{beside}"
    else:
        fact = f"The first save of this run, {branch[0].path}, never finished"
    if unfinished is None:
        return fact
    in_place = run.folder_inode == folder.stat().st_ino
    names_another = any(step.selected and step.abandoned for step in steps)
    is_first = _names_nothing(tracker) or names_another or (unfinished.selected and in_place)
    return fact if is_first and not (unfinished.path / SEAL_NAME).exists() else None


def _doubt(folder: Path, tracker: int | TrackerProblem | None, selected: StepInfo | None) -> str:
    if tracker is None:
        return f"{folder / TRACKER_NAME} is missing"
    if isinstance(tracker, TrackerProblem):
        return tracker.message.rstrip(".")
    if selected is None:
        return f"{folder / TRACKER_NAME} names step {tracker}, which does not exist"
    if selected.left_at is not None:
        return f"{folder / TRACKER_NAME} names step {tracker}, which is {abandoned_text(selected.left_at)}"
    return f"{selected.path} is not complete ({_joined(selected.problems)})"


def _none_complete(folder: Path, steps: list[StepInfo]) -> StateMismatchError:
    rows = [(step.path.name, _why_not(step)) for step in steps[-MAX_LISTED:]]
    left = [step.path for step in steps if step.abandoned and step.complete]
    other = f"{left[-1]} or another folder's checkpoint" if left else "another folder's checkpoint"
    return StateMismatchError(
        f"No checkpoint in {folder} is complete, and training from scratch would lose them silently.",
        rows,
        f"Bring back what one of them lacks, resume from {other} with trainer.resume_mode=resume_path, or start in "
        "an empty trainer.default_local_dir.",
    )


def _why_not(step: StepInfo) -> str:
    if step.left_at is not None and step.complete:
        return abandoned_text(step.left_at)
    return _joined(step.problems) or "incomplete"


def _joined(problems: Sequence[str]) -> str:
    return "; ".join(problem.rstrip(".") for problem in problems)
