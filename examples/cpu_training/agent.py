"""The agent: asks the policy for text once or a few times and reports how many of the letters are vowels.

Where a hook posts the reward, it reports nothing and asks for the same again in place of more.

agl-controller starts it as a process of its own per rollout (local mode) and tells it the addresses by environment.
"""

from __future__ import annotations

import json
import os
import time

import httpx

SLOW_TURNS = 3
SLOW_WAIT_S = 3.0
"""A slow agent waits this long after each answer, as if a tool were running: it outlives one or two training steps."""
GIVE_UP_AFTER_S = 30.0
"""How long an agent puts up with a paused gateway or a model that is gone before it fails."""


class Agent:
    """One rollout."""

    def __init__(self) -> None:
        self._input = json.loads(os.environ["AGL_DEMO_INPUT"])
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"}, timeout=60.0, trust_env=False
        )

    def run(self) -> None:
        """Talk to the policy, then post the reward if that is the agent's; called by the controller's worker."""
        slow, judged = self._input["slow"], self._input.get("judged", False)
        messages = [{"role": "user", "content": self._input["question"]}]
        text = ""
        for _ in range(SLOW_TURNS if slow else 1):
            answer = self._ask(messages)
            text += answer
            if not judged:
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
            if slow:
                time.sleep(SLOW_WAIT_S)
        if judged:
            return
        reward = sum(letter in "aeiou" for letter in text) / max(1, len(text))
        self._client.post(
            os.environ["AGL_EVENT_URL"], json={"event_type": "reward", "data": {"value": reward}}
        ).raise_for_status()

    def _ask(self, messages: list[dict[str, str]]) -> str:
        """One chat completion; waits while the gateway is paused for a weight update.

        Raises:
            httpx.HTTPStatusError: The model did not answer within `GIVE_UP_AFTER_S`, or the rollout is unknown.
        """
        url = f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions"
        deadline = time.monotonic() + GIVE_UP_AFTER_S
        while True:
            response = self._client.post(url, json={"model": "auto", "messages": messages, "max_tokens": 8})
            if response.status_code in (429, 502, 503, 504) and time.monotonic() < deadline:
                time.sleep(1.0)
                continue
            response.raise_for_status()
            return response.json()["choices"][0]["message"]["content"] or ""
