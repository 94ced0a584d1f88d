"""A small HTTP server on loopback that gives the answers it is told to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]


def ok(value: Any) -> Answer:
    """A good answer with a JSON body."""
    return 200, json.dumps(value).encode()


class Double:
    """A small HTTP server: gives `answers` one after another, the last one for ever, and remembers the requests.

    Attributes:
        answers: (status, body) each.
        requests: `METHOD path` of each request.
        bodies: The body of each request.
    """

    def __init__(self, answers: list[Answer], port: int = 0) -> None:
        self.answers = answers
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, answer = double._next(f"{self.command} {self.path}", body)
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 - names that http.server looks for

            def log_message(self, format: str, *args: Any) -> None:
                """Be silent."""

        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def _next(self, request: str, body: bytes) -> Answer:
        with self._lock:
            self.requests.append(request)
            self.bodies.append(body)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
