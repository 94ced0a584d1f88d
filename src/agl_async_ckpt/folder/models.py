"""The model files of a step, as far as the driver can see them: which there are, and making them durable.

VERL's workers write them in place and sync nothing. A file that another process of this machine wrote is in the same
page cache, so the driver can sync it; on node-local disks of other machines it sees nothing, and does nothing.

Others work in these folders too: an uploader, an editor, a network file system that hides what is still open. What
bears the name of a passing file is no part of the model, and what is gone when it is looked at was none.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from agl_async_ckpt.storage.files import sync_file, sync_folder
from agl_async_ckpt.storage.layout import MODEL_FOLDERS

_KEPT_HIDDEN = ".metadata"
"""Of torch's distributed checkpoints, without which they cannot be loaded; no backend writes another hidden name."""
_PASSING_NAME = re.compile(
    r"\..*|__pycache__|.*~"
    r"|.*\.(part|partial|filepart|incomplete|upload|uploading|download|crdownload|lock|swp)"
    r"|.*\.(tmp|temp)([._-]?[\da-f-]+)?",
    re.IGNORECASE,
)
_GONE = frozenset({errno.ENOENT, errno.ESTALE})


def is_model_file(name: str) -> bool:
    """Tell whether a file below `actor/` or `critic/` belongs to the model, by its path relative to the step."""
    return all(part == _KEPT_HIDDEN or not _PASSING_NAME.fullmatch(part) for part in PurePosixPath(name).parts)


def list_models(step_dir: Path) -> dict[str, int]:
    """List the files of the models: regular files under `actor/` and `critic/`.

    Returns:
        Path relative to `step_dir` -> size in bytes, sorted; empty where the driver sees no model.

    Raises:
        OSError: A folder or file is there and cannot be looked at.
    """
    found: dict[str, int] = {}
    for place, names in _folders(step_dir):
        for name in names:
            size = _size(place / name)
            if size is not None:
                found[(place / name).relative_to(step_dir).as_posix()] = size
    return dict(sorted(found.items()))


def sync_models(step_dir: Path) -> None:
    """Make every model file that the driver sees durable, with the entries that lead to it.

    fsync waits for what is not written yet, and costs next to nothing for a file that is.

    Raises:
        OSError: Something is there and could not be looked at or synced.
    """
    seen = False
    for place, names in _folders(step_dir):
        seen = True
        try:
            for name in names:
                if _size(place / name) is not None:
                    _sync_if_there(place / name)
            sync_folder(place)
        except OSError as error:
            if error.errno not in _GONE:
                raise
    if seen:
        sync_folder(step_dir)


def _sync_if_there(path: Path) -> None:
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _folders(step_dir: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder of the models with the names of what belongs to them in it and is no folder."""

    def failed(error: OSError) -> None:
        if error.errno not in _GONE:
            raise error

    for top in MODEL_FOLDERS:
        for place, folders, names in os.walk(step_dir / top, onerror=failed):
            folders[:] = [name for name in folders if is_model_file(name)]
            yield Path(place), sorted(name for name in names if is_model_file(name))


def _size(path: Path) -> int | None:
    """Return the size of a regular file; None for anything else, and for what is gone or leads nowhere."""
    try:
        info = path.stat()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None
