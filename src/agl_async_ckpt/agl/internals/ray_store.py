"""A request to stop, in Ray's own key-value store: the way from the driver to the trainer.

The trainer is an actor that is busy in `fit()`, so no call reaches it; and the driver may be on a machine that does not
see the output folder, or see it under another path. Both are in the same Ray job.
"""

from __future__ import annotations

import sys
from typing import Any

from agl_async_ckpt.folder.stop_request import StopRequest

_NAMESPACE = b"agl_async_ckpt"


def put_request(request: StopRequest) -> None:
    """Ask the trainers of this Ray job to stop."""
    _store()._internal_kv_put(_key(), request.to_json().encode(), overwrite=True, namespace=_NAMESPACE)


def get_request() -> StopRequest | None:
    """Return what the driver of this Ray job asks for; None if it does not, or outside of Ray."""
    if "ray" not in sys.modules or not _store()._internal_kv_initialized():
        return None
    value = _store()._internal_kv_get(_key(), namespace=_NAMESPACE)
    return None if value is None else StopRequest.from_json(value)


def remove_request() -> None:
    """Forget the request: it was of an earlier training of the same job."""
    if _store()._internal_kv_initialized():
        _store()._internal_kv_del(_key(), namespace=_NAMESPACE)


def _store() -> Any:
    # Ray's libraries (Serve, Train, Jobs) use these functions; a public one for a value per job there is not, and an
    # actor for it would be one more process to start, and to lose.
    from ray.experimental import internal_kv

    return internal_kv


def _key() -> bytes:
    import ray

    return f"stop:{ray.get_runtime_context().get_job_id()}".encode()
