"""The one place that says which server failed, on what, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from agl_async_ckpt.agl import internals
from agl_async_ckpt.exceptions import ServerError, UnknownRolloutError

ADVICE = "The checkpoint is untouched; start again once the server answers."
ANSWER_ERRORS = (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError)
"""What a request and the reading of its answer may raise."""
HINTS = {
    401: " (agentlightning.agl_key is not the server's key?)",
    404: " (was the server restarted? A new start creates again what it has lost)",
}
NO_SERVER = " (is agentlightning.agl_base_url the address of an agl-server?)"
HOPELESS = {
    httpx.UnsupportedProtocol: "agentlightning.agl_base_url must be like http://host:8000",
    httpx.LocalProtocolError: "is agentlightning.agl_key a key?",  # the error itself quotes it
}
"""What no wait can heal, and what to look at."""


def server_error(base_url: object, fact: str, *, act: str = "", kind: type[ServerError] = ServerError) -> ServerError:
    """Return the error of a server.

    Args:
        base_url: Where it is, or should be.
        fact: What it did; goes on after its name.
        act: What to do before the training is started again.
        kind: Class of the error.
    """
    return kind(f"The agl-server at {base_url or '(empty)'} {fact}.", act=f"{act} {ADVICE}".lstrip())


@contextmanager
def named(client: Any, subject: str, deed: str = "failed on") -> Iterator[None]:
    """Turn what a request, or the reading of its answer, may raise into an error that names server and subject.

    Raises:
        UnknownRolloutError: The server does not know the rollout that was asked for.
        ServerError: It refused, or its answer cannot be used.
    """
    try:
        yield
    except ANSWER_ERRORS as error:
        kind = UnknownRolloutError if _misses_rollout(error) else ServerError
        raise server_error(client.base_url, f"{deed} {subject}: {_cause(error)}", kind=kind) from error


def _cause(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        is_elsewhere = error.response.is_redirect or (status == 404 and not _misses_rollout(error))
        return f"HTTP {status}{NO_SERVER if is_elsewhere else HINTS.get(status, '')}"
    if isinstance(error, httpx.HTTPError):
        return f"{type(error).__name__}: {error}"
    return f"its answer is not valid JSON of the expected form ({type(error).__name__}: {error})"


def _misses_rollout(error: Exception) -> bool:
    """Tell whether "not found" is said of a rollout; an agl-server misses nothing else."""
    return (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.status_code == 404
        and internals.rollout_of(str(error.request.url)) is not None
    )
