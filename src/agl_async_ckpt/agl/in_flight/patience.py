"""Waiting for an agl-server that is away, or that answers errors, without doing anything twice.

A request that failed is sent again, with back-off, until the server answers or `server_wait_s` is over. Whoever sends
it is told whether an earlier try may have been processed all the same, its answer lost: most requests of a trainer may
be repeated, creating rollouts and posting events may not.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import wrapt
from httpx_retries import Retry

from agl_async_ckpt.exceptions import ServerError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 15.0
PASSING_STATUS = (429, 500, 502, 503, 504)
"""Answers of a server, or of something before it, that may be another one soon."""
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
HOPELESS = {
    httpx.UnsupportedProtocol: "agentlightning.agl_base_url must be like http://host:8000",
    httpx.LocalProtocolError: "is agentlightning.agl_key a key?",  # the error itself quotes it
}
"""What no wait can heal, and what to look at."""
ADVICE = "The checkpoint is untouched; start again once the server answers."
SUBJECTS = (
    (r"/api/rollouts/([^/?]+)/", "the events of rollout {}"),
    (r"/api/rollouts/([^/?]+)$", "rollout {}"),
    (r"/api/rollouts\?", "the list of rollouts"),
    (r"/api/rollouts$", "the creation of rollouts"),
    (r"/api/models", "the registered models"),
    (r"/proxy/", "the gateway's state"),
)


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
        self, wait_s: float, ended: Callable[[], None] = lambda: None, waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Wait at most `wait_s` for one answer.

        Args:
            wait_s: Seconds.
            ended: Called when the server answers again.
            waiting: Called before each try; what it raises ends the wait.
        """
        self._wait_s = wait_s
        self._ended = ended
        self._waiting = waiting
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
            what: Is waited for.
            attempt: Sends the request.

        Raises:
            ServerError: There was none for `wait_s`, or there can be none. The next request is then tried once: whoever
                swallows the error does not wait again.
        """
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        again = maybe_processed = False
        while True:
            self._waiting()
            try:
                response = attempt(again, maybe_processed)
            except (httpx.TransportError, PassingAnswer) as error:
                failure: Failure = error
            else:
                self._answered(base_url)
                self.has_answered = self.has_answered or response.is_success
                return response
            if type(failure) in HOPELESS:
                raise ServerError(
                    f"The agl-server at {base_url or '(empty)'} cannot be asked for {what} "
                    f"({HOPELESS[type(failure)]}).",
                    act=ADVICE,
                ) from None
            again, maybe_processed = True, maybe_processed or not isinstance(failure, NEVER_SENT)
            cause = _cause(failure)
            left_s = began + self._wait_s - time.monotonic()
            self._failed(began, cause, f"The agl-server at {base_url} is not reachable ({cause}): waiting", left_s)
            if left_s <= 0 or self._given_up:
                self._given_up = True
                raise ServerError(
                    f"The agl-server at {base_url} was not reachable for {self._wait_s:g} s ({cause}), waiting for "
                    f"{what}.",
                    act=ADVICE,
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
        self._ended()


class PatientClient(wrapt.ObjectProxy):
    """agent-lightning's client of the server, whose requests wait for an answer."""

    def __init__(self, wrapped: Any, patience: Patience) -> None:
        super().__init__(wrapped)
        self._self_patience = patience

    def request(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        """Send a request; see `Patience.send`.

        Raises:
            ServerError: No answer within `server_wait_s`.
        """

        def attempt(again: bool, maybe_processed: bool) -> httpx.Response:
            if again:
                self._before_another_try(url)
            return self._once(method, url, **kwargs)

        return self._patiently(url, attempt)

    def get(self, url: str, **kwargs: Any) -> httpx.Response:
        """As the wrapped client's, without its own retries."""
        return self.request("GET", url, **kwargs)

    def delete(self, url: str, **kwargs: Any) -> httpx.Response:
        """Deleting is repeatable."""
        return self.request("DELETE", url, **kwargs)

    def post(self, url: str, **kwargs: Any) -> httpx.Response:
        """Post something that may be repeated."""
        return self.request("POST", url, **kwargs)

    def post_with_retry(self, url: str, **kwargs: Any) -> httpx.Response:
        """Post something that may be repeated.

        Raises:
            httpx.HTTPStatusError: The server refuses it; asking again would not help.
        """
        return self.post(url, **kwargs).raise_for_status()

    def _patiently(self, url: str, attempt: Attempt) -> httpx.Response:
        return self._self_patience.send(self.base_url, subject_of(str(url)), attempt)

    def _before_another_try(self, url: str) -> None:
        """The server may be a new one."""

    def _once(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        """Send once, past the retries of the transport.

        Raises:
            httpx.TransportError, PassingAnswer: The server may answer another time.
        """
        response = self.__wrapped__.request(method, url, extensions={"retry": Retry(total=0)}, **kwargs)
        if response.status_code in PASSING_STATUS or self._is_foreign_404(str(url), response):
            raise PassingAnswer(response)
        return response

    def _is_foreign_404(self, url: str, response: httpx.Response) -> bool:
        """Whether "not found" was said by something before a server that has gone; else the address is wrong."""
        if response.status_code != 404 or not is_foreign_404(url, response):
            return False
        return rollout_of(url) is not None or self._self_patience.has_answered


def subject_of(url: str) -> str:
    """Say what a request is about."""
    for pattern, text in SUBJECTS:
        found = re.search(pattern, url)
        if found:
            return text.format(*found.groups())
    return f"an answer to {url}"


def rollout_of(url: str) -> str | None:
    """The rollout that a URL names."""
    found = re.search(r"/api/rollouts/([^/?]+)", url)
    return found and found[1]


def is_foreign_404(url: str, response: httpx.Response) -> bool:
    """Whether "not found" was said by something before the server.

    The server misses nothing but rollouts, and names them in the detail of a JSON answer. An error page may name the
    whole URL, too.
    """
    rollout_id = rollout_of(url)
    try:
        detail: Any = response.json()["detail"]
    except (ValueError, TypeError, KeyError):
        detail = ""
    return rollout_id is None or rollout_id not in str(detail)


def _cause(failure: Failure) -> str:
    return str(failure) if isinstance(failure, PassingAnswer) else f"{type(failure).__name__}: {failure}"
