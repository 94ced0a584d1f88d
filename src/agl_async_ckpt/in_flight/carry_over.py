"""In-flight prompt groups: what is kept of them, put back, adopted or created again (docs/in-flight.md).

The server keeps rollouts in memory, and controllers never start an agent for an id that they have seen. Therefore a
restored rollout is adopted under its old id if the server still knows it, and otherwise created under a new id that
names the old one. An old id is never created again.
"""

from __future__ import annotations

import copy
import logging
import marshal
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.in_flight import agl_server
from agl_async_ckpt.in_flight.group_size import resized
from agl_async_ckpt.in_flight.kept_events import has_reward, json_bytes
from agl_async_ckpt.state import FinishedRollout, InFlightRollout, PromptGroup

log = logging.getLogger(__name__)

RUN_ID_KEY = "agl_async_ckpt_run_id"
REPLACES_KEY = "replaces"
REQUEST_KEYS = ("input", "is_train", "config", "metadata")


@dataclass(slots=True)
class Tracked:
    """What is known of one rollout beside agent-lightning's own record.

    Attributes:
        request: As it was posted, without an id or our tags; `config` is None where hooks left the default alone.
            Siblings share it, and nothing changes it.
        finished: Record and events, once it has ended and they are to be kept.
        finished_bytes: Size of the kept events as JSON.
        replaces: Id of the checkpoint that a creation must name.
        served: It lives here only: reads, deletes and event posts do not reach the server.
        crossed_gap: It lived while no trainer, or no server, was there, so a failure, or an end without any answer,
            proves nothing.
        is_complete: Its events are read at once, so those that were kept are answered and not fetched again.
    """

    request: Mapping[str, Any] | None = None
    finished: FinishedRollout | None = None
    finished_bytes: int = 0
    replaces: str | None = None
    served: bool = False
    crossed_gap: bool = False
    is_complete: bool = False

    @property
    def is_train(self) -> bool:
        """Whether it is a rollout of the training, not of a validation."""
        return bool((self.request or {}).get("is_train", True))


