"""A server that does not know a rollout that this trainer waits for: it was restarted, and remembers nothing.

| the trainer | what happens |
|---|---|
| has kept the end of the rollout | it is served from memory: its events were fetched then, after its hook |
| has seen a success without a reward | created under a new id: a late post finds nobody |
| waits for it | created under a new id |

An old id is never created again (see `carry_over`). Old agents that live on are answered "not found".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.carry_over import InFlight
from agl_async_ckpt.agl.in_flight.settle import is_whole

log = logging.getLogger(__name__)


def active_rollouts(trainer: internals.Trainer, manager: Any) -> list[Any]:
    """Return the `EnqueuedRollout`s that the trainer carries and that the manager has created in this step."""
    carried = internals.carry_over(trainer)
    ids = {item.rollout_id for item in carried}
    return [*carried, *(item for item in manager.enqueued if item.rollout_id not in ids)]


def mark_lost(in_flight: InFlight, items: list[Any], records: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Decide about every rollout that the server does not know; creates nothing.

    Args:
        in_flight: Its rollouts become served, or marked for creation.
        items: Every `EnqueuedRollout` that is still waited for, of waiting groups too.
        records: Of the server, by id.

    Returns:
        Ids of those that are served from now on, and of those to create.
    """
    kept: list[str] = []
    lost: list[str] = []
    for item in items:
        rollout_id = item.rollout_id
        known = in_flight.tracked.get(rollout_id)
        if known is None or known.served or known.is_read:
            continue
        if rollout_id in records or rollout_id in in_flight.to_create:
            continue
        if known.finished is not None and is_whole(known.finished):
            known.served = True
            kept.append(rollout_id)
        else:
            known.replaces = rollout_id
            in_flight.to_create.add(rollout_id)
            lost.append(rollout_id)
    return kept, lost


def is_new_server(in_flight: InFlight, records: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the server holds no rollout of this run: then its clock may be another one, too."""
    return not any(in_flight.owns(record) for record in records.values())


def recover(
    trainer: internals.Trainer,
    manager: internals.RolloutManager,
    in_flight: InFlight,
    *,
    absence: str | None,
    forget: Callable[[], None],
) -> None:
    """Have a server that has lost rollouts hold what is waited for.

    Args:
        trainer: Its carried rollouts, and those that `manager` has enqueued, change in place.
        manager: Of this step, with models registered.
        in_flight: What is known of the rollouts.
        absence: How long the server was away, in words, if that was noticed.
        forget: Called before anything is created, if the server has lost something.

    Raises:
        ServerError: The server did not answer in time, or refuses.
    """
    client = internals.agl_client(trainer)
    manager.client.register_again()  # before anything is created: an agent that finds no model fails
    active = active_rollouts(trainer, manager)
    kept, lost = mark_lost(in_flight, in_flight.everything(active), agl_server.list_rollouts(client))
    if not kept and not lost:
        return
    forget()
    created = in_flight.create_missing(active, manager)
    waiting = f", {len(lost) - len(created)} to be created when there is room" if len(lost) > len(created) else ""
    log.warning(
        "%s and came back without the rollouts of this run: %d created again under new ids%s, "
        "%d that had ended kept with their events. Training goes on.",
        absence or f"The agl-server at {client.base_url} was restarted",
        len(created),
        waiting,
        len(kept),
    )


def log_return(absence: str | None) -> None:
    """Say that an outage is over, if there was one."""
    if absence is not None:
        log.warning("%s and answers again. Training goes on.", absence)
