"""`run_ppo`: a drop-in for agent-lightning's, with the extension switched on in its Ray workers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from agl_async_ckpt.exceptions import ActivationError
from agl_async_ckpt.worker import CHAINED_HOOK_VARIABLE, SETUP_HOOK, UPSTREAM_HOOK

HOOK_KEY = "worker_process_setup_hook"
# Set by Ray for the entrypoint of a submitted job; holds that job's runtime environment as JSON.
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"

OTHER_WAYS = (
    "Switch on in one of these ways instead:\n"
    f"  runtime_env of ray.init or of the submitted job:  {HOOK_KEY}: {SETUP_HOOK}\n"
    "  environment variable of driver and workers:       VERL_USE_EXTERNAL_MODULES=agl_async_ckpt.plugin"
)


def run_ppo(config: Any, train_dataset: Sequence[Any], val_dataset: Sequence[Any]) -> None:
    """Train as `agentlightning.verl.entrypoint.run_ppo` does, with exact input checkpoints.

    A worker setup hook that the config already names keeps running, after agent-lightning's own.

    Args:
        config: agent-lightning's trainer config; not changed.
        train_dataset: Non-empty in-memory sequence of inputs.
        val_dataset: Likewise.

    Raises:
        ActivationError: Ray is initialised already, or the submitted job has another hook, so that ours cannot run.
        ConfigError: `agentlightning.async_checkpoint` is not valid; before any process is started.
    """
    from agentlightning.verl import entrypoint as upstream

    from agl_async_ckpt.config import read_config

    read_config(config)
    _require_hook_can_run()
    upstream.run_ppo(_with_hook(config), train_dataset, val_dataset)


def _require_hook_can_run() -> None:
    import ray

    if os.environ.get("VERL_USE_EXTERNAL_MODULES", "").find("agl_async_ckpt.plugin") >= 0:
        return
    job_config = os.environ.get(JOB_CONFIG_VARIABLE)
    job_hook = _hook_of(json.loads(job_config).get("runtime_env")) if job_config else None
    if job_hook is not None and job_hook != SETUP_HOOK:
        raise ActivationError(
            f"The submitted Ray job sets {HOOK_KEY}={job_hook!r}, and Ray refuses a second one.\n{OTHER_WAYS}"
        )
    if ray.is_initialized():
        active_hook = _hook_of(ray.get_runtime_context().runtime_env)
        if active_hook != SETUP_HOOK:
            raise ActivationError(
                "Ray was initialised before run_ppo, so the extension cannot add its worker setup hook "
                f"(the active one: {active_hook!r}).\n{OTHER_WAYS}"
            )


def _hook_of(runtime_env: Any) -> str | None:
    hook = (runtime_env or {}).get(HOOK_KEY)
    return None if hook is None else str(hook)


def _with_hook(config: Any) -> Any:
    from omegaconf import OmegaConf, open_dict

    extended = config.copy()
    path = "ray_kwargs.ray_init.runtime_env"
    own = OmegaConf.select(extended, f"{path}.{HOOK_KEY}", default=None)
    with open_dict(extended):
        OmegaConf.update(extended, f"{path}.{HOOK_KEY}", SETUP_HOOK, force_add=True)
        if own not in (None, SETUP_HOOK, UPSTREAM_HOOK):
            OmegaConf.update(extended, f"{path}.env_vars.{CHAINED_HOOK_VARIABLE}", own, force_add=True)
    return extended
