"""Waiting for an agl-server that is away, or that answers errors, without doing anything twice.

A request that failed is sent again, with back-off, until the server answers or `server_wait_s` is over. Whoever sends
it is told whether an earlier try may have been processed all the same, its answer lost: most requests of a trainer may
be repeated, creating rollouts and posting events may not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx

from agl_async_ckpt.agl.in_flight.server_errors import HOPELESS, server_error

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 15.0
PASSING_STATUS = (429, 500, 502, 503, 504)
"""Answers of a server, or of something before it, that may be another one soon."""
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class PassingAnswer(Exception):  # noqa: N818 - never leaves this package
    """An answer that may be another one soon."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"HTTP {response.status_code}")


Failure = httpx.TransportError | PassingAnswer
Attempt = Callable[[bool, bool], httpx.Response]
"""Sends a request; takes whether it is sent again, and whether an earlier try may have been processed."""


class Patience:
    """How long one trainer waits for its server, and what it has waited since it last said so. For many threads."""

    def __init__(
        self,
        wait_s: float,
        on_return: Callable[[], None] = lambda: None,
        before_try: Callable[[], None] = lambda: None,
        *,
        answer_s: float | None = None,
    ) -> None:
        """Wait at most `wait_s` for one answer.

        Args:
            wait_s: Seconds.
            on_return: Called when the server answers again.
            before_try: Called before each try; what it raises ends the wait.
            answer_s: Seconds that one try may take; None leaves it to whoever asks.
        """
        self._wait_s = wait_s
        self._on_return = on_return
        self._before_try = before_try
        self.answer_s = answer_s
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._cause = ""
        self._given_up = False
        self.has_answered = False
        """The server has answered as one should: it is there, and its address is right."""
        self._untold: tuple[object, float, str] | None = None

    def send(self, base_url: object, what: str, attempt: Attempt) -> httpx.Response:
        """Return the first answer that is not a passing one.

        Args:
            base_url: Of the server, for messages.
            what: Names what is waited for.
            attempt: Sends the request.

        Raises:
            ServerError: There was none for `wait_s`, or there can be none. The next request is then tried once: whoever
                swallows the error does not wait again.
        """
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        again = maybe_processed = False
        while True:
            self._before_try()
            try:
                response = attempt(again, maybe_processed)
            except (httpx.TransportError, PassingAnswer) as error:
                failure: Failure = error
            else:
                self._answered(base_url)
                self.has_answered = self.has_answered or response.is_success
                return response
            if type(failure) in HOPELESS:
                raise server_error(base_url, f"cannot be asked for {what} ({HOPELESS[type(failure)]})") from None
            again, maybe_processed = True, maybe_processed or not isinstance(failure, NEVER_SENT)
            cause = _cause(failure)
            left_s = began + self._wait_s - time.monotonic()
            self._failed(began, cause, f"The agl-server at {base_url} is not reachable ({cause}): waiting", left_s)
            if left_s <= 0 or self._given_up:
                self._given_up = True
                raise server_error(
                    base_url, f"was not reachable for {self._wait_s:g} s ({cause}), waiting for {what}"
                ) from failure
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def take_absence(self) -> str | None:
        """Return how long the server was away and why, in words, once; None if it was not since the last call."""
        with self._lock:
            untold, self._untold = self._untold, None
        if untold is None:
            return None
        base_url, seconds, cause = untold
        return f"The agl-server at {base_url} was away for {seconds:.1f} s ({cause})"

    def _failed(self, began: float, cause: str, text: str, left_s: float) -> None:
        with self._lock:
            if self._away_since is not None or self._given_up:
                return
            self._away_since, self._cause = began, cause
        if left_s > 0:
            log.warning("%s up to %.0f s.", text, left_s)

    def _answered(self, base_url: object) -> None:
        with self._lock:
            self._given_up = False
            if self._away_since is None:
                return
            before = self._untold[1] if self._untold else 0.0
            self._untold = base_url, before + time.monotonic() - self._away_since, self._cause
            self._away_since = None
        self._on_return()


def _cause(failure: Failure) -> str:
    return str(failure) if isinstance(failure, PassingAnswer) else f"{type(failure).__name__}: {failure}"
