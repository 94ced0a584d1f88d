"""A hook for `agentlightning.hooks`: the agent posts no reward, this does."""

from __future__ import annotations

from typing import Any

from agentlightning.hooks import RolloutHooks, TraceWriter
from agentlightning.schemas import Rollout, RolloutCreate

from cpu_training.hook_values import judged, reward_of


class RewardHook(RolloutHooks):
    """A judge."""

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        """Tell the agent."""
        return judged(request)

    def on_succeeded(self, rollout: Rollout, events: dict[str, list[Any]], store: TraceWriter) -> None:
        """Post the reward."""
        attempt = rollout.status.last_attempt_id or "0"
        store.add_event(rollout.rollout_id, attempt, "reward", {"value": reward_of(rollout.input["input_id"])})
