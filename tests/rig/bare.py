"""Objects of agent-lightning with no attributes but those that a test gives them; their methods are the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bare_trainer(config: Mapping[str, Any] | None = None, **attributes: Any) -> Any:
    """Make agent-lightning's trainer with nothing but `attributes`.

    Args:
        config: The parts of its config that are looked at; of a plain mapping OmegaConf's is made.
        attributes: Whatever else it has.
    """
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
    from omegaconf import OmegaConf

    trainer = object.__new__(AgentLightningRayPPOTrainer)
    if config is not None:
        trainer.config = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    vars(trainer).update(attributes)
    return trainer


def enqueued(data_id: str, rollout_id: str, step: int = 1) -> Any:
    """Make agent-lightning's `EnqueuedRollout`."""
    from agentlightning.verl.agl_rollout_manager import EnqueuedRollout

    return EnqueuedRollout(
        data_id=data_id, rollout_id=rollout_id, step=step, sample_idx_in_step=0, enqueue_time=1.0, input={"q": data_id}
    )
