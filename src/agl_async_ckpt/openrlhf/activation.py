"""Switch the extension on in the driver: OpenRLHF's trainer classes are replaced when their modules are imported.

The trainer is a Ray actor and starts the generator and the training actor itself. Its replacement travels to its own
process by reference to this package and names their replacements there, so the driver is the only place to touch.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import wrapt

from agl_async_ckpt.exceptions import ActivationError
from agl_async_ckpt.openrlhf.internals import (
    ASYNC_MODULE,
    CONTROLLER_METHODS,
    SYNC_MODULE,
    actor_class,
    require_supported,
)

_REPLACEMENTS = {
    ASYNC_MODULE: ("PPOTrainerAsync", "agl_async_ckpt.openrlhf.trainer", "CheckpointedPPOTrainerAsync"),
    SYNC_MODULE: ("PPOTrainer", "agl_async_ckpt.openrlhf.sync", "GuardedPPOTrainer"),
}
"""Module of OpenRLHF -> the name there, and the module and class that take its place."""

_lock = threading.Lock()
_enabled = False


def enable() -> None:
    """Have OpenRLHF's asynchronous trainer save and restore its inputs exactly. Idempotent.

    Call it in the driver before it takes the trainer class from OpenRLHF; Ray may be initialised before or after. The
    package must be importable in Ray's workers. Synchronous training is left as it is, but for refusing a checkpoint
    whose generated samples it would skip.

    Raises:
        ActivationError: OpenRLHF is missing or of a version that is not supported, or a module has taken the trainer
            class already.
    """
    global _enabled
    with _lock:
        if _enabled:
            return
        require_supported()
        for module, (name, _, _) in _REPLACEMENTS.items():
            _refuse_early_import(module, name)
        for module in _REPLACEMENTS:
            wrapt.register_post_import_hook(_replace, module)
        _enabled = True


def _replace(module: ModuleType) -> None:
    name, ours, replacement = _REPLACEMENTS[module.__name__]
    setattr(module, name, actor_class(ours, replacement, CONTROLLER_METHODS))


def _refuse_early_import(module: str, name: str) -> None:
    """Refuse where the replacement would come too late for somebody who holds the original."""
    original = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if original is None:
        return
    for other, found in list(sys.modules.items()):
        if other != module and _holds(found, original):
            raise ActivationError(
                f"{other} imported {name} from {module} before agl_async_ckpt.openrlhf.enable(): its training would "
                "save no generated samples.",
                act="Call enable() first, at the top of the launcher.",
            )


def _holds(module: Any, value: Any) -> bool:
    return isinstance(module, ModuleType) and any(item is value for item in list(vars(module).values()))
