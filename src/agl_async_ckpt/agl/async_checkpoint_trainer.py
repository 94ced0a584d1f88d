"""`AsyncCheckpointTrainer`, in a module of its own: importing agent-lightning's trainer takes seconds."""

from __future__ import annotations

from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

from agl_async_ckpt.agl.trainer import AsyncCheckpointMixin


class AsyncCheckpointTrainer(AsyncCheckpointMixin, AgentLightningRayPPOTrainer):
    """`AsyncCheckpointMixin` on agent-lightning's trainer."""
