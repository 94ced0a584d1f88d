"""Record and events of a rollout that has ended, kept outside the server and answered in its place."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_async_ckpt.codec.events import PackedEvents
from agl_async_ckpt.state import FinishedRollout

REWARD = "reward"
REWARD_FIELDS = ("value", "source", "reason")
"""What the server's triplet form leaves of a reward event: `value` always, the others where they were posted."""


def measured(rollout: Any, raw_events: list[Any], triplet_events: list[Any]) -> tuple[FinishedRollout, int]:
    """Return what is kept of a rollout, and its size as JSON in bytes.

    Args:
        rollout: The server's record.
        raw_events: As the server lists them.
        triplet_events: The same in triplet form.
    """
    finished = FinishedRollout(
        record=rollout.model_dump(mode="json"),
        raw_events=_packed(raw_events),
        triplet_events=_packed(triplet_events),
    )
    return finished, json_bytes(finished)


def _packed(events: list[Any]) -> PackedEvents:
    return PackedEvents.take(tuple(event.model_dump(mode="json") for event in events))


def json_bytes(finished: FinishedRollout) -> int:
    """Size of a kept rollout as JSON, bytes."""
    packed = map(PackedEvents.pack, (finished.raw_events, finished.triplet_events))
    return len(json.dumps(finished.record)) + sum(events.num_bytes for events in packed)


def has_reward(finished: FinishedRollout) -> bool:
    """Whether a reward is among the kept events; an agent may post it after its rollout has ended."""
    return REWARD in PackedEvents.pack(finished.raw_events).event_types


def is_answer(model_request: Mapping[str, Any]) -> bool:
    """Whether the data of a `model_request` event holds an answer; agent-lightning trains from no other."""
    http_status = model_request.get("http_status")
    return model_request.get("status") != "error" and not (isinstance(http_status, int) and http_status >= 400)


def kept_events(
    finished: FinishedRollout, *, event_type: str | None = None, format: str | None = None, **_: Any
) -> Any:
    """Answer the server's `GET /api/rollouts/{id}/events` from what is kept.

    Raw events were kept without routed experts, and triplet events with them, as agent-lightning asks for each.
    """
    from agentlightning.schemas import Event

    events = finished.triplet_events if format == "triplet" else finished.raw_events
    return [Event.model_validate(event) for event in events if event_type in (None, event["event_type"])]


def append_event(rollout_id: str, attempt_id: str, event: Any) -> Any:
    """Build the event that the server would have recorded for a post."""
    from agentlightning.schemas import Event

    return Event(
        event_type=event.event_type,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        timestamp=time.time(),
        data=event.data,
    )


def with_events(finished: FinishedRollout, event: Any) -> FinishedRollout:
    """Return `finished` with one more event, in both forms."""
    raw = event.model_dump(mode="json")
    trimmed = raw
    if raw["event_type"] == REWARD:
        data = raw["data"]
        kept = {"value": data.get("value")} | {name: data[name] for name in REWARD_FIELDS[1:] if name in data}
        trimmed = {**raw, "data": kept}
    return replace(
        finished,
        raw_events=PackedEvents.pack(finished.raw_events).with_event(raw),
        triplet_events=PackedEvents.pack(finished.triplet_events).with_event(trimmed),
    )
