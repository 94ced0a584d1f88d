"""Exact resume of asynchronous agent training: a trainer extension for agent-lightning on VERL.

Importing this package imports neither torch nor verl nor agentlightning; they come with the name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agl_async_ckpt._version import __version__

if TYPE_CHECKING:
    from agl_async_ckpt.agl.async_checkpoint_trainer import AsyncCheckpointTrainer
    from agl_async_ckpt.agl.entrypoint import run_ppo
    from agl_async_ckpt.agl.trainer import AsyncCheckpointMixin
    from agl_async_ckpt.exceptions import StopRequested, TrainingStopped

__all__ = [
    "AsyncCheckpointMixin",
    "AsyncCheckpointTrainer",
    "StopRequested",
    "TrainingStopped",
    "__version__",
    "run_ppo",
]


_MODULES = {
    "AsyncCheckpointMixin": "agl_async_ckpt.agl.trainer",
    "AsyncCheckpointTrainer": "agl_async_ckpt.agl.async_checkpoint_trainer",
    "StopRequested": "agl_async_ckpt.exceptions",
    "TrainingStopped": "agl_async_ckpt.exceptions",
    "run_ppo": "agl_async_ckpt.agl.entrypoint",
}


def __getattr__(name: str) -> Any:
    # PEP 562: `import agl_async_ckpt` stays cheap in every Ray worker process.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
