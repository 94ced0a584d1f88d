"""Exact resume of asynchronous agent training: a trainer extension for agent-lightning on VERL.

Importing this package imports neither torch nor verl nor agentlightning; they come with the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_async_ckpt._version import __version__

if TYPE_CHECKING:
    from agl_async_ckpt.agl.entrypoint import run_ppo
    from agl_async_ckpt.agl.trainer import AsyncCheckpointMixin, AsyncCheckpointTrainer
    from agl_async_ckpt.exceptions import StopRequested, TrainingStopped

__all__ = [
    "AsyncCheckpointMixin",
    "AsyncCheckpointTrainer",
    "StopRequested",
    "TrainingStopped",
    "__version__",
    "run_ppo",
]


def __getattr__(name: str) -> Any:
    # PEP 562: `import agl_async_ckpt` stays cheap in every Ray worker process.
    if name == "AsyncCheckpointMixin":
        from agl_async_ckpt.agl.trainer import AsyncCheckpointMixin

        return AsyncCheckpointMixin
    if name == "AsyncCheckpointTrainer":
        from agl_async_ckpt._lazy import AsyncCheckpointTrainer

        return AsyncCheckpointTrainer
    if name == "run_ppo":
        from agl_async_ckpt.agl.entrypoint import run_ppo

        return run_ppo
    if name in ("StopRequested", "TrainingStopped"):
        from agl_async_ckpt import exceptions

        return getattr(exceptions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
