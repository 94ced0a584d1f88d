"""Kept events answer in the server's place: compared with what the real server answers about the same rollout."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rig import require_frameworks

require_frameworks()

import httpx  # noqa: E402
from agentlightning.schemas import EventCreate, Rollout  # noqa: E402
from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager  # noqa: E402
from packaging.version import Version  # noqa: E402

from agl_async_ckpt.in_flight.kept_events import (  # noqa: E402
    append_event,
    has_reward,
    json_bytes,
    kept_events,
    measured,
    with_events,
)
from agl_async_ckpt.state import FinishedRollout  # noqa: E402
from tests.rig.agents import model_request  # noqa: E402
from tests.rig.life import quiet  # noqa: E402
from tests.rig.server import AglServer  # noqa: E402

REWARDS = [
    {"value": 0.25},
    {"value": 1, "message": "well done"},
    {"value": 0.5, "source": "agent", "reason": "exact", "message": "x", "more": [1]},
    {"value": None, "reason": None},
    {"source": "fallback"},
]


@pytest.fixture
def manager(server: AglServer) -> Iterator[Any]:
    """agent-lightning's own manager, on the real server."""
    with quiet():
        manager = AglAsyncRolloutManager(agl_base_url=server.url, agl_key="", model="m", step=1, train_rollout_n=2)
    yield manager
    manager.client.close()


@pytest.fixture
def client(manager: Any) -> httpx.Client:
    """Of the real server."""
    return manager.client


def post(client: httpx.Client, kind: str, data: dict[str, Any], rollout_id: str = "r1") -> None:
    """Report an event as an agent or the gateway does."""
    body = {"event_type": kind, "data": data}
    client.post(f"/api/rollouts/{rollout_id}/attempt/0/events", json=body).raise_for_status()


def rich_rollout(client: httpx.Client) -> None:
    """A rollout r1 with turns, a repeated prompt, expert routes, an opaque event and two rewards; ended."""
    body = [{"input": {"index": 3}, "rollout_id": "r1", "metadata": {"tag": "x"}}]
    client.post("/api/rollouts", json=body).raise_for_status()
    client.patch("/api/rollouts/r1", json={"status": {"state": "running", "last_attempt_id": "0"}}).raise_for_status()
    post(client, "model_request", model_request(3))
    post(client, "model_request", {**model_request(3), "routed_experts": [[1, 2], [3, 4]]})
    post(client, "note", {"text": "é", "parts": [None, {}]})
    post(client, "model_request", {**model_request(4), "status": "error", "http_status": 503})
    post(client, "reward", REWARDS[0])
    post(client, "reward", REWARDS[2])
    client.patch("/api/rollouts/r1", json={"status": {"state": "succeeded"}}).raise_for_status()


def keep(manager: Any) -> FinishedRollout:
    """What the extension keeps of r1."""
    finished, _ = measured(manager._get_rollout("r1"), *manager._fetch_rollout_events("r1"))
    return finished


