"""How a training starts: agent-lightning's trainer class and hook, VERL's plugins, Ray's runtime environments."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

TRAINER_MODULE = "agentlightning.verl.trainer"
TRAINER_CLASS = "AgentLightningRayPPOTrainer"
"""The task runner imports the class by these names, in its worker, when it runs."""

UPSTREAM_HOOK = "agentlightning.verl.per_rollout_loss.register_in_worker"
"""agent-lightning's worker setup hook, which it sets where the config names none."""

HOOK_KEY = "worker_process_setup_hook"
"""Ray's name in a runtime environment of what each worker process runs first; it takes one hook."""

RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env"
"""Where the config holds the runtime environment that agent-lightning gives to `ray.init`."""

PLUGIN_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""Modules that VERL imports inside its own import, separated by commas."""

_JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the entrypoint of a submitted job; holds that job's runtime environment as JSON."""

_OVERRIDE_JOB_VARIABLE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
"""Has `ray.init` replace fields that the job sets; without it Ray refuses a field that both set."""


def is_plugin(module: str) -> bool:
    """Tell whether VERL imports a module as a plugin in this process."""
    return module in os.environ.get(PLUGIN_VARIABLE, "").split(",")


def hook_of_job() -> str | None:
    """Return the worker setup hook that the submitted job sets; None if it sets none, or outside of a job."""
    job_config: Mapping[str, Any] = json.loads(os.environ.get(_JOB_CONFIG_VARIABLE) or "{}")
    return (job_config.get("runtime_env") or {}).get(HOOK_KEY)


def job_may_be_overridden() -> bool:
    """Tell whether `ray.init` may set again what the submitted job sets."""
    return os.environ.get(_OVERRIDE_JOB_VARIABLE) == "1"


def worker_environment() -> dict[str, str]:
    """Return VERL's environment variables (NCCL, vLLM), which agent-lightning sets only if the config names none."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    return get_ppo_ray_runtime_env()["env_vars"]


@contextmanager
def around_ray_init(enter: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Have agent-lightning's call of `ray.init`, which it finds by that name, run in what `enter` makes."""
    import ray

    init = ray.init

    def init_within(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return init(*args, **kwargs)

    ray.init = init_within
    try:
        yield
    finally:
        ray.init = init
