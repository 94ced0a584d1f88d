"""What the extension asks of the agl-server, with errors that name the server and the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.patience import ADVICE, rollout_of
from agl_async_ckpt.exceptions import ServerError

T = TypeVar("T")

STATES = ("queuing", "running", "succeeded", "failed")
ENDED = ("succeeded", "failed")
REQUEST_TIMEOUT_S = 60.0
# The server lists whole records and knows no offset; its default limit of 500 would cut the list silently.
NO_LIMIT = 1_000_000_000
NUM_DELETE_THREADS = 8

ANSWER_ERRORS = (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError)
"""What a request and the reading of its answer may raise."""
HINTS = {
    401: " (agentlightning.agl_key is not the server's key?)",
    404: " (was the server restarted? A new start creates again what it has lost)",
}
NO_SERVER = " (is agentlightning.agl_base_url the address of an agl-server?)"


class UnknownRolloutError(ServerError):
    """The server does not know a rollout. Caught where the rollout can be created again."""


def list_rollouts(client: Any) -> dict[str, Mapping[str, Any]]:
    """Read every rollout record on the server, by id.

    Raises:
        ServerError: The server refused, or its answer is not a list of records.
    """
    url = f"{internals.ROLLOUTS_URL}?{httpx.QueryParams({'state_in': STATES, 'limit': NO_LIMIT})}"
    return _ask(client, "GET", url, "the list of rollouts", _records)


def delete_rollouts(client: Any, rollout_ids: Iterable[str]) -> None:
    """Delete rollouts; one that is gone already is no error.

    Raises:
        ServerError: Names the rollout.
    """

    def delete(rollout_id: str) -> None:
        _ask(client, "DELETE", f"{internals.ROLLOUTS_URL}/{rollout_id}", f"rollout {rollout_id}", lambda answer: None)

    with ThreadPoolExecutor(NUM_DELETE_THREADS) as pool:
        list(pool.map(delete, rollout_ids))


def create_rollouts(manager: internals.RolloutManager, requests: list[dict[str, Any]]) -> None:
    """Create rollouts under the ids that the requests carry.

    Raises:
        ServerError: Names the first rollout.
    """
    first = requests[0]["rollout_id"]
    try:
        created = internals.post_rollouts(manager, requests)
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
        raise ServerError(
            f"The agl-server at {manager.client.base_url} did not create {len(requests)} rollouts, "
            f"the first is {first}: {_failure(error)}.",
            act=ADVICE,
        ) from error
    if created != [request["rollout_id"] for request in requests]:
        raise ServerError(
            f"The agl-server at {manager.client.base_url} created other rollouts than were posted "
            f"({len(created)} of {len(requests)}; the first posted is {first}).",
            act=ADVICE,
        )


def delete_models(client: Any) -> None:
    """Forget the registered model endpoints: they are a dead trainer's.

    The trainer does the same, but only after it has opened the gateway. A request that slips in between is tried for
    13 s, or hangs if the host has vanished.

    Raises:
        ServerError: The server refused.
    """
    _ask(client, "DELETE", "/api/models", "the registered models", lambda answer: None)


def num_proxied_requests(client: Any) -> int:
    """Model requests that the gateway is forwarding right now.

    Raises:
        ServerError: The server refused, or its answer holds no number.
    """
    return _ask(client, "GET", "/proxy/state", "the gateway's state", lambda state: int(state.get("inflight", 0)))


@contextmanager
def named(client: Any, rollout_id: str) -> Iterator[None]:
    """Turn what a request about a rollout may raise into an error that names server and rollout.

    Raises:
        UnknownRolloutError: It does not know it.
        ServerError: The server refused, or its answer cannot be used.
    """
    try:
        yield
    except ANSWER_ERRORS as error:
        unknown = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 404
        kind = UnknownRolloutError if unknown else ServerError
        raise _server_error(client, f"rollout {rollout_id}", error, kind) from error


def _server_error(client: Any, what: str, error: Exception, kind: type[ServerError] = ServerError) -> ServerError:
    return kind(f"The agl-server at {client.base_url} failed on {what}: {_failure(error)}.", act=ADVICE)


def _ask(client: Any, method: str, url: str, what: str, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of the JSON answer; None stands for an empty one."""
    try:
        response = client.request(method, url, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        return read(response.json() if response.content else None)
    except ANSWER_ERRORS as error:
        raise _server_error(client, what, error) from error


def _failure(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        is_wrong = error.response.is_redirect or (status == 404 and rollout_of(str(error.request.url)) is None)
        return f"HTTP {status}{NO_SERVER if is_wrong else HINTS.get(status, '')}"
    if isinstance(error, httpx.HTTPError):
        return f"{type(error).__name__}: {error}"
    return f"its answer is not valid JSON of the expected form ({type(error).__name__}: {error})"


def _records(answer: Any) -> dict[str, Mapping[str, Any]]:
    """Insist on what a decision rests on: half an answer would have rollouts created again, or deleted."""
    if not isinstance(answer, list):
        raise TypeError(f"{type(answer).__name__} in place of a list")
    return {str(record["rollout_id"]): record for record in map(_checked, answer)}


def _checked(record: Any) -> Mapping[str, Any]:
    rollout_id, status, metadata = record["rollout_id"], record.get("status"), record.get("metadata")
    if not (
        isinstance(status, dict)
        and status.get("state") in STATES
        and all(isinstance(status.get(moment), int | float) for moment in ("created_at", "updated_at"))
    ):
        raise TypeError(f"rollout {rollout_id} has the status {status!r}")
    if not isinstance(metadata, dict | None):
        raise TypeError(f"rollout {rollout_id} has the metadata {metadata!r}")
    return record
