"""In-flight prompt groups: collect them for a checkpoint, put them back, create them again on the server.

The server keeps rollouts in memory and controllers never start an agent for an id that they have seen. So a restored
rollout is created under a new id, with the old one in its metadata; an old id is never created again.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.state import InFlightRollout, PromptGroup

RUN_ID_KEY = "agl_async_ckpt_run_id"
REPLACES_KEY = "replaces"
REQUEST_KEYS = ("input", "is_train", "config", "metadata")


@dataclass
class InFlight:
    """The rollouts of this run that are enqueued and not trained, beside what the trainer itself keeps of them.

    Attributes:
        run_id: Tag of this run's rollouts.
        posted: rollout id -> request as posted, for training rollouts of this life.
        unsettled: rollout id of the checkpoint -> rollout, for active groups that the server does not hold yet.
        waiting: Restored groups for which there is no room yet, oldest first.
    """

    run_id: str = ""
    posted: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    unsettled: dict[str, InFlightRollout] = field(default_factory=dict[str, InFlightRollout])
    waiting: list[PromptGroup] = field(default_factory=list[PromptGroup])

    def collect(self, enqueued: Iterable[Any]) -> tuple[PromptGroup, ...]:
        """Return the groups in flight, oldest first: those that the trainer carries over, then those that wait.

        Args:
            enqueued: The trainer's carry-over list of `EnqueuedRollout`.
        """
        groups: dict[str, list[InFlightRollout]] = {}
        for item in enqueued:
            known = self.unsettled.get(item.rollout_id)
            rollout = known or InFlightRollout(enqueued=item.model_dump(), request=self.posted.get(item.rollout_id))
            groups.setdefault(item.data_id, []).append(rollout)
        return (*(PromptGroup(data_id, tuple(members)) for data_id, members in groups.items()), *self.waiting)

    def forget_trained(self, enqueued: Iterable[Any]) -> None:
        """Drop the requests of rollouts that are no longer in flight."""
        in_flight = {item.rollout_id for item in enqueued}
        self.posted = {rollout_id: request for rollout_id, request in self.posted.items() if rollout_id in in_flight}

    def restore(self, groups: Iterable[PromptGroup], *, group_size: int) -> None:
        """Take over the groups of a checkpoint; `admit` hands them to the trainer."""
        self.waiting = [resized(group, group_size) for group in groups]
        self.unsettled = {}
        self.posted = {}

    def admit(self, enqueued: list[Any], *, room: int) -> list[Any]:
        """Return the trainer's carry-over with waiting groups added, up to `room` groups in all, oldest first.

        Args:
            enqueued: The trainer's carry-over list.
            room: A - 1 at most, so that a step can still pull a new input: the trainer cannot pull none.
        """
        free = room - len({item.data_id for item in enqueued})
        if free <= 0 or not self.waiting:
            return enqueued
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        for group in admitted:
            for rollout in group.rollouts:
                self.unsettled[rollout.rollout_id] = rollout
                enqueued = [*enqueued, capture.enqueued_rollout(rollout.enqueued)]
        return sorted(enqueued, key=lambda item: item.step)

    def settle(self, enqueued: list[Any], manager: Any) -> tuple[list[Any], list[str]]:
        """Create on the server what it does not hold yet.

        Args:
            enqueued: The trainer's carry-over list.
            manager: The rollout manager, its models registered: a rollout created before that fails.

        Returns:
            The carry-over list under the new ids, and the old ids that were created again.
        """
        if not self.unsettled:
            return enqueued, []
        requests: list[dict[str, Any]] = []
        settled: list[Any] = []
        for item in enqueued:
            rollout = self.unsettled.get(item.rollout_id)
            if rollout is None:
                settled.append(item)
                continue
            new_id = uuid.uuid4().hex
            requests.append(recreation(rollout, new_id))
            settled.append(
                item.model_copy(
                    update={"rollout_id": new_id, "enqueue_time": time.time(), "running_at": None, "finished_at": None}
                )
            )
        capture.post_rollouts(manager, requests)
        recreated = list(self.unsettled)
        self.unsettled = {}
        return settled, recreated

    def outgoing(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Note training requests as they are posted, and return them tagged with this run's id.

        The tag is added here and not by a hook: a hook of ours would make the trainer fetch events per rollout.
        """
        tagged: list[dict[str, Any]] = []
        for request in requests:
            metadata = dict(request.get("metadata") or {})
            if request.get("is_train", True):
                own = {key: value for key, value in metadata.items() if key not in (RUN_ID_KEY, REPLACES_KEY)}
                noted = {key: request[key] for key in REQUEST_KEYS if key in request}
                self.posted[request["rollout_id"]] = copy.deepcopy({**noted, "metadata": own})
            tagged.append({**request, "metadata": {**metadata, RUN_ID_KEY: self.run_id}})
        return tagged


def recreation(rollout: InFlightRollout, new_id: str) -> dict[str, Any]:
    """Return the request that creates `rollout` again: as it was posted, under a new id that names the old one."""
    request = dict(rollout.request or {"input": rollout.enqueued["input"], "is_train": True})
    metadata = {**(request.get("metadata") or {}), REPLACES_KEY: rollout.rollout_id}
    return copy.deepcopy({**request, "metadata": metadata, "rollout_id": new_id})


def resized(group: PromptGroup, size: int) -> PromptGroup:
    """Return `group` with `size` siblings: the trainer insists on rollout.n of the current settings.

    Shrinking keeps finished siblings first; growing adds fresh ones that repeat the first sibling's request.
    """
    rollouts = list(group.rollouts)
    if len(rollouts) > size:
        by_worth = sorted(range(len(rollouts)), key=lambda i: (rollouts[i].finished is None, i))
        rollouts = [rollouts[i] for i in sorted(by_worth[:size])]
    template = group.rollouts[0]
    while len(rollouts) < size:
        fresh = {**template.enqueued, "rollout_id": uuid.uuid4().hex, "running_at": None, "finished_at": None}
        rollouts.append(InFlightRollout(enqueued=fresh, request=template.request))
    return replace(group, rollouts=tuple(rollouts))
