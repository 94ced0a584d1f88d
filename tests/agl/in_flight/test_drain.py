"""A paused gateway: its state reads as empty once what is left in it is accepted."""

from __future__ import annotations

from typing import Any

import httpx

from agl_async_ckpt.agl.in_flight.carry_over import InFlight
from agl_async_ckpt.agl.in_flight.patience import Patience
from agl_async_ckpt.agl.in_flight.server_client import ServerClient

DATE = "Tue, 14 Nov 2023 22:13:20 GMT"


class Server:
    """Answers every request with one body.

    Attributes:
        asked: Method and path of each request.
        judged: What its client asks the judge, who answers `accepts`.
        dates: What its client tells of the answers.
        client: A client of this server.
    """

    def __init__(self, body: Any, status: int = 200, *, accepts: bool = True) -> None:
        self.body, self.status, self.accepts = body, status, accepts
        self.asked: list[str] = []
        self.judged: list[int] = []
        self.dates: list[str | None] = []
        plain = httpx.Client(base_url="http://server", transport=httpx.MockTransport(self._answer))
        self.client = ServerClient(
            plain, Patience(0), InFlight(), on_answer=self.dates.append, accepts_drain=self._judge
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        return httpx.Response(self.status, headers={"date": DATE}, json=self.body)

    def _judge(self, num_requests: int) -> bool:
        self.judged.append(num_requests)
        return self.accepts


def test_state_passes_while_requests_are_waited_for() -> None:
    """The judge sees the number."""
    server = Server({"paused": True, "inflight": 3}, accepts=False)
    assert server.client.get("/proxy/state").json() == {"paused": True, "inflight": 3}
    assert server.judged == [3]


def test_state_reads_empty_once_the_judge_accepts() -> None:
    """The trainer's loop ends at 0; everything else of the answer stays."""
    server = Server({"paused": True, "inflight": 3})
    seen = server.client.get("/proxy/state", timeout=5)
    assert seen.json() == {"paused": True, "inflight": 0}
    assert seen.status_code == 200
    seen.raise_for_status()
    assert server.judged == [3]


def test_answer_without_a_number_reads_as_empty() -> None:
    """As the trainer reads it."""
    server = Server({})
    assert server.client.get("/proxy/state").json() == {"inflight": 0}
    assert server.judged == [0]


def test_failed_answer_is_the_trainers_own_business() -> None:
    """It raises for the status; nothing is judged, and nothing is read from the body."""
    server = Server("<html>", status=409)
    assert server.client.get("/proxy/state").status_code == 409
    assert server.judged == []


def test_other_calls_pass_through() -> None:
    """Other paths, other methods, attributes."""
    server = Server({"inflight": 3})
    assert server.client.get("/api/models", params={"a": 1}).json() == {"inflight": 3}
    assert server.client.post_with_retry("/proxy/pause", json={}).json() == {"inflight": 3}
    assert server.client.base_url == "http://server"
    assert server.judged == []
    assert server.asked == ["GET /api/models", "POST /proxy/pause"]


def test_each_answer_proves_life() -> None:
    """A long wait must not look like a dead trainer."""
    server = Server({}, status=409)
    server.client.get("/proxy/state")
    server.client.get("/other")
    assert server.dates == [DATE, DATE]
