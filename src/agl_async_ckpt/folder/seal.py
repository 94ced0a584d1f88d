"""The seal: proof, written last, that every part of a save was there. See docs/format.md.

VERL writes the model, `data.pt` and the tracker in place; a kill in between leaves a mixed folder. The seal states what
the finished save held, so that a later look can tell whether it still does. Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agl_async_ckpt.exceptions import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    DamagedStateError,
)
from agl_async_ckpt.folder.models import is_model_file, list_models, sync_models
from agl_async_ckpt.storage.container import is_whole_zip, read_trailer
from agl_async_ckpt.storage.files import publish, sync_file, sync_folder, write_all, write_error
from agl_async_ckpt.storage.layout import (
    FILE_NAME,
    LOADER_FILE_NAME,
    MODEL_FOLDERS,
    SEAL_NAME,
    TRACKER_NAME,
    parse_step,
)
from agl_async_ckpt.storage.small_json import Format, read_json
from agl_async_ckpt.storage.trailer import Trailer

SEAL_FORMAT = Format("agl-async-ckpt seal", 1)
_MAX_SEAL_BYTES = 16 * 1024 * 1024
_CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True)
class Seal:
    """What a finished save held.

    Attributes:
        global_step: Optimizer steps done.
        run_id: Of the output folder.
        use_critic: A critic was saved too.
        async_save: The model was still being written; then only the tracker, which comes later, proves the step.
        state_bytes: Size of `agentlightning_input.pt`.
        state_sha256: Digest in its trailer.
        loader_bytes: Size of `data.pt`.
        loader_sha256: Digest of `data.pt`.
        model_files: Relative path -> size in bytes, of what the driver could see; empty on node-local disks, and with
            `async_save`.
    """

    global_step: int
    run_id: str
    use_critic: bool
    async_save: bool
    state_bytes: int
    state_sha256: str
    loader_bytes: int
    loader_sha256: str
    model_files: Mapping[str, int]

    def files_of(self, model: str) -> dict[str, int]:
        """Return the model files below `actor` or `critic`; a seal may list files that others had there for a while."""
        return {
            name: size
            for name, size in self.model_files.items()
            if name.startswith(f"{model}/") and is_model_file(name)
        }


def write_seal(step_dir: str | os.PathLike[str], *, use_critic: bool, async_save: bool) -> Path:
    """Seal a step folder after everything else of the save, the tracker too, has been written.

    Syncs what VERL leaves to the page cache: the model files that the driver can see (not with `async_save`: they are
    still being written), `data.pt`, the tracker and the folders. So a seal on disk proves that all of it is on disk.

    Args:
        step_dir: `global_step_<N>` with a committed input state and a `data.pt`.
        use_critic: The run trains a critic.
        async_save: The model is written in the background.

    Returns:
        Path of the seal.

    Raises:
        StateWriteError: Not published; the step has no seal then.
    """
    folder = Path(step_dir)
    target, tracker = folder / SEAL_NAME, folder.absolute().parent / TRACKER_NAME
    try:
        trailer = read_trailer(folder / FILE_NAME)
        if not is_whole_zip(folder / LOADER_FILE_NAME):
            raise ValueError(f"{LOADER_FILE_NAME} is not whole")  # torch overlooks an error of its last write
        if not async_save:
            sync_models(folder)
        sync_file(folder / LOADER_FILE_NAME)
        seal = Seal(
            global_step=trailer.global_step,
            run_id=trailer.run_id,
            use_critic=use_critic,
            async_save=async_save,
            state_bytes=(folder / FILE_NAME).stat().st_size,
            state_sha256=trailer.sha256,
            loader_bytes=(folder / LOADER_FILE_NAME).stat().st_size,
            loader_sha256=_sha256(folder / LOADER_FILE_NAME),
            model_files={} if async_save else list_models(folder),
        )
        values = {"format": SEAL_FORMAT.name, "format_version": SEAL_FORMAT.version, **asdict(seal)}
        text = json.dumps(values, indent=1) + "\n"
        if len(text) > _MAX_SEAL_BYTES:
            raise ValueError(f"the seal would take {len(text)} bytes; {_MAX_SEAL_BYTES} are allowed")
        with contextlib.suppress(FileNotFoundError):
            sync_file(tracker)
        sync_folder(tracker.parent)
        publish(target, lambda fd: write_all(fd, text.encode()))
    except (AsyncCheckpointError, OSError, ValueError) as error:
        raise write_error(target, error) from error
    return target


def read_seal(step_dir: str | os.PathLike[str]) -> Seal:
    """Read the seal of a step folder, without comparing it with anything.

    Raises:
        CheckpointNotFoundError: The step has none.
        DamagedStateError: It cannot be read.
        UnsupportedVersionError: Of another version.
    """
    path = Path(step_dir) / SEAL_NAME
    seal = read_json(path, Seal, _MAX_SEAL_BYTES, kind=SEAL_FORMAT)
    if seal is None:
        raise CheckpointNotFoundError(f"{step_dir} has no seal ({SEAL_NAME}): the save did not finish.")
    for name in seal.model_files:
        if name.startswith("/") or ".." in name.split("/"):
            raise DamagedStateError(f"{path} cannot be read: {name!r:.200} is no model file of the step.")
    return seal


def seal_problems(
    seal: Seal,
    step_dir: str | os.PathLike[str],
    trailer: Trailer,
    *,
    hashes: bool = True,
    models: Sequence[str] = MODEL_FOLDERS,
) -> list[str]:
    """Compare a step folder with a seal that was read, and a trailer that was read or verified.

    Args:
        seal: Of the step.
        step_dir: `global_step_<N>`.
        trailer: Of its input state.
        hashes: Hash `agentlightning_input.pt` and `data.pt`; else compare sizes and the trailer only.
        models: Model folders to compare.

    Returns:
        Problems, in words; empty if everything that was sealed is still there.
    """
    folder = Path(step_dir)
    problems: list[str] = []
    step = parse_step(folder)
    if step is not None and seal.global_step != step:
        problems.append(f"{SEAL_NAME} is of step {seal.global_step}")
    sealed = (seal.global_step, seal.run_id, seal.state_sha256, seal.state_bytes)
    if (trailer.global_step, trailer.run_id, trailer.sha256, _size(folder / FILE_NAME)) != sealed:
        problems.append(f"{FILE_NAME} is not the file that was sealed")
    loader = folder / LOADER_FILE_NAME
    try:
        if loader.stat().st_size != seal.loader_bytes:
            problems.append(f"{LOADER_FILE_NAME} has {loader.stat().st_size} bytes, {seal.loader_bytes} were sealed")
        elif hashes and _sha256(loader) != seal.loader_sha256:
            problems.append(f"{LOADER_FILE_NAME} was altered after it was sealed")
    except OSError as error:
        problems.append(f"{LOADER_FILE_NAME} cannot be read: {error.strerror}")
    for model in models:
        listed = seal.files_of(model)
        lost = [name for name, size in listed.items() if _size(f"{folder}/{name}") != size]
        if lost:
            problems.append(
                f"{len(lost)} of {len(listed)} files of {model}/ are gone or altered ({lost[0]}): removed by retention?"
            )
    return problems


def _size(path: str | Path) -> int | None:
    """Return the size of a regular file, or None. One call each: a listing of many steps looks at many files."""
    try:
        info = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
