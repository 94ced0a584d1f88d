"""After a resume, once models are registered: which in-flight rollouts are adopted, served, created again, reclaimed.

| the server | the checkpoint | what happens |
|---|---|---|
| knows it, succeeded while a trainer was there | | adopted under its old id |
| knows it, succeeded at another time | | run again: its agent may have met a dead, paused or missing model |
| knows it, failed | | run again: a failure is nothing worth keeping, and nothing to die of twice |
| knows it, has not ended | | adopted (`adopt: all`), or run again (`finished_before_death`) |
| does not know it | holds its success and its events | served from the checkpoint: no token is generated twice |
| does not know it | holds a success without a reward | created under a new id: a late post finds nobody |
| does not know it | holds the request only | created under a new id |
| knows one of this run | does not hold it | reclaimed: deleted |

What is adopted or served is looked at once more when its hook has run: if nothing can be trained from it, it is run
again as well (see `rollout_manager`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.carry_over import InFlight
from agl_async_ckpt.agl.in_flight.kept_events import has_reward
from agl_async_ckpt.folder.liveness import Span, within_one_life
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
            known.served = known.doubted = True
            outcome.reused.append(rollout_id)
        elif record is None:
            in_flight.to_create.add(rollout_id)
            outcome.recreated.append(rollout_id)
        elif is_adoptable(record["status"], known.finished is not None, policy):
            known.doubted = True
            # What ended before the checkpoint: the server's events are as good as those that are kept.
            (outcome.adopted if known.finished is None else outcome.reused).append(rollout_id)
        else:
            in_flight.to_create.add(rollout_id)
            outcome.rerun.append(rollout_id)
    return outcome


def servable(finished: FinishedRollout, policy: Policy) -> bool:
    """Whether what a checkpoint holds of a rollout may be all that training needs: hooks may still reward it."""
    return not finished.has_failed and (has_reward(finished) or policy.hooks_reward)


def is_whole(finished: FinishedRollout) -> bool:
    """Whether what is kept of a rollout, its hook included, is all that training needs.

    A reward may be posted after the end. The server that is to receive it is gone, and a success that is trained with
    the fill-in value would be trained wrongly.
    """
    return finished.has_failed or has_reward(finished)


def is_adoptable(status: Mapping[str, Any], is_kept: bool, policy: Policy) -> bool:
    """Whether a rollout that the server knows may go on, or be trained, under its old id.

    A success counts if a trainer was there at its end, under the strict adoption all the time: its agent may have met
    no model.

    Args:
        status: The server's.
        is_kept: It had ended before the checkpoint, which holds its events.
        policy: What is allowed.
    """
    if status["state"] not in agl_server.ENDED:
        return policy.adopt == "all"
    if status["state"] == "failed":
        return False
    began = status["created_at"] if policy.adopt == "finished_before_death" else status["updated_at"]
    return is_kept or within_one_life(policy.lives, began, status["updated_at"])


def reclaimable(
    in_flight: InFlight, items: Iterable[Any], records: Mapping[str, Mapping[str, Any]], policy: Policy
) -> list[str]:
    """Return the ids of this run's rollouts on the server that nothing waits for: in no checkpoint, or replaced."""
    if not policy.reclaim:
        return []
    kept = {item.rollout_id for item in items} - in_flight.to_create
    return [rollout_id for rollout_id, record in records.items() if rollout_id not in kept and in_flight.owns(record)]
