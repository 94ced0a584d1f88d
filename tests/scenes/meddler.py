"""A proxy in front of agl-server that answers some requests itself: a server, or something before it, gone wrong."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Meddler(ThreadingHTTPServer):
    """Passes requests on, except those that a rule names. Use as a context.

    Args:
        target: Base URL of the real server.

    Attributes:
        rules: `METHOD path-pattern` -> (status, body) of the answer in its place.
    """

    daemon_threads = True

    def __init__(self, target: str) -> None:
        self.rules: dict[str, tuple[int, str]] = {}
        meddler = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, text = self._ruled() or self._passed_on(body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status != 204:
                    self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that the base class calls

            def _ruled(self) -> tuple[int, bytes] | None:
                for rule, (status, text) in meddler.rules.items():
                    if re.fullmatch(rule, f"{self.command} {self.path}"):
                        return status, text.encode()
                return None

            def _passed_on(self, body: bytes) -> tuple[int, bytes]:
                request = urllib.request.Request(target + self.path, body or None, method=self.command)
                for name in ("Authorization", "Content-Type"):
                    if self.headers.get(name):
                        request.add_header(name, self.headers[name])
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                try:
                    with opener.open(request, timeout=60) as response:
                        return response.status, response.read()
                except urllib.error.HTTPError as error:
                    with error:
                        return error.code, error.read()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, name="meddler", daemon=True)

    def __enter__(self) -> Meddler:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self._thread.join(30)
        self.server_close()
