"""Tie the chat server into VERL: launch it as a rollout replica, and push new weights to it from the actor worker."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from cpu_training.chat_server import ChatServer

SERVER_ACTOR = "tiny_chat_server"
"""Ray name of the server, by which the actor worker finds it."""


class ChatReplica(RolloutReplica):
    """One chat server; VERL creates a replica per group of GPUs, here one in all."""

    async def launch_servers(self) -> None:
        """Start the server actor and note its address."""
        remote_class: Any = ray.remote(ChatServer)
        server = remote_class.options(name=SERVER_ACTOR, num_cpus=0, max_concurrency=8).remote(
            str(self.model_config.path)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.address.remote()


class WeightSync(BaseRollout):
    """The part of the rollout that lives in the actor worker."""

    replica_rank = 0
    is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Nothing to wake up: the server keeps its memory."""

    async def release(self) -> None:
        """Nothing to release: the server keeps its memory."""

    async def update_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], **_kwargs: Any) -> None:
        """Send the whole policy to the server and wait until it serves it."""
        state = {name: tensor.detach().float().cpu() for name, tensor in weights}
        server: Any = ray.get_actor(SERVER_ACTOR)
        await server.load_weights.remote(state)
