"""What the extension relies on in agl-server, its schemas and its controllers; the server is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.client import AgentLightningSyncClient
from agentlightning.schemas import TERMINAL_STATES, EventCreate, RolloutCreate, RolloutState

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server, carry_over, kept_events
from agl_async_ckpt.state import FinishedRollout
from tests.contract import agl
from tests.rig.server import AglServer


@pytest.fixture
def client(server: AglServer) -> Iterator[AgentLightningSyncClient]:
    """agent-lightning's own client of the real server."""
    with AgentLightningSyncClient(base_url=server.url, max_retries=0) as client:
        yield client


def create(client: Any, *rollout_ids: str, **values: Any) -> list[dict[str, Any]]:
    requests = [{"input": {"q": 1}, "is_train": True, "rollout_id": item, **values} for item in rollout_ids]
    return client.post_with_retry(internals.ROLLOUTS_URL, json=requests).json()


# --- schemas ------------------------------------------------------------------------------------------------------


def test_states_of_a_rollout_are_the_known_ones() -> None:
    """Listing by state would miss those of a new state."""
    assert {state.value for state in RolloutState} == set(internals.STATES), agl(
        "rollout states", "agl/internals/server.py"
    )
    assert {state.value for state in TERMINAL_STATES} == set(internals.ENDED), agl(
        "final states", "agl/internals/server.py"
    )


def test_request_to_create_has_the_known_fields() -> None:
    """A request is kept by these names and posted again."""
    assert set(RolloutCreate.model_fields) == {*carry_over.REQUEST_KEYS, "rollout_id"}, agl(
        "RolloutCreate has input, is_train, config, metadata, rollout_id", "agl/in_flight/carry_over.py"
    )


def test_client_is_an_http_client_with_a_retrying_post(client: Any) -> None:
    """Health checks and deletions use the plain `request`, which does not retry."""
    assert issubclass(AgentLightningSyncClient, httpx.Client)
    assert AgentLightningSyncClient.request is httpx.Client.request
    with pytest.raises(httpx.HTTPStatusError):  # agl-server has no such page
        client.post_with_retry("/never-there")


# --- server -------------------------------------------------------------------------------------------------------


def test_created_rollout_keeps_metadata_of_ours(client: Any) -> None:
    """The run id and the replaced id are found again in the list."""
    metadata = {carry_over.RUN_ID_KEY: "run", carry_over.REPLACES_KEY: "old", "of_a_hook": [1]}
    create(client, "a", metadata=metadata)
    listed = agl_server.list_rollouts(client)["a"]["metadata"]
    assert {key: listed[key] for key in metadata} == metadata, agl(
        "metadata takes extra keys", "agl/in_flight/carry_over.py"
    )


def test_known_id_is_returned_unchanged_when_posted_again(client: Any) -> None:
    """So a retried post is safe, and an old id cannot be used for a new request."""
    create(client, "a", input={"q": "first"})
    [again] = create(client, "a", input={"q": "second"})
    assert again["input"] == {"q": "first"}, agl(
        "a known rollout_id returns the existing record", "agl/in_flight/agl_server.py"
    )


def test_list_holds_every_rollout_in_order_of_creation(client: Any) -> None:
    """More than the server's default limit, with states and times as numbers of seconds."""
    ids = [f"{number}" for number in range(501)]
    create(client, *ids)
    records = agl_server.list_rollouts(client)
    assert list(records) == ids, agl("GET /api/rollouts honours state_in and limit", "agl/in_flight/agl_server.py")
    status = records["0"]["status"]
    assert status["state"] == "queuing"
    assert 1e9 < status["created_at"] <= status["updated_at"] < 1e11


def test_deleted_rollout_is_unknown_and_deleting_it_again_is_no_error(client: Any) -> None:
    """Reclaiming may be repeated."""
    create(client, "a", "b")
    agl_server.delete_rollouts(client, ["a", "a", "never there"])
    assert list(agl_server.list_rollouts(client)) == ["b"]
    assert client.get(f"{internals.ROLLOUTS_URL}/a").status_code == 404


