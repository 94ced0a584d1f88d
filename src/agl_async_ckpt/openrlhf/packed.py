"""A state as bytes instead of a file of its own: for a framework that keeps it within its own checkpoint file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage.commit import commit_state, load_state
from agl_async_ckpt.storage.files import write_all
from agl_async_ckpt.storage.layout import step_name


def pack_state(state: InputState) -> torch.Tensor:
    """Return the bytes of the file that `commit_state` writes, with its checksum: (num_bytes,), uint8.

    Raises:
        UnencodableValueError: A value that the format cannot carry exactly.
        StateWriteError: The temporary folder has no room for it.
    """
    with tempfile.TemporaryDirectory(prefix="agl-async-ckpt-") as folder:
        path = commit_state(state, Path(folder) / step_name(state.global_step))
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8))  # a surplus may be large: one copy


def unpack_state(data: torch.Tensor, where: str) -> InputState:
    """Read what `pack_state` returned, verified before anything is unpickled.

    Args:
        data: All of it; (num_bytes,), uint8.
        where: Where the bytes come from, for error texts.

    Raises:
        DamagedStateError, ForeignFormatError, UnsupportedVersionError: The bytes cannot be used.
    """
    fd = os.memfd_create("agl-async-ckpt", os.MFD_CLOEXEC)
    try:
        write_all(fd, memoryview(data.cpu().contiguous().numpy()))
        return load_state(f"/proc/self/fd/{fd}", where)
    finally:
        os.close(fd)
