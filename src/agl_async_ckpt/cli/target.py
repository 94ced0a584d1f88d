"""What PATH on the command line names: an output folder, a step of one, or a file alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agl_async_ckpt.exceptions import StateFormatError, UnsupportedVersionError, UsageError
from agl_async_ckpt.folder.steps import StepInfo, inspect_step, list_steps, read_branch, read_tracker
from agl_async_ckpt.storage.container import read_trailer
from agl_async_ckpt.storage.layout import FILE_NAME, RUN_FILE_NAME, TRACKER_NAME, parse_step

MAX_NEARBY = 3


@dataclass(frozen=True)
class Target:
    """What PATH names.

    Attributes:
        kind: "folder" (an output folder), "step", or "file" (an input file that lies in no step folder).
        path: Absolute; links are kept.
    """

    kind: Literal["folder", "step", "file"]
    path: Path

    @property
    def folder(self) -> Path:
        """The output folder; of a file alone, the folder that it is in."""
        return self.path if self.kind == "folder" else self.path.parent

    def steps(self, *, full: bool = False) -> list[StepInfo]:
        """Look at the steps, in ascending order; of a file alone there are none.

        Args:
            full: Hash the files of a step that PATH names; all steps of an output folder are looked at cheaply.
        """
        if self.kind == "folder":
            return list_steps(self.path)
        if self.kind == "step":
            return [inspect_step(self.path, read_tracker(self.folder), read_branch(self.folder), full=full)]
        return []


def find_target(given: str) -> Target:
    """Find what a path names.

    Raises:
        UsageError: Nothing is there, or something that no checkpoint is.
        OSError: It cannot be looked at.
    """
    path = Path(os.path.abspath(given))  # noqa: PTH100 - keeps links, drops a trailing slash
    try:
        if not given:
            raise FileNotFoundError
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{given or 'The empty path'} does not exist.") from None
    path.stat()  # a link that leads nowhere
    if path.is_dir():
        os.scandir(path).close()
        return Target("folder" if parse_step(path) is None else "step", path)
    if not path.is_file():
        raise UsageError(f"{path} is neither a folder nor a regular file.")
    if path.name == FILE_NAME and parse_step(path.parent) is not None:
        return Target("step", path.parent)
    return Target("file", path)


def require_input_file(path: Path) -> None:
    """Refuse a file that is no input state, unless it bears the name of one.

    Raises:
        UsageError: Says what it is instead.
    """
    try:
        read_trailer(path)
    except UnsupportedVersionError:
        return
    except StateFormatError as error:
        if path.name != FILE_NAME:
            raise UsageError(f"{path} is no input state of agl-async-ckpt: {error}") from error


def is_checkpoint_folder(folder: Path) -> bool:
    """Tell whether a training run has left anything of its own in an output folder."""
    return any((folder / name).exists() for name in (TRACKER_NAME, RUN_FILE_NAME)) or bool(list_steps(folder))


def no_checkpoints(folder: Path) -> str:
    """Say that a folder holds no checkpoint, and which folders below it do."""
    text = f"There are no checkpoints in {folder}: no folder in it is named global_step_<N>."
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and _has_steps(path)]
    if not below:
        return text
    return f"{text} Did you mean {' or '.join(map(str, below[:MAX_NEARBY]))}?"


def _has_steps(folder: Path) -> bool:
    try:
        return any(parse_step(path) is not None and path.is_dir() for path in folder.iterdir())
    except OSError:
        return False
