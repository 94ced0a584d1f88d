"""What a resume asks of the agl-server: a real HTTP server on loopback that answers well, badly, late or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.client import AgentLightningSyncClient

from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.exceptions import ServerError
from tests.rig.double import Answer, ok
from tests.rig.server import AglServer


def record(rollout_id: str, **changes: Any) -> dict[str, Any]:
    """A rollout record as the server lists it."""
    return {
        "rollout_id": rollout_id,
        "metadata": {},
        "status": {"state": "running", "created_at": 1.0, "updated_at": 2.0},
        **changes,
    }


@pytest.fixture
def client_of() -> Iterator[Callable[[str], AgentLightningSyncClient]]:
    """Builds agent-lightning's client of a URL, which does not retry; all of them are closed at the end."""
    clients: list[AgentLightningSyncClient] = []

    def build(url: str) -> AgentLightningSyncClient:
        clients.append(AgentLightningSyncClient(base_url=url, max_retries=0, verify=False))
        return clients[-1]

    yield build
    for client in clients:
        client.close()


# --- what each call asks for ---------------------------------------------------------------------------------------


def failing_calls() -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Each call of the module, and what its error must name."""
    return {
        "list": (agl_server.list_rollouts, "the list of rollouts"),
        "delete": (lambda client: agl_server.delete_rollouts(client, ["r-17"]), "rollout r-17"),
        "create": (
            lambda client: agl_server.create_rollouts(
                SimpleNamespace(client=client), [{"rollout_id": "r-18"}, {"rollout_id": "r-19"}]
            ),
            "2 rollouts, the first is r-18",
        ),
        "proxy": (agl_server.num_proxied_requests, "the gateway's state"),
        "models": (agl_server.delete_models, "the registered models"),
    }


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        ("list", "agl_base_url the address of an agl-server?"),
        ("create", "agl_base_url the address of an agl-server?"),
        ("proxy", "agl_base_url the address of an agl-server?"),
        ("models", "agl_base_url the address of an agl-server?"),
        ("delete", "was the server restarted?"),
    ],
)
def test_not_found_hints_at_what_can_be_missing(serve: Any, client_of: Any, call: str, hint: str) -> None:
    """An agl-server misses nothing but rollouts."""
    ask, _ = failing_calls()[call]
    with pytest.raises(ServerError) as caught:
        ask(client_of(serve((404, b"<html>")).url))
    assert "HTTP 404 (" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("call", failing_calls())
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, b'{"detail":"x"}'), "HTTP 401 (agentlightning.agl_key is not the server's key?)"),
        ((409, b'{"detail":"x"}'), "HTTP 409."),
        ((500, b"Internal Server Error"), "HTTP 500."),
        ((503, b""), "HTTP 503."),
        ((200, b'[{"rollout_id": '), "its answer is not valid JSON of the expected form (JSONDecodeError"),
        ((200, b"<html>login</html>"), "its answer is not valid JSON of the expected form (JSONDecodeError"),
        ((200, b"\xff\xfe\xfd"), "its answer is not valid JSON of the expected form ("),
    ],
    ids=["401", "409", "500", "503", "torn JSON", "HTML", "not text"],
)
def test_bad_answers_name_server_subject_and_cause(
    serve: Any, client_of: Any, call: str, answer: Answer, says: str
) -> None:
    """Whatever is asked: the error names the URL, what it was about, the cause, and that the checkpoint is whole."""
    run, subject = failing_calls()[call]
    double = serve(answer)
    with pytest.raises(ServerError) as caught:
        run(client_of(double.url))
    text = str(caught.value)
    assert double.url in text
    assert subject in text
    assert says in text
    assert text.endswith("The checkpoint is untouched; start again once the server answers.")


@pytest.mark.parametrize("call", failing_calls())
def test_refused_connection_names_server_and_subject(client_of: Any, free_url: str, call: str) -> None:
    """A server that vanished after the health check is named likewise."""
    run, subject = failing_calls()[call]
    url = free_url
    with pytest.raises(ServerError) as caught:
        run(client_of(url))
    assert url in str(caught.value)
    assert subject in str(caught.value)
    assert "ConnectError" in str(caught.value)


WRONG_LISTS = {
    "null": None,
    "object": {},
    "error object": {"detail": "try later"},
    "number": 7,
    "list of ids": ["r1"],
    "no id": [{"status": {"state": "running", "created_at": 1, "updated_at": 1}}],
    "no status": [{"rollout_id": "r1"}],
    "status is text": [record("r1", status="running")],
    "unknown state": [record("r1", status={"state": "paused", "created_at": 1, "updated_at": 1})],
    "no end time": [record("r1", status={"state": "running", "created_at": 1})],
    "time is text": [record("r1", status={"state": "failed", "created_at": 1, "updated_at": "now"})],
    "metadata is a list": [record("r1", metadata=[1])],
}


@pytest.mark.parametrize("body", WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_lists_of_another_shape_are_refused(serve: Any, client_of: Any, body: Any) -> None:
    """Nothing is decided on half an answer: it would create again, or delete, what the server holds."""
    double = serve(ok(body))
    with pytest.raises(ServerError) as caught:
        agl_server.list_rollouts(client_of(double.url))
    assert double.url in str(caught.value)
    if isinstance(body, list) and isinstance(body[0], dict) and "rollout_id" in body[0]:
        assert "r1" in str(caught.value)


@pytest.mark.parametrize("body", [None, [], 7, {"inflight": None}, {"inflight": "many"}, {"inflight": [1]}])
def test_gateway_states_of_another_shape_are_refused(serve: Any, client_of: Any, body: Any) -> None:
    """The number of requests in the gateway is a number, or the answer is named as wrong."""
    double = serve(ok(body))
    with pytest.raises(ServerError, match="the gateway's state"):
        agl_server.num_proxied_requests(client_of(double.url))


@pytest.mark.parametrize("body", [None, {}, 7, ["r-18"], [{"id": "r-18"}]])
def test_creations_of_another_shape_are_refused(serve: Any, client_of: Any, body: Any) -> None:
    """An answer to a creation that lists no records is an error that names the first rollout."""
    double = serve(ok(body))
    with pytest.raises(ServerError, match="r-18"):
        agl_server.create_rollouts(SimpleNamespace(client=client_of(double.url)), [{"rollout_id": "r-18"}])


@pytest.mark.parametrize("created", [[], ["b", "a"], ["a"], ["a", "b", "c"], ["a", "x"]])
def test_created_ids_must_be_those_that_were_posted(serve: Any, client_of: Any, created: list[str]) -> None:
    """In number and order: the trainer waits for exactly these."""
    double = serve(ok([{"rollout_id": rollout_id} for rollout_id in created]))
    requests = [{"rollout_id": "a"}, {"rollout_id": "b"}]
    with pytest.raises(ServerError, match=rf"created other rollouts than were posted \({len(created)} of 2; .* a\)"):
        agl_server.create_rollouts(SimpleNamespace(client=client_of(double.url)), requests)
    double.answers = [ok([{"rollout_id": "a"}, {"rollout_id": "b"}])]
    agl_server.create_rollouts(SimpleNamespace(client=client_of(double.url)), requests)
    assert json.loads(double.bodies[-1]) == requests


def test_list_asks_for_every_state_and_without_a_limit(serve: Any, client_of: Any) -> None:
    """The server's default of 500 would cut the list silently."""
    double = serve(ok([record("r1"), record("r2")]))
    found = agl_server.list_rollouts(client_of(double.url))
    assert list(found) == ["r1", "r2"]
    query = httpx.URL(double.requests[0].partition(" ")[2]).params
    assert query.get_list("state_in") == ["queuing", "running", "succeeded", "failed"]
    assert int(query["limit"]) >= 10**9


