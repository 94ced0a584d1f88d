"""What the extension asks of the agl-server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.server_errors import named, server_error

T = TypeVar("T")

REQUEST_TIMEOUT_S = 60.0
# The server lists whole records and knows no offset; its default limit of 500 would cut the list silently.
NO_LIMIT = 1_000_000_000
NUM_DELETE_THREADS = 8


def list_rollouts(client: Any) -> dict[str, Mapping[str, Any]]:
    """Read every rollout record on the server, by id.

    Raises:
        ServerError: The server refused, or its answer is not a list of records.
    """
    url = f"{internals.ROLLOUTS_URL}?{httpx.QueryParams({'state_in': internals.STATES, 'limit': NO_LIMIT})}"
    return _ask(client, "GET", url, _records)


def delete_rollouts(client: Any, rollout_ids: Iterable[str]) -> None:
    """Delete rollouts; one that is gone already is no error.

    Raises:
        ServerError: Names the rollout.
    """

    def delete(rollout_id: str) -> None:
        _ask(client, "DELETE", f"{internals.ROLLOUTS_URL}/{rollout_id}", lambda answer: None)

    with ThreadPoolExecutor(NUM_DELETE_THREADS) as pool:
        list(pool.map(delete, rollout_ids))


def create_rollouts(manager: internals.RolloutManager, requests: list[dict[str, Any]]) -> None:
    """Create rollouts under the ids that the requests carry.

    Raises:
        ServerError: Names the first rollout.
    """
    client, first = manager.client, requests[0]["rollout_id"]
    with named(client, f"{len(requests)} rollouts, the first is {first}", "did not create"):
        created = internals.post_rollouts(manager, requests)
    if created != [request["rollout_id"] for request in requests]:
        raise server_error(
            client.base_url,
            f"created other rollouts than were posted ({len(created)} of {len(requests)}; the first posted is {first})",
        )


def delete_models(client: Any) -> None:
    """Forget the registered model endpoints: they are a dead trainer's.

    The trainer does the same, but only after it has opened the gateway. A request that slips in between is tried for
    13 s, or hangs if the host has vanished.

    Raises:
        ServerError: The server refused.
    """
    _ask(client, "DELETE", internals.MODELS_URL, lambda answer: None)


def num_proxied_requests(client: Any) -> int:
    """Return how many model requests the gateway is forwarding right now.

    Raises:
        ServerError: The server refused, or its answer holds no number.
    """
    return _ask(client, "GET", internals.GATEWAY_STATE_URL, lambda state: int(state.get(internals.NUM_PROXIED, 0)))


def _ask(client: Any, method: str, url: str, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of the JSON answer; None stands for an empty one."""
    with named(client, internals.subject_of(url)):
        response = client.request(method, url, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        return read(response.json() if response.content else None)


def _records(answer: Any) -> dict[str, Mapping[str, Any]]:
    """Insist on what a decision rests on: half an answer would have rollouts created again, or deleted."""
    if not isinstance(answer, list):
        raise TypeError(f"{type(answer).__name__} in place of a list")
    return {str(record["rollout_id"]): record for record in map(_checked, answer)}


def _checked(record: Any) -> Mapping[str, Any]:
    rollout_id, status, metadata = record["rollout_id"], record.get("status"), record.get("metadata")
    if not (
        isinstance(status, dict)
        and status.get("state") in internals.STATES
        and all(isinstance(status.get(moment), int | float) for moment in ("created_at", "updated_at"))
    ):
        raise TypeError(f"rollout {rollout_id} has the status {status!r}")
    if not isinstance(metadata, dict | None):
        raise TypeError(f"rollout {rollout_id} has the metadata {metadata!r}")
    return record