@dataclass
class InFlight:
    """The training rollouts of this run that are enqueued and not trained.

    Attributes:
        run_id: Tag of this run's rollouts on the server.
        tracked: rollout id -> what is known of it; also of validation rollouts, until they are deleted.
        to_create: Ids of restored rollouts that the server has to be given again.
        undecided: Ids of restored rollouts about which the server was not asked yet.
        left: Ids of rollouts of a validation that was left; only where training is synchronous, and nothing is tracked.
        waiting: Groups of `EnqueuedRollout` for which there is no room yet, after a resume with a smaller A.
        default_config: A rollout's config as posted when no hook changed it (JSON).
        keep_events: Save record and events of a rollout that has ended, for siblings that have not.
        max_bytes: Bound of what `collect` returns of kept events, as JSON.
    """

    run_id: str = ""
    keep_events: bool = True
    max_bytes: int = 2**30
    tracked: dict[str, Tracked] = field(default_factory=dict[str, Tracked])
    to_create: set[str] = field(default_factory=set[str])
    undecided: set[str] = field(default_factory=set[str])
    left: set[str] = field(default_factory=set[str])
    waiting: list[list[Any]] = field(default_factory=list[list[Any]])
    default_config: Mapping[str, Any] | None = None

    def collect(self, enqueued: Iterable[Any]) -> tuple[PromptGroup, ...]:
        """Return the groups in flight, oldest first: those that the trainer carries over, and those that wait.

        Args:
            enqueued: The trainer's carry-over list of `EnqueuedRollout`.
        """
        groups: dict[str, list[InFlightRollout]] = {}
        num_bytes: dict[str, int] = {}
        for item in self.everything(enqueued):
            known = self.tracked.get(item.rollout_id, Tracked())
            finished = known.finished if self.keep_events else None
            rollout = InFlightRollout(enqueued=item.model_dump(), request=known.request, finished=finished)
            groups.setdefault(item.data_id, []).append(rollout)
            num_bytes[item.data_id] = num_bytes.get(item.data_id, 0) + (known.finished_bytes if finished else 0)
        return tuple(self._bounded(groups, num_bytes))

    def _bounded(self, groups: Mapping[str, list[InFlightRollout]], num_bytes: Mapping[str, int]) -> list[PromptGroup]:
        """Fall back to the requests, group by group, where the events would pass the bound."""
        bounded: list[PromptGroup] = []
        total, left_out = 0, 0
        for data_id, members in groups.items():
            kept = tuple(members)
            if total + num_bytes[data_id] > self.max_bytes:
                kept = tuple(replace(member, finished=None) for member in members)
                left_out += 1
            else:
                total += num_bytes[data_id]
            bounded.append(PromptGroup(data_id, kept))
        if left_out:
            log.warning(
                "Events in flight exceed in_flight_max_bytes=%d: of %d prompt groups only the requests are saved; "
                "a resume from here generates their finished siblings again.",
                self.max_bytes,
                left_out,
            )
        return bounded

    def everything(self, enqueued: Iterable[Any]) -> list[Any]:
        """Return every `EnqueuedRollout` in flight, of waiting groups too, oldest first."""
        return sorted(self.members(enqueued), key=_age)

    def members(self, enqueued: Iterable[Any]) -> list[Any]:
        """Return the same in no order, which takes a tenth of the time."""
        return [*enqueued, *(member for group in self.waiting for member in group)]

    def validating(self) -> set[str]:
        """Return the ids of rollouts of a validation that has not come to its end."""
        return self.left | {rollout_id for rollout_id, known in self.tracked.items() if not known.is_train}

    def wants_events(self, rollout_id: str) -> bool:
        """Whether the events of a rollout that has ended are still to be fetched, or lack a reward posted late."""
        finished = self.tracked[rollout_id].finished
        return finished is None or not has_reward(finished)

    def cross_gap(self) -> None:
        """Note that the server was away: agents that asked for it meanwhile may fail of it."""
        for known in self.tracked.values():
            known.crossed_gap = known.crossed_gap or known.finished is None

    def keep(self, rollout_id: str, finished: FinishedRollout, num_bytes: int) -> None:
        """Keep record and events of a rollout that has ended."""
        self.tracked[rollout_id].finished, self.tracked[rollout_id].finished_bytes = finished, num_bytes

    def forget_trained(self, enqueued: Iterable[Any]) -> None:
        """Drop what is known of rollouts that are no longer in flight, so that memory does not grow with the steps."""
        for rollout_id in self.tracked.keys() - {item.rollout_id for item in self.members(enqueued)}:
            del self.tracked[rollout_id]

    def restore(self, groups: Iterable[PromptGroup], *, group_size: int) -> None:
        """Take over the groups of a checkpoint; `admit` hands them to the trainer."""
        self.tracked, self.to_create, self.undecided = {}, set(), set()
        self.waiting = [[self._take(rollout) for rollout in resized(group, group_size)] for group in groups]

    def _take(self, rollout: InFlightRollout) -> Any:
        item = capture.enqueued_rollout(rollout.enqueued)
        known = Tracked(request=rollout.request or default_request(rollout), finished=rollout.finished)
        if rollout.finished is not None:
            known.finished_bytes = json_bytes(rollout.finished)
        if rollout.is_fresh:
            self.to_create.add(item.rollout_id)
        else:
            known.replaces = item.rollout_id
            self.undecided.add(item.rollout_id)
        self.tracked[item.rollout_id] = known
        return item

    def admit(self, enqueued: list[Any], *, room: int) -> list[Any]:
        """Return the trainer's carry-over with waiting groups in it: the `room` oldest groups, oldest first.

        A group that was pulled while older ones waited may have to wait in its turn; it goes on running meanwhile.

        Args:
            enqueued: The trainer's carry-over list.
            room: A - 1 at most, so that a step can still pull a new input: the trainer cannot pull none.
        """
        if not self.waiting:
            return enqueued
        groups: dict[str, list[Any]] = {}
        for item in self.everything(enqueued):
            groups.setdefault(item.data_id, []).append(item)
        in_order = list(groups.values())
        self.waiting = in_order[room:]
        return [item for group in in_order[:room] for item in group]

    def create_missing(self, enqueued: Iterable[Any], manager: Any) -> list[str]:
        """Create on the server those of `enqueued` that it has to be given, under new ids.

        The items are changed in place: the manager's loop, if it runs already, holds the same objects.

        Returns:
            The old ids.
        """
        items = [item for item in enqueued if item.rollout_id in self.to_create]
        if not items:
            return []
        replaced = [self.tracked[item.rollout_id] for item in items]
        new_ids = [uuid.uuid4().hex for _ in items]
        requests = [
            creation(known, new_id, self.default_config) for known, new_id in zip(replaced, new_ids, strict=True)
        ]
        agl_server.create_rollouts(manager, requests)  # a lost answer may have made other ids necessary
        old_ids = [item.rollout_id for item in items]
        for item, known, new_id in zip(items, replaced, [request["rollout_id"] for request in requests], strict=True):
            del self.tracked[item.rollout_id]
            self.to_create.discard(item.rollout_id)
            self.tracked[new_id] = Tracked(request=known.request)  # byte-equal over any number of generations
            capture.renew_enqueued(item, new_id, time.time())
        return old_ids

    def outgoing(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Note requests as they are posted, and return them tagged with this run's id.

        The tag is added here and not by a hook: a hook of ours would make the trainer fetch events per rollout.
        """
        tagged: list[dict[str, Any]] = []
        written: bytes | None = None
        noted: dict[str, Any] = {}
        for request in requests:
            metadata = request.get("metadata") or {}
            # Siblings follow each other with one request: noted once, it costs memory and time once. Version 2 of
            # marshal tells 1 from True and 1.0, and depends on nothing but the value.
            value = [metadata, *(request.get(key, ...) for key in REQUEST_KEYS)]
            if written != (written := marshal.dumps(value, 2)):
                noted = self._noted(request, metadata)
            self.tracked[request["rollout_id"]] = Tracked(request=noted)
            tagged.append({**request, "metadata": {**metadata, RUN_ID_KEY: self.run_id}})
        return tagged

    def _noted(self, request: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a request as it is to be posted again."""
        noted = {key: _copied(request[key]) for key in REQUEST_KEYS if key in request}
        noted["metadata"] = {key: _copied(value) for key, value in metadata.items() if key != RUN_ID_KEY}
        if noted.get("config") == self.default_config:
            noted["config"] = None  # a later life posts its own default: a corrected image takes effect
        return noted

    def owns(self, record: Mapping[str, Any]) -> bool:
        """Whether a rollout of the server was created by this run: by the tag of `outgoing`."""
        return (record.get("metadata") or {}).get(RUN_ID_KEY) == self.run_id

    def rename(self, old_id: str, new_id: str) -> None:
        """Note that a rollout was not created under one id, as far as can be seen, but under another."""
        self.tracked[new_id] = self.tracked.pop(old_id)

    def forget(self, rollout_id: str) -> None:
        """Drop what is known of a rollout that nobody waits for any more."""
        self.tracked.pop(rollout_id, None)


def _copied(value: Any) -> Any:
    """Copy JSON values; `copy.deepcopy` takes ten times as long, for thousands of requests a step."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def default_request(rollout: InFlightRollout) -> Mapping[str, Any]:
    """Return a request for a rollout whose posting was not seen."""
    return {"input": rollout.enqueued["input"], "is_train": True, "config": None, "metadata": {}}


def creation(known: Tracked, new_id: str, default_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the body that creates a rollout again: as it was posted, under a new id that names the old one."""
    request = copy.deepcopy(dict(known.request or {}))
    request["metadata"] = dict(request.get("metadata") or {})
    if known.replaces is not None:
        request["metadata"][REPLACES_KEY] = known.replaces
    if request.get("config") is None:
        request["config"] = copy.deepcopy(default_config)
    return {key: value for key, value in {**request, "rollout_id": new_id}.items() if value is not None}


def _age(item: Any) -> tuple[int, int]:
    """Sort key: the order of pulling."""
    return item.step, item.sample_idx_in_step
