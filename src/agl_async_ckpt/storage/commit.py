"""Commit and load the input state of a step: `global_step_<N>/agentlightning_input.pt`.

commit_state   encode -> temp file + fsync -> old seal and data.pt removed -> rename -> fsync of the folder
load_state     read once -> verify every byte -> look at the pickle -> torch.load(weights_only=True) -> decode
"""

from __future__ import annotations

import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.codec.input_state import decode_state, encode_state
from agl_async_ckpt.exceptions import (
    AsyncCheckpointError,
    DamagedStateError,
    StateFormatError,
    StateMismatchError,
)
from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage.container import read_verified
from agl_async_ckpt.storage.files import make_folders, publish, remove_files, write_error
from agl_async_ckpt.storage.layout import FILE_NAME, LOADER_FILE_NAME, SEAL_NAME, parse_step
from agl_async_ckpt.storage.pickle_check import refuse_foreign_pickle
from agl_async_ckpt.storage.trailer import Branch, Trailer, parse_trailer
from agl_async_ckpt.storage.writer import TrailerWriter


def commit_state(state: InputState, step_dir: str | os.PathLike[str], *, branch: Branch = ()) -> Path:
    """Publish `state` so that a reader finds the old file or the new one, never a part.

    Temp file, fsync, rename, fsync of the folder and of each folder newly created: per fsync(2), syncing a file does
    not make its directory entry durable. In an existing step folder the old seal and the old `data.pt` go first, so
    that a mix of two saves is never taken for a whole one; they go once the new content is durable in its temp file,
    so that a full disk costs nothing.

    Args:
        state: Position after `state.global_step` optimizer steps.
        step_dir: `global_step_<N>`, N == `state.global_step`. Created if missing.
        branch: Of the life that saves it.

    Returns:
        Path of the committed file.

    Raises:
        StateMismatchError: `step_dir` names another step.
        UnencodableValueError: A value that the format cannot carry exactly. Nothing was changed.
        StateWriteError: Write, fsync or rename failed. The old file is in place, unless the text says that only its
            durability is unknown.
    """
    folder = Path(step_dir)
    target = folder / FILE_NAME
    if parse_step(folder) != state.global_step:
        raise StateMismatchError(
            f"Input state cannot be saved in {folder}: it is of another step.",
            [("state", f"global_step {state.global_step}"), ("folder", folder.name)],
            "",
        )
    try:
        payload = encode_state(state)
        make_folders(folder)
        publish(
            target,
            lambda fd: _write_file(fd, payload, state, branch),
            lambda: remove_files(folder, (SEAL_NAME, LOADER_FILE_NAME)),
        )
    except AsyncCheckpointError:
        raise
    except Exception as error:
        raise write_error(target, error) from error
    return target


def load_state(path: str | os.PathLike[str], where: str = "") -> InputState:
    """Read the state of a step, verified before anything is unpickled.

    Takes the size of the file in memory; a large tensor or array of the result lies in those very bytes.

    Args:
        path: A step folder, or the file itself.
        where: What errors call it, if not by its path.

    Raises:
        CheckpointNotFoundError: There is no such file.
        DamagedStateError, ForeignFormatError, UnsupportedVersionError: The bytes cannot be used.
        StateMismatchError: The file belongs to another step than its folder.
    """
    file = Path(path)
    if file.name != FILE_NAME and file.is_dir():
        file = file / FILE_NAME
    trailer, content = read_verified(file, where)
    with content:
        return decode_verified(trailer, content, file, where)


def decode_verified(trailer: Trailer, content: BinaryIO, file: Path, where: str = "") -> InputState:
    """Decode what `read_verified` has returned for `file`; errors are those of `load_state`."""
    where = where or str(file)
    step = parse_step(file.absolute().parent)
    if step is not None and step != trailer.global_step:
        raise StateMismatchError(
            f"{where} belongs to another step.",
            [("in the file", f"global_step {trailer.global_step}"), ("folder", f"global_step {step}")],
            "Resume from another step; the content of this folder is mixed.",
        )
    try:
        refuse_foreign_pickle(content)
    except (ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise _foreign_content(where, str(error)) from error
    try:
        payload = _load_payload(content)
        state = decode_state(payload)
    except MemoryError:
        raise
    except StateFormatError as error:
        raise type(error)(f"{where}: {error.fact}", error.rows, error.act) from error
    except pickle.UnpicklingError as error:
        # torch's own text advises to load with weights_only=False, which would run what the file asks for.
        raise _foreign_content(where, "refused by torch") from error
    except Exception as error:
        raise DamagedStateError(f"{where} is whole, yet it cannot be read: {type(error).__name__}: {error}") from error
    _check_agreement(trailer, state, where)
    return state


def _load_payload(content: BinaryIO) -> Any:
    """Have torch map the file in memory; without /proc, which gives it a name, it is copied."""
    name = f"/proc/self/fd/{content.fileno()}"
    if Path(name).exists():
        return torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(content, map_location="cpu", weights_only=True, mmap=False)


def _foreign_content(where: str, reason: str) -> DamagedStateError:
    return DamagedStateError(
        f"{where} is whole, yet it holds what no input state holds ({reason}). Nothing of it was run.",
        act="Resume from another step; do not load this file by other means.",
    )


def _write_file(fd: int, payload: dict[str, Any], state: InputState, branch: Branch) -> None:
    with TrailerWriter(fd) as writer:
        try:
            torch.save(payload, cast("IO[bytes]", writer))
            writer.finish(lambda num_zip_bytes: _make_trailer(state, num_zip_bytes, branch))
        except Exception as error:
            # What torch makes of an error of the writer is only "unexpected pos".
            raise (writer.error or error) from None


def _make_trailer(state: InputState, num_zip_bytes: int, branch: Branch = ()) -> Trailer:
    trailer = Trailer(
        format_version=FORMAT_VERSION,
        global_step=state.global_step,
        epoch=state.epoch,
        exhausted=state.exhausted,
        run_id=state.run_id,
        parent_run_id=state.parent_run_id,
        counts=state.counts,
        saved_at=time.time(),
        written_by=dict(state.written_by),
        num_zip_bytes=num_zip_bytes,
        branch=branch,
    )
    try:
        parse_trailer(trailer.to_bytes(), "this state")  # what is written must be readable
    except StateFormatError as error:
        raise ValueError(str(error)) from error
    return trailer


def _check_agreement(trailer: Trailer, state: InputState, where: str) -> None:
    said = (trailer.global_step, trailer.epoch, trailer.exhausted, trailer.run_id, trailer.parent_run_id)
    found = (state.global_step, state.epoch, state.exhausted, state.run_id, state.parent_run_id)
    if said != found or dict(trailer.counts) != state.counts:
        raise DamagedStateError(
            f"{where} is damaged: its trailer and its content disagree.",
            [("trailer", (*said, dict(trailer.counts))), ("content", (*found, state.counts))],
            "",
        )
