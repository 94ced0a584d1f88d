"""A paused gateway: waited for until it is empty, and no longer than stale requests are worth."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt.agl.in_flight import drain
from agl_async_ckpt.agl.in_flight.drain import DrainClient

DATE = "Tue, 14 Nov 2023 22:13:20 GMT"


class Answer:
    """As much of an HTTP answer as the wait looks at."""

    def __init__(self, body: Any, status: int = 200) -> None:
        self.body, self.status_code, self.headers = body, status, {"date": DATE}
        self.is_success = status < 400

    def json(self) -> Any:
        """The body."""
        return self.body

    def raise_for_status(self) -> None:
        """As httpx does."""
        if not self.is_success:
            raise RuntimeError(f"HTTP {self.status_code}")


class Client:
    """The trainer's client; answers what it is told to."""

    base_url = "http://server"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def get(self, url: str, **kwargs: Any) -> Answer:
        """Note the question."""
        self.asked.append((url, kwargs))
        return self.answer

    def post_with_retry(self, url: str, **kwargs: Any) -> str:
        """Anything else that the trainer calls."""
        return f"posted {url} {kwargs}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module's clock, moved by hand."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def ignore(date_header: str | None) -> None:
    """Nobody to tell."""


def recorder(result: bool) -> tuple[list[tuple[int, float]], Callable[[int, float], bool]]:
    """A judge that answers `result`, and what it was asked."""
    asked: list[tuple[int, float]] = []

    def drained(num_in_flight: int, waited_s: float) -> bool:
        asked.append((num_in_flight, waited_s))
        return result

    return asked, drained


def test_state_passes_while_requests_are_waited_for(clock: SimpleNamespace) -> None:
    """The judge sees the number and the time since the wait began."""
    asked, drained = recorder(False)
    client = DrainClient(Client(Answer({"paused": True, "inflight": 3})), drained, ignore)
    clock.now += 7
    assert client.get("/proxy/state").json() == {"paused": True, "inflight": 3}
    assert asked == [(3, 7.0)]


def test_state_reads_empty_once_the_judge_accepts(clock: SimpleNamespace) -> None:
    """The trainer's loop ends at 0; everything else of the answer stays."""
    asked, drained = recorder(True)
    answer = Answer({"paused": True, "inflight": 3})
    seen = DrainClient(Client(answer), drained, ignore).get("/proxy/state", timeout=5)
    assert seen.json() == {"paused": True, "inflight": 0}
    assert seen.status_code == 200
    seen.raise_for_status()
    assert answer.json() == {"paused": True, "inflight": 3}, "the server's own answer is not changed"
    assert asked == [(3, 0.0)]


def test_answer_without_a_number_reads_as_empty(clock: SimpleNamespace) -> None:
    """As the trainer reads it."""
    asked, drained = recorder(True)
    assert DrainClient(Client(Answer({})), drained, ignore).get("/proxy/state").json() == {"inflight": 0}
    assert asked == [(0, 0.0)]


def test_failed_answer_is_the_trainers_own_business(clock: SimpleNamespace) -> None:
    """It raises for the status; nothing is judged, and nothing is read from the body."""
    asked, drained = recorder(True)
    answer = Answer("<html>", status=502)
    assert DrainClient(Client(answer), drained, ignore).get("/proxy/state") is answer
    assert asked == []


def test_other_calls_pass_through(clock: SimpleNamespace) -> None:
    """Other paths, other methods, attributes."""
    asked, drained = recorder(True)
    inner = Client(Answer({"inflight": 3}))
    client = DrainClient(inner, drained, ignore)
    assert client.get("/api/models", params={"a": 1}).json() == {"inflight": 3}
    assert client.post_with_retry("/proxy/pause", json={}) == "posted /proxy/pause {'json': {}}"
    assert client.base_url == "http://server"
    assert asked == []
    assert inner.asked == [("/api/models", {"params": {"a": 1}})]


def test_each_answer_proves_life(clock: SimpleNamespace) -> None:
    """A long wait must not look like a dead trainer."""
    dates: list[str | None] = []
    client = DrainClient(Client(Answer({}, status=503)), recorder(False)[1], dates.append)
    client.get("/proxy/state")
    client.get("/other")
    assert dates == [DATE, DATE]


# --- the judge ----------------------------------------------------------------------------------------------------


def session(num_stale: int, drain_wait_s: float = 120.0) -> Any:
    """A session that saw `num_stale` requests before any model of ours was registered."""
    from agl_async_ckpt.agl.session import Session
    from agl_async_ckpt.config import AsyncCheckpointConfig

    built = object.__new__(Session)
    built.config = AsyncCheckpointConfig(drain_wait_s=drain_wait_s)
    built._num_stale_requests = num_stale
    return built


def test_empty_gateway_is_drained_at_once() -> None:
    """Whatever was stale before."""
    assert session(0).drained(0, 0.0)
    assert session(5).drained(0, 0.0)


def test_requests_of_this_life_are_always_waited_for() -> None:
    """However long: the weights change under them otherwise, and agent-lightning waits too."""
    assert not session(0).drained(1, 1e6)
    assert not session(3).drained(4, 1e6)


def test_stale_requests_are_left_alone_after_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    """They hang at an endpoint that is gone; before the wait is over they may still come back."""
    assert not session(3).drained(3, 119.9)
    assert caplog.messages == []
    assert session(3).drained(3, 120.0)
    assert caplog.messages == [
        "Going on after 120 s with 3 model requests in the gateway that went to the dead trainer's endpoint."
    ]
    assert session(3, drain_wait_s=0).drained(2, 0.0)


def test_later_steps_do_not_wait_that_long_again(caplog: pytest.LogCaptureFixture) -> None:
    """A request that hangs for half an hour costs the wait once, and each later step a few seconds."""
    judge = session(3)
    with caplog.at_level(logging.INFO, "agl_async_ckpt"):
        assert judge.drained(3, 120.0)
        assert not judge.drained(3, 4.9)
        assert judge.drained(3, 5.0)
        assert not judge.drained(4, 1e6), "one is ours"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    quick = session(3, drain_wait_s=1.0)
    assert quick.drained(3, 1.0)
    assert quick.drained(3, 1.0)


def test_stale_requests_that_ended_are_not_stale_again() -> None:
    """The smallest count seen is the bound: a later one of the same size holds requests of this life."""
    judge = session(3)
    assert not judge.drained(3, 10.0)
    assert not judge.drained(1, 20.0)
    assert not judge.drained(2, 200.0), "one of the two is ours"
    assert judge.drained(1, 200.0)
    assert judge.drained(0, 0.0)
    assert not judge.drained(1, 1e6), "none is left"
