"""A user's trainer class with the mixin, and a user's worker setup hook that puts it in place."""

from __future__ import annotations

import os

from agentlightning.verl import trainer as trainer_module

from agl_async_ckpt import AsyncCheckpointMixin


class OwnTrainer(AsyncCheckpointMixin, trainer_module.AgentLightningRayPPOTrainer):
    """Changes nothing."""


def setup() -> None:
    os.environ["OWN_HOOK_RAN"] = "yes"
    trainer_module.AgentLightningRayPPOTrainer = OwnTrainer
