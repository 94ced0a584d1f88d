"""What the hooks of `--hook` give: functions of the input alone, so that every run has to train the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HOOKS = ("reward", "trace")


def hook_file(name: str) -> Path:
    """The file that `agentlightning.hooks` names."""
    return Path(__file__).with_name(f"{name}_hook.py")


def reward_of(input_id: int) -> float:
    """The reward; a bfloat16, which scores are trained as, holds it exactly."""
    return input_id % 8 / 8


def answer_of(input_id: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of the answer that replaces the sampled one; none is a special token of `tiny_model`."""
    length = 4 + input_id % 5
    return [5 + (7 * input_id + k) % 95 for k in range(length)], [-(1 + (input_id + k) % 8) / 8 for k in range(length)]


def trained_rows(hook: str, input_id: int) -> list[dict[str, Any]]:
    """What the hook decides of the rows that an update must hold for an input: there is one."""
    if hook == "reward":
        return [{"score": reward_of(input_id)}]
    tokens, log_probs = answer_of(input_id)
    return [{"response": tokens, "log_probs": log_probs, "score": reward_of(input_id)}]


def judged(request: Any) -> Any:
    """The `RolloutCreate` with an input that tells the agent that a hook posts the reward."""
    return request.model_copy(update={"input": {**request.input, "judged": True}})
