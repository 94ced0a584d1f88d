"""Which run an output folder belongs to: `agentlightning_run.json`, written before the first input is enqueued."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agl_async_ckpt.exceptions import DamagedStateError, StateWriteError
from agl_async_ckpt.storage.files import make_folders, publish, write_all

RUN_FILE_NAME = "agentlightning_run.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class RunIdentity:
    """Identity of one output folder.

    Attributes:
        run_id: Tags the rollouts of this run on the server.
        parent_run_id: The run that this one was forked from by an explicit resume path.
        first_step: The first step that was saved with an input state; a later step without one is an error.
        created_at: Unix seconds.
        folder_inode: Of the output folder. A copy of the folder is another run: both may be alive on one server.
    """

    run_id: str
    parent_run_id: str | None = None
    first_step: int | None = None
    created_at: float = 0.0
    folder_inode: int | None = None
    format_version: int = FORMAT_VERSION


def read_run(output_dir: Path) -> RunIdentity | None:
    """Read the identity of an output folder; None if it has none yet.

    Raises:
        DamagedStateError: The file is there and cannot be used.
    """
    path = output_dir / RUN_FILE_NAME
    try:
        raw: Any = json.loads(path.read_bytes())
        known = {name: raw[name] for name in RunIdentity.__dataclass_fields__ if name in raw}
        identity = RunIdentity(**known)
        if not isinstance(identity.run_id, str) or not isinstance(identity.first_step, int | None):
            raise TypeError("wrong types")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedStateError(
            f"{path} cannot be read: {error}.\n"
            "It names the run of this output folder. Restore it, or remove it to give the folder a new run id."
        ) from error
    return identity


def open_run(output_dir: Path, *, parent_run_id: str | None = None) -> RunIdentity:
    """Return the identity of an output folder; a new one if it has none, or if it is a copy of another run's folder.

    Args:
        output_dir: The trainer's `default_local_dir`.
        parent_run_id: Recorded in a new identity only.

    Raises:
        StateWriteError: The folder cannot be written.
    """
    known = read_run(output_dir)
    if known is not None and known.folder_inode == output_dir.stat().st_ino:
        return known
    run_id, created_at = uuid.uuid4().hex, time.time()
    if known is not None:
        return _write(output_dir, RunIdentity(run_id, known.run_id, known.first_step, created_at))
    return _write(output_dir, RunIdentity(run_id, parent_run_id, created_at=created_at))


def note_first_step(output_dir: Path, identity: RunIdentity, step: int) -> RunIdentity:
    """Record that steps from `step` on have an input state, unless an earlier one is on record."""
    if identity.first_step is not None and identity.first_step <= step:
        return identity
    return _write(output_dir, replace(identity, first_step=step))


def _write(output_dir: Path, identity: RunIdentity) -> RunIdentity:
    try:
        make_folders(output_dir)
        identity = replace(identity, folder_inode=output_dir.stat().st_ino)
        text = json.dumps(asdict(identity), indent=1) + "\n"
        publish(output_dir / RUN_FILE_NAME, lambda fd: write_all(fd, text.encode()))
    except OSError as error:
        raise StateWriteError(
            error.errno,
            f"The output folder {output_dir} cannot be written ({error.strerror}).\n"
            "Nothing was trained. Make trainer.default_local_dir writable, or set another one.",
        ) from error
    return identity
