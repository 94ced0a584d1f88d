"""Swap agent-lightning's trainer class when its module is imported; nothing is imported before.

Importing `agentlightning.verl.trainer` costs seconds, and Ray runs a setup hook in about seven processes per job of
which one imports it. So the swap waits for that import.
"""

from __future__ import annotations

import threading
from types import ModuleType

import wrapt

TRAINER_MODULE = "agentlightning.verl.trainer"
TRAINER_CLASS = "AgentLightningRayPPOTrainer"

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Have every later (or past) import of agent-lightning's trainer module yield the extended class. Idempotent."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    wrapt.register_post_import_hook(swap_trainer_class, TRAINER_MODULE)


def swap_trainer_class(module: ModuleType) -> None:
    """Put the extended class in place of `AgentLightningRayPPOTrainer` in `module`.

    A class that carries the extension already (loaded twice, or a user's own subclass) is left alone.
    """
    from agl_async_ckpt.trainer import CheckpointOverrides, extend

    original = getattr(module, TRAINER_CLASS)
    if not issubclass(original, CheckpointOverrides):
        setattr(module, TRAINER_CLASS, extend(original))
