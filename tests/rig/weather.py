"""Faults between a trainer and the rig's server, at exactly the request where a test wants them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

FAULTS = {
    "unprocessed": "503, and the request was not processed",
    "answer lost": "processed, but the answer is 502",
    "restart before": "502, and the server that answers next knows nothing",
    "restart after": "processed, then 502, and the server that answers next knows nothing",
    "failover before": "processed by a new server that knows nothing; no request fails",
    "failover after": "processed, and the server that answers next knows nothing; no request fails",
}


@dataclass
class Weather:
    """An ASGI layer over the server's app. Requests of the rig itself pass untouched.

    Attributes:
        forget: What a restart does to the server's memory.
        fault: Called with the number of a request (from 1) and `METHOD path`; names one of `FAULTS`, or None.
        requests: `METHOD path` of all requests.
        num_faults: How many of them met a fault.
    """

    forget: Callable[[], None]
    fault: Callable[[int, str], str | None] = lambda number, request: None
    requests: list[str] = field(default_factory=list[str])
    num_faults: int = 0

    def clear_up(self) -> None:
        """No fault from now on."""
        self.fault = lambda number, request: None
        self.requests, self.num_faults = [], 0

    def over(self, app: Any) -> Any:
        """Return `app` under this weather."""

        async def weathered(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
            if scope["type"] != "http" or scope["path"].startswith("/rig/"):
                await app(scope, receive, send)
                return
            request = f"{scope['method']} {scope['path']}"
            self.requests.append(request)
            fault = self.fault(len(self.requests), request)
            assert fault is None or fault in FAULTS
            self.num_faults += fault is not None

            def restart() -> None:
                self.forget()
                app.state.proxy_pause_state.paused = False

            if fault in ("restart before", "failover before"):
                restart()
            if fault in ("unprocessed", "restart before"):
                await _answer(send, 503 if fault == "unprocessed" else 502)
                return
            lost = fault in ("answer lost", "restart after")
            await app(scope, receive, _nowhere if lost else send)
            if fault in ("restart after", "failover after"):
                restart()
            if lost:
                await _answer(send, 502)

        return weathered


async def _nowhere(message: Any) -> None:
    """The answer is lost."""


async def _answer(send: Callable[[Any], Awaitable[None]], status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
