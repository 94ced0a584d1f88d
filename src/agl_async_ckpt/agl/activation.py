"""Swap agent-lightning's trainer class when its module is imported; nothing is imported before.

Importing `agentlightning.verl.trainer` costs seconds, and Ray runs a setup hook in about seven processes per job of
which one imports it. So the swap waits for that import.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from types import ModuleType
from typing import Any

import wrapt

from agl_async_ckpt.agl.internals import TRAINER_CLASS, TRAINER_MODULE
from agl_async_ckpt.exceptions import ActivationError

SETUP_HOOK = "agl_async_ckpt.worker.setup"
PLUGIN = "agl_async_ckpt.plugin"
CHAINED_HOOK_VARIABLE = "AGL_ASYNC_CKPT_CHAINED_HOOK"
"""Names the worker setup hook that a config had before ours took its place."""

_lock = threading.RLock()
_installed = False


def install() -> None:
    """Have every later (or past) import of agent-lightning's trainer module yield the extended class. Idempotent."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    module = sys.modules.get(TRAINER_MODULE)
    if module is not None and TRAINER_CLASS not in vars(module):
        _swap_on_first_access(module)
    else:
        wrapt.register_post_import_hook(swap_trainer_class, TRAINER_MODULE)


def is_installed() -> bool:
    """Tell whether the extension is switched on in this process."""
    return _installed


def swap_trainer_class(module: ModuleType) -> None:
    """Put the extended class in place of `AgentLightningRayPPOTrainer` in `module`.

    A class that carries the extension already (loaded twice, or a user's own subclass) is left alone.

    Raises:
        ActivationError: The module has no such class.
    """
    from agl_async_ckpt.agl.internals import TESTED
    from agl_async_ckpt.agl.trainer import CheckpointOverrides, extend

    # The namespace and not getattr: `_swap_on_first_access` answers the latter.
    namespace = vars(module)
    original = namespace.get(TRAINER_CLASS)
    if original is None:
        raise ActivationError(
            f"agentlightning {importlib.metadata.version('agentlightning')} has no {TRAINER_MODULE}.{TRAINER_CLASS}, "
            "so the extension cannot be switched on.",
            act=f"Use one of the tested versions ({', '.join(TESTED['agentlightning'])}), or take the extension out "
            "of the config.",
        )
    if not issubclass(original, CheckpointOverrides):
        namespace[TRAINER_CLASS] = extend(original)


def _swap_on_first_access(module: ModuleType) -> None:
    """Swap in a module that is being imported at this moment and has not got to its class.

    That is so if the trainer module is the first to import verl, and `VERL_USE_EXTERNAL_MODULES` names our plugin: too
    late for a hook on the import. `from module import name` and `module.name` ask the module's type first.
    """
    module_type = type(module)

    def read(self: ModuleType) -> Any:
        with _lock:
            if TRAINER_CLASS not in vars(self):
                raise AttributeError(f"module {self.__name__!r} has no attribute {TRAINER_CLASS!r} (yet)")
            swap_trainer_class(self)
            self.__class__ = module_type
        return vars(self)[TRAINER_CLASS]

    def replace(self: ModuleType, value: Any) -> None:
        vars(self)[TRAINER_CLASS] = value

    module.__class__ = type(module_type.__name__, (module_type,), {TRAINER_CLASS: property(read, replace)})