def test_each_rollout_is_deleted_once(serve: Any, client_of: Any) -> None:
    """Several at a time; an empty answer, as the server gives, is fine."""
    double = serve((204, b""))
    ids = [f"r{i}" for i in range(20)]
    agl_server.delete_rollouts(client_of(double.url), ids)
    assert sorted(double.requests) == sorted(f"DELETE /api/rollouts/{i}" for i in ids)


def test_nothing_to_delete_asks_nothing(serve: Any, client_of: Any) -> None:
    """An empty list costs no request."""
    double = serve((500, b""))
    agl_server.delete_rollouts(client_of(double.url), [])
    assert double.requests == []


# --- the real server ----------------------------------------------------------------------------------------------


def test_real_server_answers_every_call(server: AglServer, client_of: Any) -> None:
    """Creation, list, gateway state and deletion as the real agl-server answers them; a second deletion is no error."""
    client = client_of(server.url)
    requests = [{"input": {"index": i}, "rollout_id": f"r{i}"} for i in range(3)]
    agl_server.create_rollouts(SimpleNamespace(client=client), requests)
    client.patch("/api/rollouts/r1", json={"status": {"state": "failed"}}).raise_for_status()
    records = agl_server.list_rollouts(client)
    assert {i: r["status"]["state"] for i, r in records.items()} == {"r0": "queuing", "r1": "failed", "r2": "queuing"}
    assert records["r1"]["status"]["updated_at"] > records["r1"]["status"]["created_at"]
    assert agl_server.num_proxied_requests(client) == 0
    agl_server.delete_rollouts(client, ["r0", "r1"])
    agl_server.delete_rollouts(client, ["r0", "gone"])
    assert list(agl_server.list_rollouts(client)) == ["r2"]


def test_more_rollouts_than_the_servers_limit_are_listed(server: AglServer, client_of: Any) -> None:
    """The real server holds 600, more than its default limit, and all are seen."""
    client = client_of(server.url)
    requests = [{"input": {"index": 0}, "rollout_id": f"r{i}"} for i in range(600)]
    agl_server.create_rollouts(SimpleNamespace(client=client), requests)
    assert len(client.get("/api/rollouts", params={"state_in": "queuing"}).json()) == 500
    assert len(agl_server.list_rollouts(client)) == 600
