"""The model files of a step, as far as the driver can see them: which there are, and making them durable.

VERL's workers write them in place and sync nothing. A file that another process of this machine wrote is in the same
page cache, so the driver can sync it; on node-local disks of other machines it sees nothing, and does nothing.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from agl_async_ckpt.storage.files import sync_file, sync_folder
from agl_async_ckpt.storage.layout import MODEL_FOLDERS


def list_models(step_dir: Path) -> dict[str, int]:
    """List the regular files under `actor/` and `critic/`.

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
        OSError: Something could not be looked at or synced.
    """
    seen = False
    for place, names in _folders(step_dir):
        seen = True
        for name in names:
            if _size(place / name) is not None:
                sync_file(place / name)
        sync_folder(place)
    if seen:
        sync_folder(step_dir)


def _folders(step_dir: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder of the models with the names of what is no folder in it."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename not in tops:
            raise error

    tops = [str(step_dir / model) for model in MODEL_FOLDERS]
    for top in tops:
        for place, _, names in os.walk(top, onerror=failed):
            yield Path(place), sorted(names)


def _size(path: Path) -> int | None:
    """Size of a regular file; None for anything else, and for a link that leads nowhere."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None
