"""The wait for a server that is away or answers errors: how long, what is said, and that nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.client import AgentLightningSyncClient
from httpx_retries import Retry, RetryTransport

from agl_async_ckpt.agl.in_flight import patience
from agl_async_ckpt.agl.in_flight.carry_over import REPLACES_KEY, RUN_ID_KEY, InFlight
from agl_async_ckpt.agl.in_flight.patience import PASSING_STATUS, Patience
from agl_async_ckpt.agl.in_flight.server_client import ServerClient
from agl_async_ckpt.exceptions import ServerError
from agl_async_ckpt.state import FinishedRollout
from tests.rig.double import ok
from tests.rig.server import AglServer


class Clock:
    """Time as the module sees it: it passes only in `sleep`.

    Attributes:
        pauses: Seconds of each sleep.
        during_sleep: Called within each sleep.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.during_sleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.pauses.append(seconds)
        self.now += seconds
        self.during_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The module's clock, under control."""
    clock = Clock()
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


@pytest.fixture
def client_of() -> Iterator[Callable[..., Any]]:
    """`client_of(url, patience)`: a patient client as the manager builds it, closed at the end."""
    clients: list[AgentLightningSyncClient] = []

    def build(url: str, patience: Patience | None = None) -> Any:
        transport = RetryTransport(httpx.HTTPTransport(verify=False), Retry(total=10, allowed_methods=["GET"]))
        clients.append(AgentLightningSyncClient(base_url=url, transport=transport))
        return ServerClient(clients[-1], patience or Patience(300), InFlight())

    yield build
    for client in clients:
        client.close()


# --- waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 401, 409, 422])
def test_any_other_answer_ends_the_wait(serve: Any, client_of: Any, clock: Clock, status: int) -> None:
    """The wait is for a server that answers, not for one that agrees."""
    double = serve((status, b"{}"))
    assert client_of(double.url).get("/api/models").status_code == status
    assert double.requests == ["GET /api/models"]
    assert clock.pauses == []