def test_server_answers_for_the_gateway_state(client: Any) -> None:
    """With the time of its own clock in each answer."""
    assert agl_server.num_proxied_requests(client) == 0
    answer = client.get(internals.GATEWAY_STATE_URL)
    assert answer.json()[internals.NUM_PROXIED] == 0, agl("/proxy/state has inflight", "agl/internals/server.py")
    assert answer.headers["date"].endswith("GMT"), agl("answers carry a Date header", "folder/liveness.py")


def test_kept_reward_reads_as_the_server_would_serve_it(client: Any) -> None:
    """A reward that arrives for a kept rollout is added in both forms, trimmed like the server's triplet form."""
    create(client, "a")
    data = {"value": 0.5, "source": "agent", "reason": "because", "message": "hello"}
    url = f"{internals.ROLLOUTS_URL}/a/attempt/0/events"
    posted = client.post_with_retry(url, json={"event_type": "reward", "data": data}).json()
    served = {
        form: client.get(f"{internals.ROLLOUTS_URL}/a/events", params=params).json()
        for form, params in (("raw", {}), ("triplet", {"format": "triplet"}))
    }
    event = internals.recorded_event("a", "0", EventCreate(event_type="reward", data=data))
    event = event.model_copy(update={"timestamp": posted["timestamp"]})
    kept, _ = kept_events.with_event(FinishedRollout(record={}), event)
    assert list(kept.raw_events) == served["raw"], agl("raw events", "agl/in_flight/kept_events.py")
    assert list(kept.triplet_events) == served["triplet"], agl(
        "triplet form of a reward", "agl/in_flight/kept_events.py"
    )


# --- controllers --------------------------------------------------------------------------------------------------


def test_local_controller_never_starts_an_id_again() -> None:
    """Created again, it becomes `succeeded` with no agent start: why an in-flight rollout gets a new id."""
    from agentlightning.controller.local_reconciler import LocalReconciler, Proc
    from omegaconf import OmegaConf

    patches: list[str] = []
    record = {
        "rollout_id": "seen",
        "input": {},
        "is_train": True,
        "config": {},
        "metadata": {},
        "status": {"state": "queuing", "created_at": 1.0, "updated_at": 1.0},
    }

    class Api:
        async def get(self, url: str, **_: Any) -> Any:
            return SimpleNamespace(json=lambda: [record], raise_for_status=lambda: None)

        async def patch(self, url: str, *, json: Any) -> Any:
            patches.append(json["status"]["state"])
            return SimpleNamespace(raise_for_status=lambda: None)

    config = {
        "runner_type": "local",
        "local_runner": {"maximum_size": 4, "poll_interval": 1},
        "agl_server": {"url": "http://127.0.0.1:1", "key": ""},
    }
    ended: Any = SimpleNamespace(returncode=0)

    async def tick() -> None:
        reconciler = LocalReconciler(Api(), OmegaConf.create(config))  # type: ignore[arg-type]
        reconciler._rid_to_proc["seen"] = Proc(attempt_id="0", proc=ended, spawned_at=0.0)
        await reconciler._reconcile_once()
        assert reconciler._rid_to_proc["seen"].proc is ended

    asyncio.run(tick())
    assert patches == ["running", "succeeded"], agl(
        "a seen id is finished without a start", "agl/in_flight/carry_over.py"
    )


def test_kubernetes_job_is_named_after_the_rollout_id() -> None:
    """The same id meets the old job again: why an in-flight rollout gets a new id there too."""
    from agentlightning.controller.k8s_reconciler import build_job_name

    assert build_job_name("a") == "agl-rollout-a", agl(
        "the job name is made of the rollout id", "agl/in_flight/carry_over.py"
    )


# --- what an outage relies on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "/events"])
def test_unknown_rollout_is_named_in_the_answer(client: Any, suffix: str) -> None:
    """So "not found" of something before the server is not taken for a server that has lost the rollout."""
    answer = client.get(f"{internals.ROLLOUTS_URL}/never-there{suffix}")
    assert answer.status_code == 404
    assert "never-there" in answer.text, agl("404 names the rollout", "agl/in_flight/server_client.py")
    posted = client.post(f"{internals.ROLLOUTS_URL}/never-there/attempt/0/events", json={"event_type": "x", "data": {}})
    assert (posted.status_code, "never-there" in posted.text) == (404, True)