# agent-lightning 1.0.0 knows no expert routes, and asks for its raw events without a word about them.
HAS_ROUTES = Version(importlib.metadata.version("agentlightning")) >= Version("1.0.2")
RAW: dict[str, Any] = {"include_routed_experts": False} if HAS_ROUTES else {}
QUERIES: list[dict[str, Any]] = [
    RAW,
    {"format": "triplet"},
    {"event_type": "reward", **RAW},
    {"event_type": "model_request", "format": "triplet"},
    {"event_type": "note", "format": "triplet"},
    {"event_type": "absent", **RAW},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_kept_events_equal_the_servers_answer(manager: Any, client: httpx.Client, query: dict[str, Any]) -> None:
    """For each way in which a manager asks: tokens, log-probs, routes, rewards, opaque events and their order."""
    rich_rollout(client)
    assert kept_events(keep(manager), **query) == manager._get_events("r1", **query)


def test_kept_record_equals_the_servers(manager: Any, client: httpx.Client) -> None:
    """The record comes back as the manager read it, with its metadata."""
    rich_rollout(client)
    rollout = manager._get_rollout("r1")
    assert Rollout.model_validate(keep(manager).record) == rollout
    assert rollout.metadata.model_extra == {"tag": "x"}


def test_completed_rollout_built_from_what_is_kept_is_the_servers(manager: Any, client: httpx.Client) -> None:
    """What the trainer would train, built by agent-lightning's own code from the kept events, is the same."""
    from agentlightning.verl.agl_rollout_manager import EnqueuedRollout

    rich_rollout(client)
    finished = keep(manager)
    rollout = manager._get_rollout("r1")
    item = EnqueuedRollout(data_id="d", rollout_id="r1", step=1, sample_idx_in_step=0, enqueue_time=1.0)
    served = manager._build_completed_rollout(item, rollout)
    manager._get_events = lambda rollout_id, **query: kept_events(finished, **query)
    again = manager._build_completed_rollout(item, Rollout.model_validate(finished.record))
    assert again == served
    assert again.triplets is not None
    assert [triplet.response["token_ids"] for triplet in again.triplets] == [[6, 4, 1]]
    assert again.triplets[0].response["log_probs"] == [-0.5, -0.5, -0.5]
    if HAS_ROUTES:
        assert again.triplets[0].response["routed_experts"] == [[1, 2], [3, 4]]
    assert again.final_reward == again.triplets[0].reward == 0.5


@pytest.mark.parametrize("reward", REWARDS, ids=str)
def test_reward_posted_later_reads_as_the_server_would_have_it(
    manager: Any, client: httpx.Client, reward: dict[str, Any]
) -> None:
    """A reward that lands in the kept events has the raw and the triplet form that the server gives it."""
    rich_rollout(client)
    finished = keep(manager)
    event = append_event("r1", "0", EventCreate(event_type="reward", data=reward))
    finished = with_events(finished, event)
    post(client, "reward", reward)
    for query in QUERIES:
        got, want = kept_events(finished, **query), manager._get_events("r1", **query)
        assert [e.model_dump(exclude={"timestamp"}) for e in got] == [e.model_dump(exclude={"timestamp"}) for e in want]
    assert event.timestamp >= finished.raw_events[-2]["timestamp"]


def test_opaque_event_posted_later_passes_unchanged(manager: Any, client: httpx.Client) -> None:
    """As on the server, only rewards are trimmed in the triplet form."""
    rich_rollout(client)
    event = append_event("r1", "0", EventCreate(event_type="note", data={"value": 1, "deep": {"x": None}}))
    finished = with_events(keep(manager), event)
    assert kept_events(finished, format="triplet")[-1].data == {"value": 1, "deep": {"x": None}}


def test_adding_an_event_changes_no_other_copy(manager: Any, client: httpx.Client) -> None:
    """A state that was captured for a save does not grow while the step goes on."""
    rich_rollout(client)
    before = keep(manager)
    after = with_events(before, append_event("r1", "0", EventCreate(event_type="reward", data={"value": 9})))
    assert len(before.raw_events) == len(after.raw_events) - 1
    assert len(before.triplet_events) == len(after.triplet_events) - 1


def test_reward_is_seen_wherever_it_stands(manager: Any, client: httpx.Client) -> None:
    """Without one, the events are fetched again at the next step: an agent may post it late."""
    rich_rollout(client)
    finished = keep(manager)
    assert has_reward(finished)
    without = FinishedRollout(finished.record, tuple(e for e in finished.raw_events if e["event_type"] != "reward"))
    assert not has_reward(without)
    assert not has_reward(FinishedRollout({}))


def test_size_is_that_of_the_json(manager: Any, client: httpx.Client) -> None:
    """Record and both forms count, so that the bound holds for what a file gets."""
    import json

    rich_rollout(client)
    finished, num_bytes = measured(manager._get_rollout("r1"), *manager._fetch_rollout_events("r1"))
    assert num_bytes == json_bytes(finished)
    parts = [json.dumps(list(events)) for events in (finished.raw_events, finished.triplet_events)]
    total = sum(map(len, parts)) + len(json.dumps(finished.record))
    assert 0.9 * total < num_bytes <= total
