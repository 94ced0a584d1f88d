"""Which checkpoint folder a trainer's start resumes from: by its settings, then by what the folder holds."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.exceptions import CheckpointNotFoundError
from agl_async_ckpt.folder.decision import MAX_LISTED, Decision, decide_latest
from agl_async_ckpt.folder.steps import list_steps
from agl_async_ckpt.storage.layout import parse_step

log = logging.getLogger(__name__)


def output_folder(trainer: internals.Trainer) -> Path:
    """Return the absolute `trainer.default_local_dir`."""
    return Path(os.path.abspath(trainer.config.trainer.default_local_dir))  # noqa: PTH100 - keeps symlinks


def locate(trainer: internals.Trainer) -> Path | None:
    """Decide the `global_step_<N>` folder to resume from; None to start from scratch.

    Raises:
        CheckpointNotFoundError: An explicit path is no checkpoint folder.
        StateMismatchError: There are steps, and none of them is complete.
    """
    return accept(choose_start(trainer))


def choose_start(trainer: internals.Trainer) -> Decision:
    """Decide where a start begins, without acting on it.

    Raises:
        CheckpointNotFoundError: An explicit path is no checkpoint folder.
    """
    mode = trainer.config.trainer.resume_mode
    if mode == "disable":
        return Decision(reason="trainer.resume_mode=disable")
    if mode == "resume_path":
        return Decision(explicit_step(trainer.config.trainer.resume_from_path), "which trainer.resume_from_path names")
    return decide_latest(output_folder(trainer))


def accept(decision: Decision) -> Path | None:
    """Return the folder to resume from, and log what is doubtful about it.

    Raises:
        AsyncCheckpointError: The start is refused.
    """
    if decision.error is not None:
        raise decision.error
    if decision.warning is not None:
        log.warning("%s", decision.warning)
    return decision.step_dir


def verl_choice(trainer: internals.Trainer) -> Path | None:
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
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path, got {resume_from_path!r}.",
            act="Set it to a checkpoint folder: <output folder>/global_step_<N>.",
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
