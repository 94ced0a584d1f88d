"""Bound the wait for a paused gateway: requests to a dead trainer's model endpoint must not hold up the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import wrapt

STATE_URL = "/proxy/state"
NUM_IN_FLIGHT = "inflight"


class DrainClient(wrapt.ObjectProxy):
    """The trainer's client while it waits in `_pause_and_drain_gateway`.

    The trainer loops until the gateway reports no request in flight, with no end. Once `drained` accepts what is left,
    this client reports none.
    """

    def __init__(
        self, wrapped: Any, drained: Callable[[int, float], bool], alive: Callable[[str | None], None]
    ) -> None:
        """Wrap a client.

        Args:
            wrapped: The trainer's client.
            drained: Called with the number of requests in flight and the seconds waited.
            alive: Called with the `Date` header of each answer.
        """
        super().__init__(wrapped)
        self._self_drained = drained
        self._self_alive = alive
        self._self_started_at = time.monotonic()

    def get(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """Get as the wrapped client does; the gateway's state as judged."""
        response = self.__wrapped__.get(url, *args, **kwargs)
        self._self_alive(response.headers.get("date"))
        if url != STATE_URL or not response.is_success:
            return response
        state = response.json()
        if self._self_drained(int(state.get(NUM_IN_FLIGHT, 0)), time.monotonic() - self._self_started_at):
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
