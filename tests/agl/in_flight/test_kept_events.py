"""Kept events answer in the server's place: compared with what the real server answers about the same rollout."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from agentlightning.schemas import EventCreate, Rollout
from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager
from packaging.version import Version

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.kept_events import (
    has_answer,
    has_reward,
    json_bytes,
    kept_events,
    measured,
    with_event,
)
from agl_async_ckpt.state import FinishedRollout
from tests.rig.agents import model_request
from tests.rig.life import quiet
from tests.rig.server import AglServer

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


def post(client: httpx.Client, kind: str, data: dict[str, Any], attempt_id: str = "0") -> None:
    """Report an event as an agent or the gateway does."""
    body = {"event_type": kind, "data": data}
    client.post(f"/api/rollouts/r1/attempt/{attempt_id}/events", json=body).raise_for_status()


def late(kind: str, data: dict[str, Any], attempt_id: str = "0") -> Any:
    """The same event, posted for a rollout that is served."""
    return internals.recorded_event("r1", attempt_id, EventCreate(event_type=kind, data=data))


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
    event = late("reward", reward)
    finished, _ = with_event(finished, event)
    post(client, "reward", reward)
    assert_reads_as_on_the_server(finished, manager)
    assert event.timestamp >= finished.raw_events[-2]["timestamp"]


def assert_reads_as_on_the_server(finished: FinishedRollout, manager: Any) -> None:
    """Every query is answered alike, but for the moment at which an event was recorded."""
    for query in QUERIES:
        got, want = kept_events(finished, **query), manager._get_events("r1", **query)
        assert [e.model_dump(exclude={"timestamp"}) for e in got] == [e.model_dump(exclude={"timestamp"}) for e in want]


def turn(*prompt: int, answer: tuple[int, ...] = (5,), routes: Any = None) -> dict[str, Any]:
    """A model request with its tokens, and the routed experts of all of them."""
    choice = {"token_ids": list(answer), "logprobs": {"content": [{"logprob": -1.0} for _ in answer]}}
    data = {"request": {}, "response": {"prompt_token_ids": list(prompt), "choices": [choice]}, "status": "ok"}
    return data if routes is None else {**data, "routed_experts": routes}


LATE_REQUESTS = {
    "of a new prompt": [turn(1, 2)],
    "of a prompt that is there": [turn(13, 13, answer=(9,))],
    "of one prompt twice": [turn(1, 2), turn(1, 2, answer=(7, 8))],
    "without a prompt": [turn(), turn()],
    "that failed": [{**turn(13, 13), "status": "error", "http_status": 503}],
    "with routes": [turn(1, 2, routes="a")],
    "with routes for a longer context": [turn(1, 2, routes="a"), turn(1, 2, 5, 6, routes="b")],
    "with routes for another context": [turn(1, 2, routes="a"), turn(3, routes="b")],
    "with routes for the same prompt": [turn(1, 2, routes="a"), turn(1, 2, routes="b")],
    "without routes after some": [turn(1, 2, routes="a"), turn(1, 2, 5, 6)],
    "with tuples, which JSON has not": [turn(1, 2) | {"more": (1, 2)}],
}


@pytest.mark.parametrize("name", LATE_REQUESTS)
def test_request_posted_later_reads_as_the_server_would_have_it(manager: Any, client: httpx.Client, name: str) -> None:
    """Newest of equal prompts, trimmed, and superseded routes dropped: by the server's own functions."""
    rich_rollout(client)
    finished = keep(manager)
    for data in LATE_REQUESTS[name]:
        finished, num_bytes = with_event(finished, late("model_request", data))
        assert num_bytes == json_bytes(finished)
        post(client, "model_request", data)
    assert_reads_as_on_the_server(finished, manager)


@pytest.mark.parametrize("kind", ["reward", "model_request", "note"])
def test_event_of_another_attempt_is_hidden_as_on_the_server(manager: Any, client: httpx.Client, kind: str) -> None:
    """The server lists the events of the last attempt."""
    rich_rollout(client)
    finished, _ = with_event(keep(manager), late(kind, turn(1, 2), "1"))
    post(client, kind, turn(1, 2), "1")
    assert finished == keep(manager)
    assert_reads_as_on_the_server(finished, manager)


def test_opaque_event_posted_later_passes_unchanged(manager: Any, client: httpx.Client) -> None:
    """As on the server, only rewards are trimmed in the triplet form."""
    rich_rollout(client)
    finished, _ = with_event(keep(manager), late("note", {"value": 1, "deep": {"x": None}}))
    assert kept_events(finished, format="triplet")[-1].data == {"value": 1, "deep": {"x": None}}


def test_adding_an_event_changes_no_other_copy(manager: Any, client: httpx.Client) -> None:
    """A state that was captured for a save does not grow while the step goes on."""
    rich_rollout(client)
    before = keep(manager)
    after, _ = with_event(before, late("reward", {"value": 9}))
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


@pytest.mark.parametrize(
    ("data", "is_trained"),
    [
        (turn(1, 2), True),
        (turn(1, 2, answer=()), False),
        ({**turn(1, 2), "status": "error"}, False),
        ({**turn(1, 2), "http_status": 429}, False),
        ({**turn(1, 2), "http_status": 200}, True),
        ({}, False),
    ],
)
def test_answer_is_what_a_triplet_is_made_of(
    manager: Any, client: httpx.Client, data: dict[str, Any], is_trained: bool
) -> None:
    """Judged as agent-lightning's own code does that builds the sample."""
    from agentlightning.verl.agl_rollout_manager import EnqueuedRollout

    client.post("/api/rollouts", json=[{"input": {"index": 3}, "rollout_id": "r1"}]).raise_for_status()
    post(client, "model_request", data)
    post(client, "reward", {"value": 1.0})
    item = EnqueuedRollout(data_id="d", rollout_id="r1", step=1, sample_idx_in_step=0, enqueue_time=1.0)
    assert bool(manager._build_completed_rollout(item, manager._get_rollout("r1")).triplets) is is_trained
    assert has_answer(manager._get_events("r1", format="triplet")) is is_trained
