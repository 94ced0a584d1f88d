"""The steps of an output folder: which there are, which are complete, which one the tracker names.

Imports neither torch nor numpy, and changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from agl_async_ckpt.exceptions import AsyncCheckpointError, CheckpointNotFoundError, DamagedStateError
from agl_async_ckpt.folder.branch import left_at
from agl_async_ckpt.folder.run_identity import read_run
from agl_async_ckpt.folder.seal import Seal, read_seal, seal_problems
from agl_async_ckpt.storage.container import is_whole_zip, read_trailer, verify
from agl_async_ckpt.storage.files import read_small
from agl_async_ckpt.storage.layout import FILE_NAME, LOADER_FILE_NAME, TRACKER_NAME, parse_step
from agl_async_ckpt.storage.trailer import Branch, Trailer

__all__ = [
    "TRACKER_NAME",
    "StepInfo",
    "TrackerProblem",
    "inspect_step",
    "list_steps",
    "parse_step",
    "read_branch",
    "read_tracker",
]

_MAX_TRACKER_BYTES = 64


@dataclass(frozen=True)
class TrackerProblem:
    """A tracker file that names no step.

    Attributes:
        kind: "empty", "nul" (zero bytes, as a power cut leaves them), "release" (Megatron's word for a checkpoint that
            was converted, not trained), "torn" (anything else that is not a number) or "unreadable".
        message: The same with its path, for people.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class StepInfo:
    """One `global_step_<N>` folder.

    Attributes:
        step: N.
        path: The folder.
        has_state: There is an input state, whole or not.
        selected: The tracker names this step.
        about_file: What is wrong with the input state.
        about_rest: What is wrong with the rest of the step.
        trailer: Of the input state, if it can be read.
        seal: If there is one that can be read.
        left_at: The step that the training of this folder went back to and left this one behind, 0 if it began anew;
            None if this step is of its branch, or does not tell.
    """

    step: int
    path: Path
    has_state: bool
    selected: bool
    about_file: tuple[str, ...]
    about_rest: tuple[str, ...]
    trailer: Trailer | None = None
    seal: Seal | None = None
    left_at: int | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is not complete."""
        return self.about_file + self.about_rest

    @property
    def abandoned(self) -> bool:
        """The training has left the branch that this step is of: no start takes it unless it is named."""
        return self.left_at is not None

    @property
    def complete(self) -> bool:
        """An exact resume is possible, as far as it was looked at.

        The input state is whole and of this step; a valid seal or the tracker proves that the save finished (with
        async_save only the tracker does); what the driver saw at the save is still there.
        """
        return self.has_state and not self.problems


def read_tracker(folder: str | os.PathLike[str]) -> int | TrackerProblem | None:
    """Read the tracker of an output folder.

    Returns:
        The step it names, None if there is no tracker, or what is wrong with it. Never raises for its content.
    """
    path = Path(folder) / TRACKER_NAME
    try:
        data = read_small(path, _MAX_TRACKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return TrackerProblem("unreadable", f"{path} cannot be read: {error.strerror}.")
    except ValueError as error:
        return TrackerProblem("torn", f"{path} holds no number: it is {error}.")
    text = data.strip()
    if not data.strip(b"\0 \t\r\n"):
        kind = "nul" if b"\0" in data else "empty"
        return TrackerProblem(kind, f"{path} holds no number ({'zero bytes' if kind == 'nul' else 'it is empty'}).")
    if text == b"release":
        return TrackerProblem("release", f"{path} names a release, not a step.")
    if text.isdigit() and len(text) <= 18:
        return int(text)
    return TrackerProblem("torn", f"{path} holds no number, but {data[:40]!r}.")


def read_branch(folder: str | os.PathLike[str]) -> Branch | None:
    """Read which branch the training of an output folder is on; None where that is not on record."""
    try:
        run = read_run(Path(folder))
    except DamagedStateError:  # whoever needs the run itself says so
        return None
    return None if run is None else run.branch


def list_steps(folder: str | os.PathLike[str], *, full: bool = False) -> list[StepInfo]:
    """List the steps of an output folder in ascending order.

    Args:
        folder: Output folder; a missing one has no steps.
        full: Hash the files; else look at sizes, names and trailers only.
    """
    home = Path(folder)
    tracker, branch = read_tracker(home), read_branch(home)
    if not home.is_dir():
        return []
    found = [path for path in home.iterdir() if parse_step(path) is not None and path.is_dir()]
    infos = [inspect_step(path, tracker, branch, full=full) for path in found]
    return sorted(infos, key=lambda info: info.step)


def inspect_step(
    step_dir: str | os.PathLike[str],
    tracker: int | TrackerProblem | None,
    branch: Branch | None = None,
    *,
    full: bool = True,
    found: Trailer | AsyncCheckpointError | None = None,
) -> StepInfo:
    """Look at one step folder.

    Args:
        step_dir: `global_step_<N>`.
        tracker: What `read_tracker` says of its parent folder.
        branch: What `read_branch` says of it.
        full: Hash the files.
        found: What reading the input state has brought, if that was done; it is not read again then.

    Raises:
        CheckpointNotFoundError: The folder is not named `global_step_<N>`.
    """
    path = Path(step_dir)
    step = parse_step(path)
    if step is None:
        raise CheckpointNotFoundError(f"{path} is not named global_step_<N>.")
    selected = tracker == step
    trailer, seal = None, None
    about_file: list[str] = []
    problems: list[str] = []
    has_state = True
    try:
        if isinstance(found, AsyncCheckpointError):
            raise found
        trailer = found or (verify if full else read_trailer)(path / FILE_NAME)
        if trailer.global_step != step:
            about_file.append(f"{FILE_NAME} is of step {trailer.global_step}")
    except AsyncCheckpointError as error:
        about_file.append(str(error))
        # One look: a file that a trainer publishes right after it must not count as one that cannot be read.
        has_state = not isinstance(error, CheckpointNotFoundError)
    try:
        seal = read_seal(path)
    except AsyncCheckpointError as error:
        if not selected:
            problems.append(f"{error} The tracker does not name it either.")
        elif not is_whole_zip(path / LOADER_FILE_NAME):
            problems.append(f"{LOADER_FILE_NAME} is missing or damaged")
    if seal is not None:
        if trailer is not None:
            problems += seal_problems(seal, path, trailer, hashes=full)
        if seal.async_save and not selected:
            problems.append(
                "saved in the background, and the tracker does not name it: nothing proves that it finished"
            )
    left = None if branch is None or trailer is None else left_at(branch, step, trailer.branch)
    return StepInfo(step, path, has_state, selected, tuple(about_file), tuple(problems), trailer, seal, left)
