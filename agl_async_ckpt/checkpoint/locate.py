"""Which checkpoint folder a start resumes from: what VERL would choose, with what VERL does not tolerate."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from agl_async_ckpt.config import SECTION
from agl_async_ckpt.exceptions import CheckpointNotFoundError, StateMismatchError
from agl_async_ckpt.storage.layout import SEAL_NAME, TRACKER_NAME, parse_step
from agl_async_ckpt.storage.run_identity import read_run
from agl_async_ckpt.storage.steps import StepInfo, TrackerProblem, list_steps, read_tracker

log = logging.getLogger(__name__)

MAX_LISTED = 8


def output_folder(trainer: Any) -> Path:
    """The absolute `trainer.default_local_dir`."""
    return Path(os.path.abspath(trainer.config.trainer.default_local_dir))  # noqa: PTH100 - keeps symlinks


def locate(trainer: Any) -> Path | None:
    """Decide the `global_step_<N>` folder to resume from; None to start from scratch.

    Raises:
        CheckpointNotFoundError: An explicit path is no checkpoint folder.
        StateMismatchError: There are steps, and none of them is complete.
    """
    mode = trainer.config.trainer.resume_mode
    if mode == "disable":
        return None
    if mode == "resume_path":
        return explicit_step(trainer.config.trainer.resume_from_path)
    return latest_step(output_folder(trainer))


def verl_choice(trainer: Any) -> Path | None:
    """Return the folder that VERL itself would resume from, without a word about what it could not follow."""
    section = trainer.config.trainer
    if section.resume_mode == "resume_path":
        path = Path(os.path.abspath(str(section.resume_from_path)))  # noqa: PTH100
        return path if parse_step(path) is not None and path.is_dir() else None
    if section.resume_mode == "disable":
        return None
    folder = output_folder(trainer)
    return next((step.path for step in list_steps(folder) if step.selected), None)


def explicit_step(resume_from_path: Any) -> Path:
    """Normalise an explicit resume path: relative, with a trailing slash, as VERL cannot read it.

    Raises:
        CheckpointNotFoundError: Says what a checkpoint folder looks like, and lists those nearby.
    """
    if not isinstance(resume_from_path, str) or not resume_from_path:
        raise CheckpointNotFoundError(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path, got {resume_from_path!r}.\n"
            "Set it to a checkpoint folder: <output folder>/global_step_<N>."
        )
    path = Path(os.path.abspath(resume_from_path))  # noqa: PTH100 - keeps symlinks, drops a trailing slash
    if parse_step(path) is not None and path.is_dir():
        return path
    folders = [path, *path.parents][:3]
    nearby = [str(step.path) for folder in folders if folder.is_dir() for step in list_steps(folder)][-MAX_LISTED:]
    raise CheckpointNotFoundError(
        f"trainer.resume_from_path is no checkpoint folder: {resume_from_path}\n"
        "A checkpoint folder is <output folder>/global_step_<N>, as written by a save.\n"
        + ("Nearby:\n" + "\n".join(f"  {found}" for found in nearby) if nearby else "There are none nearby.")
    )


def latest_step(folder: Path) -> Path | None:
    """Return the step that the tracker selects, or the newest complete one if the tracker cannot be followed.

    A tracker that is empty, torn, or names a missing or incomplete step is warned about; `resume` repairs it once the
    chosen step is verified.

    Raises:
        StateMismatchError: Steps exist and none is complete (but for a first save that never finished).
    """
    steps = list_steps(folder)
    tracker = read_tracker(folder)
    selected = next((step for step in steps if step.selected), None)
    if selected is not None and (selected.complete or not selected.has_state):
        return selected.path  # without a state it is a checkpoint of the plain trainer: the caller decides
    if not steps:
        if tracker is not None:
            log.warning(
                "%s, and there is no checkpoint beside it: training from scratch.", _doubt(folder, tracker, None)
            )
        return None
    newest = next((step for step in reversed(steps) if step.complete), None)
    if newest is None and tracker is None and _died_in_first_save(folder, steps):
        log.warning("The first save of this run, %s, never finished: training from scratch.", steps[0].path)
        return None
    if newest is None:
        raise StateMismatchError(_none_complete(folder, steps))
    if selected is not None and selected.trailer is None:
        # No crash leaves a damaged input file behind, so this is for a person to judge: reading it is refused by name.
        return selected.path
    log.warning("%s. Resuming from the newest complete checkpoint, %s.", _doubt(folder, tracker, selected), newest.path)
    return newest.path


def _died_in_first_save(folder: Path, steps: list[StepInfo]) -> bool:
    """Whether all there is is the run's very first save, which was never published: no checkpoint is lost with it.

    Tracker and seal are written last, so without both nothing ever was selectable. Not for a fork, which began from a
    checkpoint elsewhere.
    """
    run = read_run(folder)
    return (
        run is not None
        and run.parent_run_id is None
        and [step.step for step in steps] == [run.first_step]
        and not (steps[0].path / SEAL_NAME).exists()
    )


def _doubt(folder: Path, tracker: int | TrackerProblem | None, selected: StepInfo | None) -> str:
    if tracker is None:
        return f"{folder / TRACKER_NAME} is missing"
    if isinstance(tracker, TrackerProblem):
        return tracker.message.rstrip(".")
    if selected is None:
        return f"{folder / TRACKER_NAME} names step {tracker}, which does not exist"
    return f"{selected.path} is not complete ({'; '.join(selected.problems)})"


def _none_complete(folder: Path, steps: list[StepInfo]) -> str:
    rows = [f"  {step.path.name}: {'; '.join(step.problems) or 'incomplete'}" for step in steps[-MAX_LISTED:]]
    return "\n".join(
        [
            f"No checkpoint in {folder} is complete, and training from scratch would lose them silently.",
            *rows,
            "Repair one, name one with trainer.resume_mode=resume_path, or start in an empty trainer.default_local_dir"
            f" ({SECTION} changes nothing here).",
        ]
    )
