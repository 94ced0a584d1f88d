"""The rollout managers of agent-lightning, extended for in-flight rollouts.

Requests are noted and tagged as they are posted; a rollout that lives in the checkpoint only is served from there; the
events of one that has ended are kept; one that met no trainer, as far as can be seen, is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from agl_async_ckpt import capture
from agl_async_ckpt.in_flight import agl_server
from agl_async_ckpt.in_flight.carry_over import InFlight
from agl_async_ckpt.in_flight.kept_events import append_event, is_answer, kept_events, measured, with_events


class TaggingClient(wrapt.ObjectProxy):
    """The manager's HTTP client: rollouts it creates are noted and carry the run id, and each answer proves life."""

    def __init__(
        self,
        wrapped: Any,
        in_flight: InFlight,
        created: Callable[[Any], None],
        alive: Callable[[str | None], None],
    ) -> None:
        super().__init__(wrapped)
        self._self_in_flight = in_flight
        self._self_created = created
        self._self_alive = alive

    def post_with_retry(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """Post as the wrapped client does."""
        if url != capture.ROLLOUTS_URL:
            return self.__wrapped__.post_with_retry(url, *args, **kwargs)
        kwargs["json"] = self._self_in_flight.outgoing(kwargs["json"])
        response = self.__wrapped__.post_with_retry(url, *args, **kwargs)
        self._self_created(response)
        return response

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Get as the wrapped client does."""
        response = self.__wrapped__.get(*args, **kwargs)
        self._self_alive(response.headers.get("date"))
        return response


def extended_manager(
    manager_cls: type,
    in_flight: InFlight,
    *,
    before_models: Callable[[], None],
    settle: Callable[[Any], None],
    rerun: Callable[[Any, str], str],
    created: Callable[[Any], None],
    alive: Callable[[str | None], None],
) -> type:
    """Return a subclass of a manager class that works for `in_flight`.

    Args:
        manager_cls: Subclass of agent-lightning's `AglRolloutManagerBase`.
        in_flight: What is known of the training rollouts.
        before_models: Called when the old models are deleted and ours are not registered yet.
        settle: Called with the manager each time its models are registered, before anything is enqueued or awaited.
        rerun: Creates a rollout again; called with the manager and the old id, returns the new one.
        created: Called with the server's answer to each creation of rollouts.
        alive: Called with the `Date` header of each answer of the server.
    """

    class InFlightRolloutManager(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.client = TaggingClient(self.client, in_flight, created, alive)

        def register_model(self, server_addresses: list[str]) -> Any:
            before_models()
            models = super().register_model(server_addresses)
            settle(self)
            return models

        def _get_rollout(self, rollout_id: str) -> Any:
            known = in_flight.tracked.get(rollout_id)
            if known is not None and known.served and known.finished is not None:
                return capture.rollout_record(known.finished.record)
            with agl_server.named(self.client, rollout_id):
                rollout = super()._get_rollout(rollout_id)
            if known is None or not capture.has_ended(rollout):
                return rollout
            if known.crossed_gap:
                if capture.has_failed(rollout) or not self._has_answer(rollout_id):
                    return self._get_rollout(rerun(self, rollout_id))
                known.crossed_gap = False
            if in_flight.keep_events and self._train_rollout_n > 1 and in_flight.wants_events(rollout_id):
                raw, triplets = self._fetch_rollout_events(rollout_id)
                in_flight.keep(rollout_id, *measured(rollout, raw, triplets))
            return rollout

        def _has_answer(self, rollout_id: str) -> bool:
            events = self._get_events(rollout_id, event_type="model_request")
            return any(is_answer(event.data) for event in events)

        def _get_events(self, rollout_id: str, **kwargs: Any) -> list[Any]:
            known = in_flight.tracked.get(rollout_id)
            if known is not None and known.served and known.finished is not None:
                return kept_events(known.finished, **kwargs)
            with agl_server.named(self.client, rollout_id):
                return super()._get_events(rollout_id, **kwargs)

        def _post_event(self, rollout_id: str, attempt_id: str, event: Any) -> Any:
            known = in_flight.tracked.get(rollout_id)
            served = known is not None and known.served
            posted = None if served else super()._post_event(rollout_id, attempt_id, event)
            if known is not None and known.finished is not None:
                posted = posted or append_event(rollout_id, attempt_id, event)
                known.finished = with_events(known.finished, posted)
            return posted

        def _delete_rollout(self, rollout_id: str) -> None:
            known = in_flight.tracked.get(rollout_id)
            if known is None or not known.served:
                super()._delete_rollout(rollout_id)

    InFlightRolloutManager.__name__ = manager_cls.__name__
    InFlightRolloutManager.__qualname__ = manager_cls.__qualname__
    return InFlightRolloutManager
