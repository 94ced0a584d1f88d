"""Where a rollout stands that is waited for, and what becomes of one that the server may not hold as it was left.

| when | the server | kept here | what becomes of it |
|---|---|---|---|
| at a start | succeeded while a trainer was there | its request | adopted |
| at a start | succeeded while no trainer was there | its request | run again |
| at a start | succeeded | its end | reused |
| at a start | failed | its request | run again |
| at a start | has not ended | its request | adopted |
| at a start | does not know it | a success with its reward | served |
| at a start | does not know it | a success without a reward | created |
| at a start | does not know it | a failure | created |
| at a start | does not know it | its request | created |
| later | knows it | its request | left as it is |
| later | does not know it | a success with its reward | served |
| later | does not know it | a success without a reward | created |
| later | does not know it | a failure | served |
| later | does not know it | its request | created |

An agent that ended while no trainer was there may have met a dead, paused or missing model. A failure is nothing worth
keeping, and nothing to die of twice. A reward may be posted late, to a server that is gone: a success that is trained
with the fill-in value would be trained wrongly. Later, the hook of what is kept has run, so that a failure is its own.

Of a fork the server is not asked: its parent may be alive. `adopt: finished_before_death` runs again what has not
ended, and hooks may still reward a success without a reward at a start. What is adopted, reused or served at a start is
looked at once more when its hook has run: if nothing can be trained from it, it is run again as well (see
`rollout_manager`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from agl_async_ckpt.agl.in_flight.kept_events import has_reward
from agl_async_ckpt.folder.liveness import Span, within_one_life
from agl_async_ckpt.state import FinishedRollout

Record = Mapping[str, Any]
"""What the server says of a rollout (JSON)."""


class Standing(Enum):
    """Where a rollout stands that is waited for."""

    UNDECIDED = "undecided"
    """It came from a checkpoint, and the server was not asked about it yet."""
    ON_SERVER = "on the server"
    """The server holds it as far as is known: it is asked, and is right."""
    TO_CREATE = "to be created"
    """The server has to be given it, under a new id."""
    SERVED = "served"
    """It lives here only: reads, deletes and posts of events do not reach the server."""


class Fate(Enum):
    """What becomes of a rollout."""

    LEFT = "left as it is"
    ADOPTED = "adopted"
    REUSED = "reused"
    SERVED = "served"
    CREATED = "created"
    RERUN = "run again"

    @property
    def standing(self) -> Standing:
        """Where the rollout stands then."""
        if self is Fate.SERVED:
            return Standing.SERVED
        return Standing.TO_CREATE if self in (Fate.CREATED, Fate.RERUN) else Standing.ON_SERVER


@dataclass(frozen=True)
class Policy:
    """What a start may do with what the server holds.

    Attributes:
        own_folder: It resumes into the output folder of the checkpoint, so the ids that it names are ours. A fork
            adopts nothing: its parent may be alive.
        adopt: `all`, or `finished_before_death` to run again what was still running.
        reclaim: This run's rollouts that are not in the checkpoint are deleted; a fork's are left from its earlier
            starts.
        lives: When a trainer of this run was there, on the server's clock.
        hooks_reward: The trainer has hooks, which may reward a rollout that is served from the checkpoint.
    """

    own_folder: bool
    adopt: Literal["all", "finished_before_death"] = "all"
    reclaim: bool = True
    lives: tuple[Span, ...] = ()
    hooks_reward: bool = False


def fate_at_start(finished: FinishedRollout | None, record: Record | None, policy: Policy) -> Fate:
    """Decide about a rollout of a checkpoint.

    Args:
        finished: Its end, if the checkpoint holds that.
        record: What the server says of it; None if it does not know it.
        policy: What is allowed.
    """
    if record is None or not policy.own_folder:
        if finished is None or finished.has_failed:
            return Fate.CREATED
        return Fate.SERVED if policy.hooks_reward or has_reward(finished) else Fate.CREATED
    if not is_adoptable(record["status"], finished is not None, policy):
        return Fate.RERUN
    # What ended before the checkpoint: the server's events are as good as those that are kept.
    return Fate.ADOPTED if finished is None else Fate.REUSED


def fate_later(finished: FinishedRollout | None, record: Record | None) -> Fate:
    """Decide about a rollout of this life, where the server did not know one of them.

    Args:
        finished: Its end, if that was kept; its hook has run.
        record: As above.
    """
    if record is not None:
        return Fate.LEFT
    is_whole = finished is not None and (finished.has_failed or has_reward(finished))
    return Fate.SERVED if is_whole else Fate.CREATED


def is_adoptable(status: Mapping[str, Any], is_kept: bool, policy: Policy) -> bool:
    """Tell whether a rollout that the server knows may go on, or be trained, under its old id.

    A success counts if a trainer was there at its end, under the strict adoption all the time.

    Args:
        status: The server's.
        is_kept: It had ended before the checkpoint, which holds its events.
        policy: What is allowed.
    """
    if status["state"] not in ("succeeded", "failed"):
        return policy.adopt == "all"
    if status["state"] == "failed":
        return False
    began = status["created_at"] if policy.adopt == "finished_before_death" else status["updated_at"]
    return is_kept or within_one_life(policy.lives, began, status["updated_at"])