def test_refused_connection_is_tried_again_until_the_server_is_there(
    serve: Any, client_of: Any, clock: Clock, free_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that comes up is used; one line says that it is waited for, and the absence is told once."""
    port = int(free_url.rpartition(":")[2])
    clock.during_sleep = lambda: serve(ok([1]), port=port) if len(clock.pauses) == 3 else None
    waits = Patience(300)
    assert client_of(free_url, waits).get("/api/rollouts/r1").json() == [1]
    assert clock.pauses == [0.5, 1.0, 2.0]
    [said] = caplog.messages
    assert said.startswith(f"The agl-server at {free_url} is not reachable (ConnectError: ")
    assert said.endswith("waiting up to 300 s.")
    absence = waits.take_absence()
    assert absence is not None
    assert absence.startswith(f"The agl-server at {free_url} was away for 3.5 s (ConnectError: ")
    assert waits.take_absence() is None


def test_passing_answers_are_waited_out_without_the_transports_own_retries(
    serve: Any, client_of: Any, clock: Clock
) -> None:
    """A server that answers 500 and the like for a while is not given up, and not flooded."""
    double = serve(*((status, b"<html>") for status in PASSING_STATUS), ok({}))
    assert client_of(double.url).get("/proxy/state").json() == {}
    assert len(double.requests) == len(PASSING_STATUS) + 1
    assert clock.pauses == [0.5, 1, 2, 4, 8]


def test_not_found_by_something_before_the_server_is_waited_out(serve: Any, client_of: Any, clock: Clock) -> None:
    """agl-server names the rollout that it does not know; a gateway without a backend does not."""
    double = serve((404, b"default backend"), (404, b'{"detail":"Rollout not found: r1"}'))
    response = client_of(double.url).get("/api/rollouts/r1")
    assert response.text == '{"detail":"Rollout not found: r1"}'
    assert clock.pauses == [0.5]


def test_error_page_that_quotes_the_url_is_no_answer_of_the_server(serve: Any, client_of: Any, clock: Clock) -> None:
    """A web server says which page it has not found: the rollout is not lost for that."""
    page = b"<html>The requested URL /api/rollouts/r1 was not found on this server."
    double = serve((404, page), (404, b'{"detail":"Rollout not found: r1"}'))
    assert client_of(double.url).get("/api/rollouts/r1").json() == {"detail": "Rollout not found: r1"}
    assert clock.pauses == [0.5]


@pytest.mark.parametrize("url", ["/api/models", "/api/rollouts", "/proxy/state"])
def test_not_found_is_waited_out_once_the_server_has_answered(
    serve: Any, client_of: Any, clock: Clock, url: str
) -> None:
    """A proxy has lost its backend; agl-server always has these. At the start it is the wrong address."""
    double = serve((404, b"404 page not found"), ok({}), (404, b"404 page not found"), ok({"a": 1}))
    client = client_of(double.url)
    assert client.get(url).status_code == 404
    assert client.get(url).json() == {}
    assert client.get(url).json() == {"a": 1}
    assert clock.pauses == [0.5]


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "htp://127.0.0.1:8000"])
def test_address_that_is_no_url_is_refused_at_once(client_of: Any, clock: Clock, url: str) -> None:
    """No server will ever answer there."""
    with pytest.raises(ServerError, match=r"the registered models \(agentlightning.agl_base_url must be like http"):
        client_of(url).get("/api/models")
    assert clock.pauses == []


def test_key_that_is_no_header_is_refused_at_once_and_not_told(
    serve: Any, client_of: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line break in it, as a file has at its end."""
    client = client_of(serve(ok({})).url)
    with pytest.raises(ServerError, match=r"agl_key") as caught:
        client.get("/api/models", headers={"X-Key": "secret\n"})
    assert clock.pauses == []
    assert "secret" not in str(caught.value) + caplog.text
    assert caught.value.__suppress_context__


def test_pauses_grow_to_a_bound_and_end_with_the_wait(client_of: Any, clock: Clock, free_url: str) -> None:
    """Back-off doubles up to 15 s; the last pause ends when the time is up; the error names URL, cause and subject."""
    with pytest.raises(ServerError) as caught:
        client_of(free_url, Patience(70)).post_with_retry("/api/rollouts/r7/attempt/0/events", json={})
    assert clock.pauses == [0.5, 1, 2, 4, 8, 15, 15, 15, 9.5]
    text = str(caught.value)
    assert text.startswith(f"The agl-server at {free_url} was not reachable for 70 s (ConnectError: ")
    assert "), waiting for the events of rollout r7.\n" in text
    assert text.endswith("The checkpoint is untouched; start again once the server answers.")
    assert isinstance(caught.value, ConnectionError)


def test_wait_of_zero_tries_once(serve: Any, client_of: Any, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """`server_wait_s: 0` still asks, and the error says what was answered."""
    double = serve((500, b""))
    with pytest.raises(ServerError, match=r"not reachable for 0 s \(HTTP 500\), waiting for the registered models"):
        client_of(double.url, Patience(0)).delete("/api/models")
    assert len(double.requests) == 1
    assert clock.pauses == []
    assert caplog.messages == []


def test_swallowed_error_is_not_waited_for_twice(serve: Any, client_of: Any, clock: Clock) -> None:
    """agent-lightning ignores a failed delete; the next request tries once, and a later outage is waited out again."""
    double = serve((503, b""))
    client = client_of(double.url, Patience(2))
    with pytest.raises(ServerError):
        client.delete("/api/rollouts/r1")
    num_pauses = len(clock.pauses)
    with pytest.raises(ServerError, match="waiting for rollout r2"):
        client.get("/api/rollouts/r2")
    assert len(clock.pauses) == num_pauses
    double.answers = [ok({})]
    client.get("/api/rollouts/r2")
    double.answers = [(503, b""), ok({})]
    client.get("/api/rollouts/r2")
    assert len(clock.pauses) == num_pauses + 1


def test_end_of_an_outage_is_told_to_whom_it_concerns(serve: Any, client_of: Any, clock: Clock) -> None:
    """Once for each outage."""
    ended: list[int] = []
    double = serve((503, b""), (503, b""), ok({}))
    client = client_of(double.url, Patience(300, lambda: ended.append(len(double.requests))))
    client.get("/proxy/state")
    client.get("/proxy/state")
    assert ended == [3]


# --- requests with an effect ---------------------------------------------------------------------------------------

MODELS = [{"model": "rig/model", "endpoint": "http://127.0.0.1:9/v1"}]
POST = "POST /api/rollouts"


@pytest.fixture
def tagging(client_of: Any, server: AglServer, clock: Clock) -> Any:
    """The manager's client of the rig's server, with models registered; its `in_flight` is at hand."""
    in_flight = InFlight(run_id="run")
    plain = client_of(server.url).__wrapped__
    client = ServerClient(plain, Patience(300), in_flight)
    client.post_with_retry("/api/models", json=MODELS)
    return SimpleNamespace(client=client, in_flight=in_flight)


def fault_once(server: AglServer, fault: str, request: str) -> None:
    """The next such request meets a fault."""
    left = [fault]
    server.weather.fault = lambda number, seen: left.pop() if left and seen == request else None


def num_models(server: AglServer) -> int:
    """Model endpoints that the server has."""
    from agentlightning.server import store

    return server.call(lambda: sum(map(len, store._models.values())))


@pytest.mark.parametrize("fault", ["unprocessed", "answer lost"])
def test_lost_answer_to_a_creation_creates_nothing_twice(tagging: Any, server: AglServer, fault: str) -> None:
    """Whether or not the failed request was processed, each rollout is there once, and each is noted."""
    fault_once(server, fault, POST)
    requests = [{"input": {"index": i}, "is_train": True, "rollout_id": f"r{i}", "metadata": {}} for i in range(2)]
    created = tagging.client.post_with_retry("/api/rollouts", json=requests).json()
    ids = [record["rollout_id"] for record in created]
    assert [request["rollout_id"] for request in requests] == ids
    assert list(server.rollouts()) == ids == list(tagging.in_flight.tracked)
    assert (ids == ["r0", "r1"]) == (fault == "answer lost")


@pytest.mark.parametrize("fault", ["restart before", "restart after"])
def test_creation_on_a_new_server_has_new_ids_and_finds_its_model(tagging: Any, server: AglServer, fault: str) -> None:
    """The old server may have handed the ids to the controller; and agents that find no model fail."""
    fault_once(server, fault, POST)
    request = {"input": {"index": 0}, "is_train": True, "rollout_id": "old", "metadata": {"mine": 1}}
    tagging.client.post_with_retry("/api/rollouts", json=[request])
    [(rollout_id, rollout)] = server.rollouts().items()
    assert rollout_id == request["rollout_id"] != "old"
    metadata = {"mine": 1, RUN_ID_KEY: "run", REPLACES_KEY: "old"}
    assert rollout.metadata.model_dump(exclude_none=True) == metadata
    assert tagging.in_flight.tracked[rollout_id].request["metadata"] == {"mine": 1}
    assert num_models(server) == 1
    posts = [seen for seen in server.weather.requests if seen.startswith("POST")]
    assert posts[-2:] == ["POST /api/models", POST]


def test_deleted_models_are_not_registered_again(tagging: Any, server: AglServer) -> None:
    """A step deletes its predecessor's endpoints."""
    tagging.client.delete("/api/models")
    tagging.client.register_again()
    fault_once(server, "unprocessed", "GET /proxy/state")
    tagging.client.get("/proxy/state")
    assert num_models(server) == 0


@pytest.mark.parametrize("fault", ["unprocessed", "answer lost"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_lost_answer_to_an_event_posts_it_once(tagging: Any, server: AglServer, fault: str, num_before: int) -> None:
    """An equal event that was known before is no proof; one more than known is."""
    tagging.client.post_with_retry("/api/rollouts", json=[{"input": {}, "rollout_id": "r1"}])
    url, event = "/api/rollouts/r1/attempt/0/events", {"event_type": "reward", "data": {"value": 0.5}}
    kept = [tagging.client.post(url, json=event).json() for _ in range(num_before)]
    tagging.in_flight.tracked["r1"].finished = FinishedRollout(record={}, raw_events=tuple(kept))
    fault_once(server, fault, f"POST {url}")
    answer = tagging.client.post(url, json=event)
    assert answer.status_code == 200
    on_server = tagging.client.get("/api/rollouts/r1/events").json()
    assert len(on_server) == num_before + 1
    assert answer.json() == on_server[-1]
