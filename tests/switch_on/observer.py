"""Named in VERL_USE_EXTERNAL_MODULES of the workers: writes down what trainer the task runner has built, and stops it.

A channel of its own, so that the one worker setup hook that Ray takes is the one under test.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from tests.switch_on.names import ASK_A_WORKER, GO, RECORD

PATIENCE_S = 90.0


def _losses() -> list[str]:
    """What the actor workers look their loss up in; only a setup hook has put agent-lightning's there."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return sorted(POLICY_LOSS_REGISTRY)


def _write_down(trainer: Any) -> None:
    """In place of `init_workers`, which would start workers on GPUs."""
    import ray
    from agentlightning.verl import trainer as trainer_module

    asked = trainer.config.trainer.experiment_name == ASK_A_WORKER
    session = getattr(trainer, "_async_ckpt", None)
    record = {
        "class": type(trainer).__name__,
        "mro": [f"{cls.__module__}.{cls.__qualname__}" for cls in type(trainer).__mro__],
        "is_module_attribute": type(trainer) is trainer_module.AgentLightningRayPPOTrainer,
        "active": None if session is None else session.active,
        "worker_losses": ray.get(ray.remote(num_cpus=0)(_losses).remote()) if asked else None,
        "own_hook_ran": os.environ.get("OWN_HOOK_RAN") == "yes",
        "nccl_debug": os.environ.get("NCCL_DEBUG"),
        "rows": len(trainer.train_dataset),
        "node": ray.get_runtime_context().get_node_id(),
    }
    Path(trainer.config.trainer.default_local_dir, RECORD).write_text(json.dumps(record))


def _wait_to_be_seen(trainer: Any) -> None:
    """In place of `fit`: Ray forwards worker output with a delay, and a driver that ends at once would miss it."""
    go = Path(trainer.config.trainer.default_local_dir, GO)
    deadline = time.monotonic() + PATIENCE_S
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _stop_before_workers(module: ModuleType) -> None:
    trainer_cls: Any = vars(module)["AgentLightningRayPPOTrainer"]
    trainer_cls.init_workers = _write_down
    trainer_cls.fit = _wait_to_be_seen


wrapt.register_post_import_hook(_stop_before_workers, "agentlightning.verl.trainer")
