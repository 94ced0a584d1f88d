"""A paused gateway: waited for until it is empty, and no longer than stale requests are worth."""

from __future__ import annotations

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


class Judge:
    """A judge that answers `result`, and what it was asked and told."""

    def __init__(self, result: bool) -> None:
        self.result = result
        self.asked: list[tuple[int, float]] = []
        self.dates: list[str | None] = []

    def is_drained(self, num_requests: int, waited_s: float) -> bool:
        """Note the question."""
        self.asked.append((num_requests, waited_s))
        return self.result

    def on_answer(self, date_header: str | None) -> None:
        """Note the date."""
        self.dates.append(date_header)


def test_state_passes_while_requests_are_waited_for(clock: SimpleNamespace) -> None:
    """The judge sees the number and the time since the wait began."""
    judge = Judge(False)
    client = DrainClient(Client(Answer({"paused": True, "inflight": 3})), judge, clock.now)
    clock.now += 7
    assert client.get("/proxy/state").json() == {"paused": True, "inflight": 3}
    assert judge.asked == [(3, 7.0)]


def test_state_reads_empty_once_the_judge_accepts(clock: SimpleNamespace) -> None:
    """The trainer's loop ends at 0; everything else of the answer stays."""
    judge = Judge(True)
    answer = Answer({"paused": True, "inflight": 3})
    seen = DrainClient(Client(answer), judge, clock.now).get("/proxy/state", timeout=5)
    assert seen.json() == {"paused": True, "inflight": 0}
    assert seen.status_code == 200
    seen.raise_for_status()
    assert answer.json() == {"paused": True, "inflight": 3}, "the server's own answer is not changed"
    assert judge.asked == [(3, 0.0)]


def test_answer_without_a_number_reads_as_empty(clock: SimpleNamespace) -> None:
    """As the trainer reads it."""
    judge = Judge(True)
    assert DrainClient(Client(Answer({})), judge, clock.now).get("/proxy/state").json() == {"inflight": 0}
    assert judge.asked == [(0, 0.0)]


def test_failed_answer_is_the_trainers_own_business(clock: SimpleNamespace) -> None:
    """It raises for the status; nothing is judged, and nothing is read from the body."""
    judge = Judge(True)
    answer = Answer("<html>", status=502)
    assert DrainClient(Client(answer), judge, clock.now).get("/proxy/state") is answer
    assert judge.asked == []


def test_other_calls_pass_through(clock: SimpleNamespace) -> None:
    """Other paths, other methods, attributes."""
    judge = Judge(True)
    inner = Client(Answer({"inflight": 3}))
    client = DrainClient(inner, judge, clock.now)
    assert client.get("/api/models", params={"a": 1}).json() == {"inflight": 3}
    assert client.post_with_retry("/proxy/pause", json={}) == "posted /proxy/pause {'json': {}}"
    assert client.base_url == "http://server"
    assert judge.asked == []
    assert inner.asked == [("/api/models", {"params": {"a": 1}})]


def test_each_answer_proves_life(clock: SimpleNamespace) -> None:
    """A long wait must not look like a dead trainer."""
    judge = Judge(False)
    client = DrainClient(Client(Answer({}, status=503)), judge, clock.now)
    client.get("/proxy/state")
    client.get("/other")
    assert judge.dates == [DATE, DATE]
