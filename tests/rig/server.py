"""The real agl-server app, served by uvicorn in a thread on a free loopback port; it can be restarted there."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import uvicorn

from tests.rig.agents import AgentsStuckError, AgentTable, WaitReport
from tests.rig.weather import Weather

T = TypeVar("T")

SERVER_CONFIG = {
    "key": "",
    "default_proxy": {
        "model_name": "rig/model",
        "include_log_probs": True,
        "include_routed_experts": False,
        "train": {"temperature": 1.0},
        "val": {"temperature": 0.7},
    },
}


class AglServer:
    """agl-server plus one extra route, `/rig/wait`, at which a trainer of the rig lets the agents act.

    The store is the server module's own dicts, so one process can hold one server at a time.

    Attributes:
        agents: Survives `restart`, as a controller survives the server.
        weather: What goes wrong between trainer and server.
    """

    def __init__(self, agents: AgentTable | None = None) -> None:
        self.agents = agents or AgentTable()
        self.weather = Weather(_clear_store)
        self.port = 0
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> AglServer:
        """Bind and serve; returns once requests are answered."""
        # With the protocol named, asyncio switches Nagle off; else each answer waits 40 ms for an ACK.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(self._app(), log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._serve, args=(self._server, sock), name="agl-server", daemon=True)
        self._thread.start()
        if not self._server.ready.wait(30):
            raise RuntimeError(f"agl-server did not start on port {self.port}")
        return self

    @staticmethod
    def _serve(server: _Server, sock: socket.socket) -> None:
        try:
            server.run(sockets=[sock])
        finally:
            sock.close()

    def stop(self) -> None:
        """Stop serving and forget everything, as a killed server does."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(30)
        if self._thread.is_alive():
            raise RuntimeError("agl-server did not stop")
        self._server = self._thread = None
        _clear_store()

    def restart(self) -> None:
        """A new server on the same port that knows no rollout."""
        self.stop()
        self.start()

    def reset_store(self) -> None:
        """Forget every rollout and model, as a restart does, in no time; the controller remembers its ids."""
        self.call(_clear_store)

    def reset(self) -> None:
        """Forget the controller too: for the next test."""
        self.reset_store()
        self.agents = AgentTable()
        self.weather.clear_up()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the server's event loop, where the store may be touched."""
        assert self._server is not None, "the server is not running"

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._server.loop).result(30)

    def rollouts(self) -> dict[str, Any]:
        """A copy of the store's table: rollout id -> record."""
        from agentlightning.server import store

        return self.call(lambda: dict(store._rollouts))

    def _app(self) -> Any:
        from agentlightning.server.app import create_app
        from fastapi import HTTPException

        app = create_app(SERVER_CONFIG)

        @app.post("/rig/wait")
        async def wait(report: WaitReport) -> int:
            try:
                return self.agents.act(report)
            except AgentsStuckError as error:
                raise HTTPException(status_code=409, detail=str(error)) from None

        return self.weather.over(app)


class _Server(uvicorn.Server):
    """Tells when it serves, and in which loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, then say so."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.ready.set()


def _clear_store() -> None:
    from agentlightning.server import store

    for table in (store._rollouts, store._events, store._models, store._terminal_order):
        table.clear()
