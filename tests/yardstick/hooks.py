"""Hooks of users, as source texts: each is written into a file of its own and loaded by agent-lightning.

What they post is a function of the input, so that every run of a scene has the same rows.
"""

from __future__ import annotations

_HEAD = """
from agentlightning.hooks import RolloutHooks

def attempt_of(rollout):
    return rollout.status.last_attempt_id or "0"

def row_of(rollout):
    return int(rollout.input["index"])

def model_request(row, tokens):
    return {
        "request": {"messages": [{"role": "user", "content": f"question {row}"}]},
        "response": {
            "prompt_token_ids": [10 + row] * 2,
            "choices": [{
                "token_ids": tokens,
                "logprobs": {"content": [{"logprob": -0.25 * (1 + i)} for i, _ in enumerate(tokens)]},
            }],
        },
        "status": "ok",
        "http_status": 200,
    }
"""

POSTS_A_REWARD = f"""{_HEAD}
class Rewards(RolloutHooks):
    def on_succeeded(self, rollout, events, store):
        value = (row_of(rollout) % 7) / 8
        store.add_event(rollout.rollout_id, attempt_of(rollout), "reward", {{"value": value}})
"""
"""A reward in place of the agents' own: the server keeps both, and the last one counts."""

CORRECTS_THE_TRACE = f"""{_HEAD}
class Corrects(RolloutHooks):
    def on_succeeded(self, rollout, events, store):
        row = row_of(rollout)
        if any(event.event_type == "model_request" for attempt in events.values() for event in attempt):
            request = model_request(row, [40 + row % 5, 41, 42])
            store.add_event(rollout.rollout_id, attempt_of(rollout), "model_request", request)
"""
"""A trace with the prompt of the agent's and other tokens: of equal prompts the server shows the newest."""

POSTS_THE_TRACE = f"""{_HEAD}
class Traces(RolloutHooks):
    def on_succeeded(self, rollout, events, store):
        row, attempt = row_of(rollout), attempt_of(rollout)
        store.add_event(rollout.rollout_id, attempt, "model_request", model_request(row, [50 + row % 5, 51]))
        store.add_event(rollout.rollout_id, attempt, "reward", {{"value": (row % 3) / 4}})
"""
"""For agents that record nothing: all of it."""

RELABELS = f"""{_HEAD}
class Relabels(RolloutHooks):
    def on_enqueue(self, request):
        row = int(request.input["index"])
        changes = {{"input": {{**request.input, "label": f"of {{row}}"}}, "metadata": {{"row": row}}}}
        return request.model_copy(update=changes)
"""
"""Changes every request before it is posted."""
