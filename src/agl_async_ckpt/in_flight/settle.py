"""After a resume, once models are registered: which in-flight rollouts are adopted, served, created again, reclaimed.

| the server | the checkpoint | what happens |
|---|---|---|
| knows it, ended while a trainer was there | | adopted under its old id |
| knows it, ended at another time | | run again: its agent may have met a dead, paused or missing model |
| knows it, failed, and no one trainer was there all the time | | run again |
| knows it, has not ended | | adopted (`adopt: all`), or run again (`finished_before_death`) |
| does not know it | holds its end and its events | served from the checkpoint: no token is generated twice |
| does not know it | holds a success without a reward | created under a new id: its agent's late post finds nobody |
| does not know it | holds the request only | created under a new id |
| knows one of this run | does not hold it | reclaimed: deleted |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_async_ckpt.in_flight import agl_server
from agl_async_ckpt.in_flight.carry_over import InFlight
from agl_async_ckpt.in_flight.kept_events import has_reward
from agl_async_ckpt.in_flight.liveness import Span, within_one_life
from agl_async_ckpt.state import FinishedRollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """What a resume may do with what the server holds.

    Attributes:
        own_folder: Resuming into the output folder of the checkpoint, so the ids that it names are ours. A fork adopts
            nothing: its parent may be alive.
        adopt: `all`, or `finished_before_death` to run again what was still running.
        reclaim: Delete this run's rollouts that are not in the checkpoint; a fork's are left from its earlier starts.
        lives: When a trainer of this run was there, on the server's clock.
        hooks_reward: The trainer has hooks, which may reward a rollout served from the checkpoint.
    """

    own_folder: bool
    adopt: Literal["all", "finished_before_death"] = "all"
    reclaim: bool = True
    lives: tuple[Span, ...] = ()
    hooks_reward: bool = False


@dataclass
class Outcome:
    """Ids under which rollouts were in the checkpoint (or, reclaimed, on the server), by what happened to them."""

    adopted: list[str] = field(default_factory=list[str])
    reused: list[str] = field(default_factory=list[str])
    recreated: list[str] = field(default_factory=list[str])
    rerun: list[str] = field(default_factory=list[str])
    reclaimed: list[str] = field(default_factory=list[str])


def decide(
    in_flight: InFlight, items: Iterable[Any], records: Mapping[str, Mapping[str, Any]], policy: Policy
) -> Outcome:
    """Decide about every restored rollout; creates and deletes nothing.

    Args:
        in_flight: Its restored rollouts become adopted, served, or marked for creation.
        items: Every restored `EnqueuedRollout`, of waiting groups too.
        records: Of the server, by id.
        policy: What is allowed.
    """
    outcome = Outcome()
    for item in items:
        rollout_id = item.rollout_id
        if rollout_id not in in_flight.undecided:
            continue
        in_flight.undecided.discard(rollout_id)
        known = in_flight.tracked[rollout_id]
        record = records.get(rollout_id) if policy.own_folder else None
        if record is None and known.finished is not None and servable(known.finished, policy):
            known.served = True
            outcome.reused.append(rollout_id)
        elif record is None:
            in_flight.to_create.add(rollout_id)
            outcome.recreated.append(rollout_id)
        elif record["status"]["state"] in agl_server.ENDED:
            if known.finished is not None:
                outcome.reused.append(rollout_id)  # ended before the checkpoint; the server's events are as good
            elif trusted(record["status"], policy):
                known.crossed_gap = not whole_life(record["status"], policy)
                outcome.adopted.append(rollout_id)
            else:
                in_flight.to_create.add(rollout_id)
                outcome.rerun.append(rollout_id)
        elif policy.adopt == "all":
            known.crossed_gap = True
            outcome.adopted.append(rollout_id)
        else:
            in_flight.to_create.add(rollout_id)
            outcome.rerun.append(rollout_id)
    return outcome


def servable(finished: FinishedRollout, policy: Policy) -> bool:
    """Whether a kept rollout is all that training needs.

    A reward may be posted after the end. The server that is to receive it is gone, and a success that is trained with
    the fill-in value would be trained wrongly.
    """
    status = finished.record.get("status") or {}
    return status.get("state") != "succeeded" or has_reward(finished) or policy.hooks_reward


def trusted(status: Mapping[str, Any], policy: Policy) -> bool:
    """Whether the end of a rollout is its own, and not the doing of a missing trainer.

    A success counts if a trainer was there at the end. A failure counts, and under the strict adoption a success too,
    if the same trainer was there all the time: an agent that met no model earlier may fail of it later.
    """
    if status["state"] == "failed" or policy.adopt == "finished_before_death":
        return whole_life(status, policy)
    return within_one_life(policy.lives, status["updated_at"])


def whole_life(status: Mapping[str, Any], policy: Policy) -> bool:
    """Whether one trainer was there from the creation of a rollout to its end."""
    return within_one_life(policy.lives, status["created_at"], status["updated_at"])


def reclaimable(
    in_flight: InFlight, items: Iterable[Any], records: Mapping[str, Mapping[str, Any]], policy: Policy
) -> list[str]:
    """Return the ids of this run's rollouts on the server that nothing waits for: in no checkpoint, or replaced."""
    if not policy.reclaim:
        return []
    kept = {item.rollout_id for item in items} - in_flight.to_create
    return [rollout_id for rollout_id, record in records.items() if rollout_id not in kept and in_flight.owns(record)]
