"""agent-lightning's rollout manager and its records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from agl_async_ckpt.agl.internals.protocols import RolloutManager, Trainer
from agl_async_ckpt.agl.internals.server import ENDED, ROLLOUTS_URL


def default_rollout_config(manager: RolloutManager) -> dict[str, Any]:
    """Return the config that the manager posts with each rollout, in the JSON form of a posted request.

    `_rollout_config` is what `_create_rollouts` puts into each request before a hook may change it.
    """
    from agentlightning.schemas import RolloutConfig

    return RolloutConfig.model_validate(manager._rollout_config).model_dump(mode="json", exclude_none=True)


def post_rollouts(manager: RolloutManager, requests: list[dict[str, Any]]) -> list[str]:
    """Create rollouts the way the manager does: preassigned ids make the retried batch idempotent.

    Returns:
        The ids that the server created.
    """
    return [item["rollout_id"] for item in manager.client.post_with_retry(ROLLOUTS_URL, json=requests).json()]


def with_mixin(cls: type, mixin: type, **attributes: Any) -> type:
    """Return a class of a framework with `mixin` before it and `attributes` on it, under its own name.

    A class that has the mixin already, of an earlier step, gets the attributes alone.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases = (cls,) if issubclass(cls, mixin) else (mixin, cls)
    return type(cls.__name__, bases, names | attributes)


def rollout_manager(trainer: Trainer) -> Any:
    """Make a manager of training rollouts as each step does; it has a client of its own, which it has not used."""
    from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager

    return trainer._make_rollout_manager(AglAsyncRolloutManager)


def fetch_events(manager: RolloutManager, rollout_id: str) -> tuple[list[Any], list[Any]]:
    """Fetch the events of a rollout in the two forms from which the manager builds a training sample: raw, triplets."""
    return manager._fetch_rollout_events(rollout_id)


def rollout_record(record: Mapping[str, Any]) -> Any:
    """Build agent-lightning's `Rollout` from a kept record."""
    from agentlightning.schemas import Rollout

    return Rollout.model_validate(record)


def event(fields: Mapping[str, Any]) -> Any:
    """Build agent-lightning's `Event` from a kept one."""
    from agentlightning.schemas import Event

    return Event.model_validate(fields)


def has_ended(rollout: Any) -> bool:
    """Tell whether a `Rollout` is in a terminal state."""
    return rollout.status.state.value in ENDED


def has_failed(rollout: Any) -> bool:
    """Tell whether a `Rollout` ended in failure."""
    return rollout.status.state.value == "failed"


def calls_hooks(manager: RolloutManager) -> bool:
    """Tell whether the manager has hooks of the user's: a hook may change the rollout that it is given."""
    return manager._hooks is not None


def rollouts_per_group(manager: RolloutManager) -> int:
    """Return how many rollouts the manager makes of a training prompt: the size of a whole group, too."""
    return manager._train_rollout_n


def hooks_act(manager: RolloutManager) -> bool:
    """Tell whether the manager calls hooks of the user's that may post something for a rollout that has ended.

    `_hooks` is where `_run_succeeded_hook` and `_run_failed_hook` look for them; the base class's own do nothing.
    """
    from agentlightning.hooks import RolloutHooks

    own = (RolloutHooks.on_succeeded, RolloutHooks.on_failed)
    return manager._hooks is not None and any(
        getattr(getattr(manager._hooks, base.__name__, None), "__func__", None) is not base for base in own
    )


# --- events as the server records and lists them ------------------------------------------------------------------
# For a rollout that the server has lost, by the server's own functions: they are the rules, and no copy of ours is.


def recorded_event(rollout_id: str, attempt_id: str, event: Any) -> Any:
    """Build the `Event` that the server would record for the post of an `EventCreate`, which is sent as JSON."""
    from agentlightning.schemas import Event

    body = event.model_dump(mode="json")
    return Event(rollout_id=rollout_id, attempt_id=attempt_id, timestamp=time.time(), **body)


def is_listed(event: Any, record: Mapping[str, Any]) -> bool:
    """Tell whether the server lists an `Event` of a rollout: it hides those of other attempts than the last."""
    from agentlightning.schemas import DEFAULT_ATTEMPT_ID

    return event.attempt_id == ((record.get("status") or {}).get("last_attempt_id") or DEFAULT_ATTEMPT_ID)


def triplet_form(event: Any) -> Any:
    """Trim an `Event` as the server does for `format=triplet`: `_to_triplet_format` is what its route calls."""
    from agentlightning.server.routes import events as server

    return server._to_triplet_format(event)


def with_model_request(raw: list[Any], triplets: list[Any], event: Any) -> tuple[list[Any], list[Any]]:
    """Return both lists of a rollout after one more `model_request`.

    Args:
        raw: `Event`s without routed experts, as the manager fetches them.
        triplets: The same in triplet form, with routed experts.
        event: Recorded, and listed.
    """
    from agentlightning.server.routes import events as server

    trimmed = triplet_form(event)
    try:
        from agentlightning.server.routes.events import _drop_superseded_routed_experts, _without_routed_experts
    except ImportError:  # agent-lightning 1.0.0 knows no routed experts
        pass
    else:
        triplets = _without_superseded_routes(raw, triplets, event, _drop_superseded_routed_experts)
        event = _without_routed_experts(event)  # as the route does for whoever wants none
    # The newest of equal prompts is listed: the route dedupes so, for the triplet form only.
    return [*raw, event], server._dedupe_model_requests_by_prompt_token_ids([*triplets, trimmed])


def _without_superseded_routes(
    raw: list[Any], triplets: list[Any], event: Any, drop: Callable[[list[Any], str, Any], None]
) -> list[Any]:
    """Take the routed experts from the request before, where the server would at the record of `event`.

    Args:
        raw: Without routed experts.
        triplets: With them.
        event: The one to record.
        drop: The server's function.
    """
    requests = [index for index, triplet in enumerate(triplets) if triplet.event_type == event.event_type]
    if not requests or "routed_experts" not in (last := triplets[requests[-1]]).data:
        return triplets
    # It reads the untrimmed request, which was kept without them; of the earlier ones it looks at the last only.
    before = next(item for item in reversed(raw) if item.event_type == event.event_type)
    recorded = [before.model_copy(update={"data": {**before.data, "routed_experts": last.data["routed_experts"]}})]
    drop(recorded, event.event_type, event.data)
    if "routed_experts" in recorded[0].data:
        return triplets
    trimmed = {name: value for name, value in last.data.items() if name != "routed_experts"}
    return [*triplets[: requests[-1]], last.model_copy(update={"data": trimmed}), *triplets[requests[-1] + 1 :]]
