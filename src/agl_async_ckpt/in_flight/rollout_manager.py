"""The rollout managers of agent-lightning, extended for in-flight rollouts.

Requests are noted and tagged as they are posted; the events of a rollout that has ended are kept; one that the server
no longer has is served from there; one that met no trainer, as far as can be seen, is run again, and so is one that the
server has lost before its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.exceptions import ServerError
from agl_async_ckpt.in_flight import agl_server
from agl_async_ckpt.in_flight.carry_over import InFlight, Tracked
from agl_async_ckpt.in_flight.kept_events import append_event, is_answer, kept_events, measured, with_events
from agl_async_ckpt.in_flight.patience import Patience
from agl_async_ckpt.in_flight.tagging_client import TaggingClient

MAX_LOSSES = 5
"""How often a rollout may be unknown right after it was created again: two servers behind one address never agree."""


def extended_manager(
    manager_cls: type,
    in_flight: InFlight,
    patience: Patience,
    *,
    before_models: Callable[[], None],
    settle: Callable[[Any], None],
    rerun: Callable[[Any, str], str],
    lost: Callable[[Any, str], str],
    found: Callable[[], None],
    created: Callable[[Any], None],
    alive: Callable[[str | None], None],
) -> type:
    """Return a subclass of a manager class that works for `in_flight`.

    Args:
        manager_cls: Subclass of agent-lightning's `AglRolloutManagerBase`.
        in_flight: What is known of the rollouts.
        patience: With which the server is waited for.
        before_models: Called when the old models are deleted and ours are not registered yet.
        settle: Called with the manager each time its models are registered, before anything is enqueued or awaited.
        rerun: Creates a rollout again; called with the manager and the old id, returns the new one.
        lost: Deals with a server that does not know a rollout; called likewise, returns the id that it has now.
        found: Called when the server has shown that it knows a rollout.
        created: Called with the server's answer to each creation of rollouts.
        alive: Called with the `Date` header of each answer of the server.
    """

    class InFlightRolloutManager(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.client = TaggingClient(self.client, patience, in_flight, created, alive)
            self.enqueued: list[Any] = []
            self._looks = False

        def register_model(self, server_addresses: list[str]) -> Any:
            before_models()
            models = super().register_model(server_addresses)
            settle(self)
            return models

        def _create_rollouts(self, *args: Any, **kwargs: Any) -> Any:
            self.enqueued = super()._create_rollouts(*args, **kwargs)
            return self.enqueued

        def _get_rollout(self, rollout_id: str) -> Any:
            for _ in range(MAX_LOSSES):
                known = in_flight.tracked.get(rollout_id)
                if known is not None and known.served and known.finished is not None:
                    return capture.rollout_record(known.finished.record)
                self._looks = True
                try:
                    return self._look_at(rollout_id, known)
                except agl_server.UnknownRolloutError:
                    if known is None:
                        raise
                finally:
                    self._looks = False
                rollout_id = lost(self, rollout_id)
            raise ServerError(
                f"The agl-server at {self.client.base_url} did not know rollout {rollout_id} right after it was "
                f"created, {MAX_LOSSES} times.\nOne server has to answer all requests at this address. "
                f"{agl_server.ADVICE}"
            )

        def _look_at(self, rollout_id: str, known: Tracked | None) -> Any:
            with agl_server.named(self.client, rollout_id):
                rollout = super()._get_rollout(rollout_id)
            found()
            if known is None or not capture.has_ended(rollout):
                return rollout
            if known.crossed_gap:
                if capture.has_failed(rollout) or not self._has_answer(rollout_id):
                    return self._get_rollout(rerun(self, rollout_id))
                known.crossed_gap = False
            if in_flight.wants_events(rollout_id):
                raw, triplets = self._fetch_rollout_events(rollout_id)
                in_flight.keep(rollout_id, *measured(rollout, raw, triplets))
                # Nobody waits for a sibling: what comes now reads the same events.
                known.is_complete = self._train_rollout_n == 1 or not known.is_train
            return rollout

        def _has_answer(self, rollout_id: str) -> bool:
            events = self._get_events(rollout_id, event_type="model_request")
            return any(is_answer(event.data) for event in events)

        def _get_events(self, rollout_id: str, **kwargs: Any) -> list[Any]:
            known = in_flight.tracked.get(rollout_id)
            if known is not None and known.finished is not None and (known.served or known.is_complete):
                return kept_events(known.finished, **kwargs)
            try:
                with agl_server.named(self.client, rollout_id):
                    return super()._get_events(rollout_id, **kwargs)
            except agl_server.UnknownRolloutError:
                if self._looks or known is None or known.finished is None:
                    raise
                known.served = True
                return kept_events(known.finished, **kwargs)

        def _post_event(self, rollout_id: str, attempt_id: str, event: Any) -> Any:
            known = in_flight.tracked.get(rollout_id)
            posted = None
            if known is None or not known.served:
                try:
                    with agl_server.named(self.client, rollout_id):
                        posted = super()._post_event(rollout_id, attempt_id, event)
                except agl_server.UnknownRolloutError:
                    if known is None or known.finished is None:
                        raise
                    known.served = True
            if known is not None and known.finished is not None:
                posted = posted or append_event(rollout_id, attempt_id, event)
                known.finished = with_events(known.finished, posted)
            return posted

        def _delete_rollout(self, rollout_id: str) -> None:
            known = in_flight.tracked.get(rollout_id)
            if known is None or not known.served:
                super()._delete_rollout(rollout_id)
            in_flight.forget(rollout_id)

    InFlightRolloutManager.__name__ = manager_cls.__name__
    InFlightRolloutManager.__qualname__ = manager_cls.__qualname__
    return InFlightRolloutManager
