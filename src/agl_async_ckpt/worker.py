"""Ray worker setup hook: `ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=agl_async_ckpt.worker.setup`.

Ray takes one hook, and one in the config replaces agent-lightning's own, which registers its policy losses in each
worker: so this one runs that too. A hook of the user that `run_ppo` found in the config is named by an environment
variable and runs last.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from agl_async_ckpt.agl.activation import CHAINED_HOOK_VARIABLE, SETUP_HOOK, install
from agl_async_ckpt.agl.internals import UPSTREAM_HOOK
from agl_async_ckpt.exceptions import ActivationError

_ran = False


def setup() -> None:
    """Switch the extension on in this process, then run agent-lightning's own hook and the chained one. Idempotent.

    Raises:
        ActivationError: The chained hook, or agent-lightning's, cannot be loaded.
    """
    global _ran
    if _ran:  # a chained hook may call this function itself
        return
    _ran = True
    install()  # first: a hook that imports the trainer class must get the extended one
    _load(UPSTREAM_HOOK)()
    chained = os.environ.get(CHAINED_HOOK_VARIABLE)
    if chained and chained not in (SETUP_HOOK, UPSTREAM_HOOK):
        _load(chained)()


def _load(dotted: str) -> Callable[[], object]:
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ActivationError(
            f"The worker setup hook {dotted!r} cannot be loaded: {error}.",
            act="Name an importable function as <module>.<function> that every Ray worker can import.",
        ) from error
