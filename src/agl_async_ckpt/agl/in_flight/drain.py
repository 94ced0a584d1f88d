"""Bound the wait for a paused gateway: requests to a dead trainer's model endpoint must not hold up the step."""

from __future__ import annotations

import time
from typing import Any, Protocol

import wrapt

STATE_URL = "/proxy/state"
NUM_IN_FLIGHT = "inflight"


class Judge(Protocol):
    """Who tells what a drain means."""

    def is_drained(self, num_requests: int, waited_s: float) -> bool:
        """Tell whether the gateway counts as drained, with `num_requests` in flight after `waited_s` seconds."""
        ...

    def on_answer(self, date_header: str | None) -> None:
        """Take the `Date` header of each answer."""
        ...


class DrainClient(wrapt.ObjectProxy):
    """The trainer's client while it waits in `_pause_and_drain_gateway`.

    The trainer loops until the gateway reports no request in flight, with no end. Once the judge accepts what is left,
    this client reports none.
    """

    def __init__(self, wrapped: Any, judge: Judge, began_at: float) -> None:
        """Wrap a client; `began_at` is when the drain began, by the monotonic clock."""
        super().__init__(wrapped)
        self._self_judge = judge
        self._self_began_at = began_at

    def get(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """Get as the wrapped client does; the gateway's state as judged."""
        response = self.__wrapped__.get(url, *args, **kwargs)
        self._self_judge.on_answer(response.headers.get("date"))
        if url != STATE_URL or not response.is_success:
            return response
        state = response.json()
        if self._self_judge.is_drained(int(state.get(NUM_IN_FLIGHT, 0)), time.monotonic() - self._self_began_at):
            return _Answer(response, {**state, NUM_IN_FLIGHT: 0})
        return response


class _Answer(wrapt.ObjectProxy):
    """A response with another JSON body."""

    def __init__(self, wrapped: Any, body: dict[str, Any]) -> None:
        super().__init__(wrapped)
        self._self_body = body

    def json(self) -> dict[str, Any]:
        """Return the other body."""
        return self._self_body
