"""Writers with a known fault, made of the shipped one. The suite's own checks must convict each of them.

Each is a function that breaks the code in the process that calls it: a forked child.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import resume, save
from agl_async_ckpt.folder import models, run_identity, seal
from agl_async_ckpt.storage import commit, files
from agl_async_ckpt.storage.layout import TRACKER_NAME

Publish = Callable[..., None]

_shipped = files.publish


def _publish_with(publish: Publish) -> None:
    for module in (files, commit, seal, run_identity, resume):
        module.publish = publish  # type: ignore[attr-defined]


def in_place() -> None:
    """Writes the file under its own name."""

    def publish(target: Path, write: Callable[[int], None], before_rename: Callable[[], None] | None = None) -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        write(fd)
        os.fsync(fd)
        os.close(fd)
        if before_rename is not None:
            before_rename()
        files.sync_folder(target.parent)

    _publish_with(publish)


def _renaming(
    *, sync_before: bool = True, sync_after: bool = False, unlink_first: bool = False, sync_folder: bool = True
) -> Publish:
    def publish(target: Path, write: Callable[[int], None], before_rename: Callable[[], None] | None = None) -> None:
        temp = target.with_name(f".{target.name}.{os.getpid()}.01234567.tmp")
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        write(fd)
        if sync_before:
            os.fsync(fd)
        if before_rename is not None:
            before_rename()
        if unlink_first:
            target.unlink(missing_ok=True)
        temp.rename(target)
        if sync_after:
            os.fsync(fd)
        os.close(fd)
        if sync_folder:
            files.sync_folder(target.parent)

    return publish


def no_fsync() -> None:
    """Renames content that is in the page cache only."""
    _publish_with(_renaming(sync_before=False))


def late_fsync() -> None:
    """Renames first, syncs then."""
    _publish_with(_renaming(sync_before=False, sync_after=True))


def no_folder_fsync() -> None:
    """Leaves the new name to the page cache."""
    _publish_with(_renaming(sync_folder=False))


def unlink_then_rename() -> None:
    """Makes room for the new file first."""
    _publish_with(_renaming(unlink_first=True))


def swallowed_errors() -> None:
    """Goes on when a file cannot be published."""

    def publish(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):
            _shipped(*args, **kwargs)

    _publish_with(publish)


def tracker_first() -> None:
    """Names the step before its model and data.pt are written."""
    shipped = commit.commit_state

    def commit_state(state: Any, step_dir: Any) -> Path:
        path = shipped(state, step_dir)
        _shipped(Path(step_dir).parent / TRACKER_NAME, lambda fd: files.write_all(fd, str(state.global_step).encode()))
        return path

    commit.commit_state = save.commit_state = commit_state


def nothing_of_verls_synced() -> None:
    """Takes what VERL wrote for durable."""
    seal.sync_file = lambda path: None


def models_not_synced() -> None:
    """Takes the model files for durable."""
    models.sync_models = seal.sync_models = save.sync_models = lambda step_dir: None


def fsync_tried_twice() -> None:
    """Believes an fsync that fails, if it succeeds the second time: the kernel reports an error once."""
    fsync = os.fsync

    def twice(fd: int) -> None:
        try:
            fsync(fd)
        except OSError:
            fsync(fd)

    os.fsync = twice
