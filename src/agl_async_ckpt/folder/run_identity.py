"""Which run an output folder belongs to, and its latest life: `agentlightning_run.json`.

Written before the first input is enqueued. Each start that trains is a life, with a number and a token of its own; a
life reads the file again before it publishes anything, so that where locks are absent, or each node keeps its own, an
older life stops instead of mixing its checkpoints with a newer one's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agl_async_ckpt.exceptions import DamagedStateError, FolderInUseError
from agl_async_ckpt.storage.files import make_folders, publish, unwritable, write_all
from agl_async_ckpt.storage.layout import RUN_FILE_NAME
from agl_async_ckpt.storage.small_json import read_json
from agl_async_ckpt.storage.trailer import Branch

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class RunIdentity:
    """Identity of one output folder.

    Attributes:
        run_id: Tags the rollouts of this run on the server.
        parent_run_id: The run that this one was forked from by an explicit resume path.
        first_step: From here on each step was saved with an input state, so that one without it has lost it; None if
            none was, or the last one was saved while the extension was off.
        created_at: Unix seconds.
        folder_inode: Of the output folder. A copy of the folder is another run: both may be alive on one server.
        life: Number of the latest life, 1 for the first; 0 before any.
        life_id: Tells two lives apart that took the same number at the same moment.
        branch: Through which the training came to where it is, as `folder.branch` says.
        host: Where the latest life was started.
        pid: Its process there.
    """

    run_id: str
    parent_run_id: str | None = None
    first_step: int | None = None
    created_at: float = 0.0
    folder_inode: int | None = None
    life: int = 0
    life_id: str = ""
    host: str = ""
    pid: int = 0
    branch: Branch = ()
    format_version: int = FORMAT_VERSION


def read_run(output_dir: Path) -> RunIdentity | None:
    """Read the identity of an output folder; None if it has none yet.

    Raises:
        DamagedStateError: The file is there and cannot be used.
    """
    return read_json(
        output_dir / RUN_FILE_NAME,
        RunIdentity,
        _MAX_BYTES,
        meaning="It names the run of this output folder.",
        act="Restore it, or remove it to give the folder a new run id.",
    )


def begin_life(output_dir: Path, *, parent_run_id: str | None = None, branch: Branch | None = None) -> RunIdentity:
    """Begin a life of the run that an output folder belongs to, and record it.

    A folder without an identity gets a new one, and so does a copy of another run's folder.

    Args:
        output_dir: The trainer's `default_local_dir`.
        parent_run_id: Recorded in a new identity only.
        branch: That the life goes on with; None for the one on record.

    Raises:
        DamagedStateError: The identity is there and cannot be read.
        StateWriteError: The folder cannot be written.
    """
    known = read_run(output_dir)
    if known is None:
        known = RunIdentity(uuid.uuid4().hex, parent_run_id, created_at=time.time())
    elif known.folder_inode != output_dir.stat().st_ino:
        known = RunIdentity(uuid.uuid4().hex, known.run_id, known.first_step, time.time(), branch=known.branch)
    if branch is not None:
        known = replace(known, branch=branch)
    return _write(
        output_dir,
        replace(known, life=known.life + 1, life_id=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid()),
    )


def is_latest_life(output_dir: Path, identity: RunIdentity) -> bool:
    """Tell whether no other life has begun since; also True where the record is gone or cannot be read."""
    try:
        known = read_run(output_dir)
    except DamagedStateError:
        return True
    return known is None or (known.run_id, known.life_id) == (identity.run_id, identity.life_id)


def require_latest_life(output_dir: Path, identity: RunIdentity) -> None:
    """Refuse to publish anything after another life of this folder has begun.

    Raises:
        FolderInUseError: With host and process of the newer life.
    """
    if is_latest_life(output_dir, identity):
        return
    known = read_run(output_dir)
    assert known is not None
    raise FolderInUseError(
        f"Another trainer has taken over the output folder {output_dir}: nothing more is saved by this one.",
        [
            ("this trainer", f"life {identity.life}, process {identity.pid} on {identity.host}"),
            ("newer trainer", f"life {known.life}, process {known.pid} on {known.host}"),
        ],
        "Let one trainer at a time use an output folder; set another trainer.default_local_dir for a second one.",
    )


def note_first_step(output_dir: Path, identity: RunIdentity, step: int) -> RunIdentity:
    """Record that steps from `step` on have an input state, unless an earlier one is on record.

    Written again, with a warning, where the record was removed under the running trainer.
    """
    path = output_dir / RUN_FILE_NAME
    gone = not path.exists()
    if gone:
        log.warning("%s was removed while this run trained; it is written again.", path)
    if not gone and identity.first_step is not None and identity.first_step <= step:
        return identity
    first = step if identity.first_step is None else min(step, identity.first_step)
    return _write(output_dir, replace(identity, first_step=first))


def note_step_without_state(output_dir: Path) -> None:
    """Record that a step is being saved without an input state: from here on none has lost it, but for sealed ones.

    Nothing is written for a folder without an identity, and that of a copied one stays the original's.

    Raises:
        DamagedStateError: The identity is there and cannot be read.
        StateWriteError: The folder cannot be written.
    """
    known = read_run(output_dir)
    if known is not None and known.first_step is not None:
        _publish(output_dir, replace(known, first_step=None))


def _write(output_dir: Path, identity: RunIdentity) -> RunIdentity:
    try:
        make_folders(output_dir)
        identity = replace(identity, folder_inode=output_dir.stat().st_ino)
    except OSError as error:
        raise unwritable(output_dir, error) from error
    return _publish(output_dir, identity)


def _publish(output_dir: Path, identity: RunIdentity) -> RunIdentity:
    text = json.dumps(asdict(identity), indent=1) + "\n"
    try:
        publish(output_dir / RUN_FILE_NAME, lambda fd: write_all(fd, text.encode()))
    except OSError as error:
        raise unwritable(output_dir, error) from error
    return identity
