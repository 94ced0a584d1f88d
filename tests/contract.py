"""What contract tests share: the message of a broken contract, and objects of agent-lightning with little in them."""

from __future__ import annotations

import importlib.metadata
from typing import Any


def broken(package: str, what: str, *, used_in: str) -> str:
    """Message of a failed contract.

    Args:
        package: Distribution that changed.
        what: What the extension relies on, as a fact.
        used_in: Module of the extension to look at.
    """
    version = importlib.metadata.version(package)
    return (
        f"{package} {version} no longer keeps this: {what}. Adapt src/agl_async_ckpt/{used_in}, or narrow the versions."
    )


def agl(what: str, used_in: str) -> str:
    """Message of a contract with agent-lightning."""
    return broken("agentlightning", what, used_in=used_in)


def bare_trainer(**attributes: Any) -> Any:
    """Make agent-lightning's trainer with nothing but `attributes`; its methods are the real ones."""
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    trainer = object.__new__(AgentLightningRayPPOTrainer)
    vars(trainer).update(attributes)
    return trainer


def enqueued(data_id: str, rollout_id: str, step: int = 1) -> Any:
    """Make agent-lightning's `EnqueuedRollout`."""
    from agentlightning.verl.agl_rollout_manager import EnqueuedRollout

    return EnqueuedRollout(
        data_id=data_id, rollout_id=rollout_id, step=step, sample_idx_in_step=0, enqueue_time=1.0, input={"q": data_id}
    )
