"""Record and events of a rollout that has ended, kept outside the server and answered in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.codec.events import PackedEvents
from agl_async_ckpt.state import FinishedRollout

REWARD = "reward"
MODEL_REQUEST = "model_request"


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
    """Return the size of a kept rollout as JSON, bytes."""
    packed = map(PackedEvents.pack, (finished.raw_events, finished.triplet_events))
    return len(json.dumps(finished.record)) + sum(events.num_bytes for events in packed)


def has_reward(finished: FinishedRollout) -> bool:
    """Tell whether a reward is among the kept events; an agent may post it after its rollout has ended."""
    return REWARD in PackedEvents.pack(finished.raw_events).event_types


def has_answer(triplet_events: Iterable[Any]) -> bool:
    """Tell whether agent-lightning trains anything of these events: it leaves out errors and answers without tokens."""
    return any(event.event_type == MODEL_REQUEST and _is_answer(event.data) for event in triplet_events)


def _is_answer(data: Mapping[str, Any]) -> bool:
    http_status = data.get("http_status")
    is_error = data.get("status") == "error" or (isinstance(http_status, int) and http_status >= 400)
    return not is_error and bool(data.get("response_token_ids"))


def kept_events(
    finished: FinishedRollout, *, event_type: str | None = None, format: str | None = None, **_: Any
) -> Any:
    """Answer the server's `GET /api/rollouts/{id}/events` from what is kept.

    Raw events were kept without routed experts, and triplet events with them, as agent-lightning asks for each.
    """
    events = finished.triplet_events if format == "triplet" else finished.raw_events
    return [internals.event(event) for event in events if event_type in (None, event["event_type"])]


def with_event(finished: FinishedRollout, event: Any) -> tuple[FinishedRollout, int]:
    """Return `finished` with what the server would list after one more event, and its size as JSON in bytes.

    Args:
        finished: A kept rollout.
        event: As `internals.recorded_event` returns it.
    """
    if not internals.is_listed(event, finished.record):
        return finished, json_bytes(finished)
    if event.event_type == MODEL_REQUEST:  # may take the place of an earlier one
        raw, triplets = internals.with_model_request(
            kept_events(finished), kept_events(finished, format="triplet"), event
        )
        grown = replace(finished, raw_events=_packed(raw), triplet_events=_packed(triplets))
    else:
        triplet = internals.triplet_form(event)
        grown = replace(
            finished,
            raw_events=PackedEvents.pack(finished.raw_events).with_event(event.model_dump(mode="json")),
            triplet_events=PackedEvents.pack(finished.triplet_events).with_event(triplet.model_dump(mode="json")),
        )
    return grown, json_bytes(grown)
