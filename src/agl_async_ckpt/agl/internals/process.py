"""Versions, hooks and random generators of the driver process."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from agl_async_ckpt.agl.internals.protocols import Trainer
from agl_async_ckpt.exceptions import ActivationError
from agl_async_ckpt.state import RngState

WRITER_PACKAGES = ("agl-async-ckpt", "agentlightning", "verl", "torchdata", "torch", "numpy")


def written_by() -> dict[str, str]:
    """Return the versions of what takes part in a save, by distribution name."""
    return dict(_versions())


@functools.cache  # each look reads files, and what runs does not change
def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in WRITER_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def require_sole_writer(trainer: Trainer, file_name: str) -> None:
    """Refuse to run beside an agent-lightning that writes a file of our name itself.

    Raises:
        ActivationError: With the version found.
    """
    for cls in type(trainer).__mro__:
        module = sys.modules.get(cls.__module__)
        if module is None or cls.__module__.partition(".")[0] != "agentlightning":
            continue
        try:
            source = inspect.getsource(module)
        except OSError:  # installed without sources; a second writer is noticed at the first save
            continue
        if file_name in source:
            version = importlib.metadata.version("agentlightning")
            raise ActivationError(
                f"agentlightning {version} writes {file_name} itself ({cls.__module__}).",
                act="Nothing was written over. Take this extension out of the config, or use a version that does not.",
            )


def rng_state() -> RngState:
    """Return the driver's global generators; agent-lightning drops samples with the global `random`."""
    import numpy as np
    import torch

    return RngState(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state())


def set_rng_state(state: RngState) -> None:
    """Put the driver's global generators back."""
    import numpy as np
    import torch

    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the driver's global generators where they are, whatever the body draws and however it ends."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
