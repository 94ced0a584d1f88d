"""A hook for `agentlightning.hooks`: another answer takes the place of the sampled one, and the reward is for that.

Of several model requests with the same prompt tokens agl-server gives the trainer the newest.
"""

from __future__ import annotations

from typing import Any

from agentlightning.hooks import RolloutHooks, TraceWriter
from agentlightning.schemas import Rollout, RolloutCreate

from cpu_training.hook_values import answer_of, judged, reward_of


class TraceHook(RolloutHooks):
    """A corrector."""

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        """Tell the agent."""
        return judged(request)

    def on_succeeded(self, rollout: Rollout, events: dict[str, list[Any]], store: TraceWriter) -> None:
        """Post the corrected request, then the reward."""
        attempt = rollout.status.last_attempt_id or "0"
        sampled = [event.data for event in events[attempt] if event.event_type == "model_request"][-1]
        tokens, log_probs = answer_of(rollout.input["input_id"])
        choice = {
            **sampled["response"]["choices"][0],
            "token_ids": tokens,
            "logprobs": {"content": [{"token": str(t), "logprob": p} for t, p in zip(tokens, log_probs, strict=True)]},
        }
        corrected = {**sampled, "response": {**sampled["response"], "choices": [choice]}}
        store.add_event(rollout.rollout_id, attempt, "model_request", corrected)
        store.add_event(rollout.rollout_id, attempt, "reward", {"value": reward_of(rollout.input["input_id"])})
