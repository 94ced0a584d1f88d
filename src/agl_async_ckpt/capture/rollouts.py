"""agent-lightning's rollout manager and its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLLOUTS_URL = "/api/rollouts"


def default_rollout_config(manager: Any) -> dict[str, Any]:
    """The config that the manager posts with each rollout, in the JSON form of a posted request.

    `_rollout_config` is what `_create_rollouts` puts into each request before a hook may change it.
    """
    from agentlightning.schemas import RolloutConfig

    return RolloutConfig.model_validate(manager._rollout_config).model_dump(mode="json", exclude_none=True)


def post_rollouts(manager: Any, requests: list[dict[str, Any]]) -> list[str]:
    """Create rollouts the way the manager does: preassigned ids make the retried batch idempotent.

    Returns:
        The ids that the server created.
    """
    return [item["rollout_id"] for item in manager.client.post_with_retry(ROLLOUTS_URL, json=requests).json()]


def rollout_manager(trainer: Any) -> Any:
    """Make a manager of training rollouts as each step does; it has a client of its own, which it has not used."""
    from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager

    return trainer._make_rollout_manager(AglAsyncRolloutManager)


def fetch_events(manager: Any, rollout_id: str) -> tuple[list[Any], list[Any]]:
    """Fetch the events of a rollout in the two forms from which the manager builds a training sample: raw, triplets."""
    return manager._fetch_rollout_events(rollout_id)


def rollout_record(record: Mapping[str, Any]) -> Any:
    """Build agent-lightning's `Rollout` from a kept record."""
    from agentlightning.schemas import Rollout

    return Rollout.model_validate(record)


def has_ended(rollout: Any) -> bool:
    """Whether a `Rollout` is in a terminal state."""
    return rollout.status.state.value in ("succeeded", "failed")


def has_failed(rollout: Any) -> bool:
    """Whether a `Rollout` ended in failure."""
    return rollout.status.state.value == "failed"
