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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.group_size import resized
from agl_async_ckpt.agl.in_flight.kept_events import has_reward, json_bytes
from agl_async_ckpt.agl.in_flight.standing import Fate, Standing
from agl_async_ckpt.state import FinishedRollout, InFlightRollout, PromptGroup

log = logging.getLogger(__name__)

RUN_ID_KEY = "agl_async_ckpt_run_id"
REPLACES_KEY = "replaces"
REQUEST_KEYS = ("input", "is_train", "config", "metadata")


@dataclass(slots=True)
class Tracked:
    """What is known of one rollout beside agent-lightning's own record.

    Attributes:
        request: As it was posted, without an id or our tags; `config` is None where hooks left the default alone, and
            absent where none was posted. Siblings share it, and nothing changes it.
        finished: Record and events, once it has ended and they are kept.
        num_bytes: Their size as JSON, also if they were too large to be kept; 0 if unknown.
        is_worth: What is kept may go into a checkpoint: a success that something can be trained from.
        standing: Where it stands.
        is_fresh: No server ever held it: its group has grown. Any other that is created again names its old id.
        doubted: It was restored, or lived while no server was there, so that a failure, or an end without an answer to
            train from, proves nothing of it.
        is_read: Its sample is built, and nobody waits for it any more.
        num_vanished: How often it, or what it was created again for, was gone right after its end.
    """

    request: Mapping[str, Any] | None = None
    finished: FinishedRollout | None = None
    num_bytes: int = 0
    is_worth: bool = True
    standing: Standing = Standing.ON_SERVER
    is_fresh: bool = False
    doubted: bool = False
    is_read: bool = False
    num_vanished: int = 0

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
        restored: Data ids of the prompt groups that came from a checkpoint.
        waiting: Groups of `EnqueuedRollout` for which there is no room yet, after a resume with a smaller A.
        default_config: A rollout's config as posted when no hook changed it (JSON).
        mode: What is kept of a rollout that has ended while its siblings have not: `keep` holds its record and events
            and saves them, `regenerate` holds them for a server that is lost, `drop` holds nothing.
        max_bytes: Bound of what is held of events, as JSON.
        last_read: Id of the rollout whose raw events were read last, and those events with what was posted since.
    """

    run_id: str = ""
    mode: Literal["keep", "regenerate", "drop"] = "keep"
    max_bytes: int = 2**30
    tracked: dict[str, Tracked] = field(default_factory=dict[str, Tracked])
    restored: frozenset[str] = frozenset()
    waiting: list[list[Any]] = field(default_factory=list[list[Any]])
    default_config: Mapping[str, Any] | None = None
    last_read: tuple[str, list[Any]] = ("", [])
    _held_bytes: int = 0

    def collect(self, enqueued: Iterable[Any]) -> tuple[PromptGroup, ...]:
        """Return the groups in flight, oldest first: those that the trainer carries over, and those that wait.

        Args:
            enqueued: The trainer's carry-over list of `EnqueuedRollout`.
        """
        groups: dict[str, list[InFlightRollout]] = {}
        num_left_out = 0
        for item in self.everything(enqueued):
            known = self.tracked.get(item.rollout_id, Tracked())
            finished = known.finished if self.mode == "keep" and known.is_worth else None
            rollout = InFlightRollout(enqueued=_fields(item, known), request=known.request, finished=finished)
            groups.setdefault(item.data_id, []).append(rollout)
            num_left_out += known.finished is None and known.num_bytes > 0
        if num_left_out and self.mode == "keep":
            log.warning(
                "Events in flight exceed in_flight_max_bytes=%d: of %d rollouts that have ended only the requests are "
                "saved; a resume from here may generate them again.",
                self.max_bytes,
                num_left_out,
            )
        return tuple(PromptGroup(data_id, tuple(members)) for data_id, members in groups.items())

    def everything(self, enqueued: Iterable[Any]) -> list[Any]:
        """Return every `EnqueuedRollout` in flight, of waiting groups too, oldest first."""
        return sorted(self.members(enqueued), key=_age)

    def members(self, enqueued: Iterable[Any]) -> list[Any]:
        """Return the same in no order, which takes a tenth of the time."""
        return [*enqueued, *(member for group in self.waiting for member in group)]

    def validating(self) -> set[str]:
        """Return the ids of rollouts of a validation that has not come to its end."""
        return {rollout_id for rollout_id, known in self.tracked.items() if not known.is_train}

    def wants_events(self, rollout_id: str, *, hooks_act: bool) -> bool:
        """Tell whether the events of a rollout that has ended are to be fetched and kept, or renewed.

        Args:
            rollout_id: Of a tracked one.
            hooks_act: Its hook has just run, and may have posted something, to the server itself too.
        """
        known = self.tracked[rollout_id]
        if self.mode == "drop":
            return False
        if known.finished is None:
            return self._held_bytes + max(known.num_bytes, 1) <= self.max_bytes
        return hooks_act or (known.is_worth and not has_reward(known.finished))  # an agent may post it late

    def known_events(self, rollout_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the raw events that the server had of a rollout when it last answered, as far as they are known."""
        if self.last_read[0] == rollout_id:
            return [event.model_dump() for event in self.last_read[1]]
        known = self.tracked.get(rollout_id, Tracked())
        return () if known.finished is None else known.finished.raw_events

    def note_outage(self) -> None:
        """Note that the server was away: agents that asked for it meanwhile may fail of it."""
        for known in self.tracked.values():
            known.doubted = known.doubted or known.finished is None

    def keep(self, rollout_id: str, finished: FinishedRollout, num_bytes: int, *, is_worth: bool) -> None:
        """Keep record and events of a rollout that has ended, if the bound allows: what is kept already stays."""
        known = self.tracked[rollout_id]
        known.is_worth = is_worth
        self._hold(known, finished, num_bytes)

    def _hold(self, known: Tracked, finished: FinishedRollout, num_bytes: int) -> None:
        self._release(known)
        known.num_bytes = num_bytes
        # What is served is nowhere else.
        if known.standing is Standing.SERVED or self._held_bytes + num_bytes <= self.max_bytes:
            known.finished = finished
            self._held_bytes += num_bytes

    def _release(self, known: Tracked) -> None:
        if known.finished is not None:
            self._held_bytes -= known.num_bytes
            known.finished = None

    def forget_trained(self, enqueued: Iterable[Any]) -> None:
        """Drop what is known of rollouts that are no longer in flight, so that memory does not grow with the steps."""
        for rollout_id in self.tracked.keys() - {item.rollout_id for item in self.members(enqueued)}:
            known = self.tracked.pop(rollout_id)  # `forget`, without two calls for each of thousands
            if known.finished is not None:
                self._held_bytes -= known.num_bytes

    def restore(self, groups: Iterable[PromptGroup], *, group_size: int) -> None:
        """Take over the groups of a checkpoint; `admit` hands them to the trainer."""
        self.tracked, self._held_bytes = {}, 0
        groups = list(groups)
        self.restored = frozenset(group.data_id for group in groups)
        self.waiting = [[self._take(rollout) for rollout in resized(group, group_size)] for group in groups]

    def _take(self, rollout: InFlightRollout) -> Any:
        item = internals.enqueued_rollout(rollout.enqueued)
        standing = Standing.TO_CREATE if rollout.is_fresh else Standing.UNDECIDED
        known = Tracked(rollout.request or default_request(rollout), standing=standing, is_fresh=rollout.is_fresh)
        if rollout.finished is not None:
            self._hold(known, rollout.finished, json_bytes(rollout.finished))
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

    def standing(self, rollout_id: str) -> Standing | None:
        """Return where a rollout stands; None if it is not tracked."""
        known = self.tracked.get(rollout_id)
        return None if known is None else known.standing

    def settle(self, fates: Mapping[str, Fate], *, doubted: bool) -> None:
        """Have rollouts stand where they were decided to.

        Args:
            fates: Rollout id -> what was decided.
            doubted: What is not run again now is doubted: it has come from an earlier life.
        """
        for rollout_id, fate in fates.items():
            if fate is not Fate.LEFT:
                known = self.tracked[rollout_id]
                known.standing = fate.standing
                known.doubted = known.doubted or (doubted and fate.standing is not Standing.TO_CREATE)

    def create_missing(self, enqueued: Iterable[Any], manager: internals.RolloutManager) -> list[str]:
        """Create on the server those of `enqueued` that it has to be given, under new ids.

        The items are changed in place: the manager's loop, if it runs already, holds the same objects.

        Returns:
            The old ids.
        """
        items = [item for item in enqueued if self.standing(item.rollout_id) is Standing.TO_CREATE]
        if not items:
            return []
        replaced = [self.tracked[item.rollout_id] for item in items]
        new_ids = [uuid.uuid4().hex for _ in items]
        requests = [
            creation(known, item.rollout_id, new_id, self.default_config)
            for item, known, new_id in zip(items, replaced, new_ids, strict=True)
        ]
        agl_server.create_rollouts(manager, requests)  # a lost answer may have made other ids necessary
        old_ids = [item.rollout_id for item in items]
        for item, known, new_id in zip(items, replaced, [request["rollout_id"] for request in requests], strict=True):
            self.forget(item.rollout_id)
            # Byte-equal over any number of generations.
            self.tracked[new_id] = Tracked(request=known.request, num_vanished=known.num_vanished)
            internals.renew_enqueued(item, new_id, time.time())
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
        if "config" in noted and noted["config"] == self.default_config:
            noted["config"] = None  # a later life posts its own default: a corrected image takes effect
        return noted

    def owns(self, record: Mapping[str, Any]) -> bool:
        """Tell whether a rollout of the server was created by this run: by the tag of `outgoing`."""
        return (record.get("metadata") or {}).get(RUN_ID_KEY) == self.run_id

    def rename(self, old_id: str, new_id: str) -> None:
        """Note that a rollout was not created under one id, as far as can be seen, but under another."""
        self.tracked[new_id] = self.tracked.pop(old_id)

    def forget(self, rollout_id: str) -> None:
        """Drop what is known of a rollout that nobody waits for any more."""
        known = self.tracked.pop(rollout_id, None)
        if known is not None:
            self._release(known)


def _copied(value: Any) -> Any:
    """Copy JSON values; `copy.deepcopy` takes ten times as long, for thousands of requests a step."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def default_request(rollout: InFlightRollout) -> Mapping[str, Any]:
    """Return a request for a rollout whose posting was not seen."""
    return {"input": rollout.enqueued["input"], "is_train": True, "config": None, "metadata": {}}


def creation(known: Tracked, old_id: str, new_id: str, default_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the body that creates a rollout again: as it was posted, under a new id that names the old one."""
    request = copy.deepcopy(dict(known.request or {}))
    request["metadata"] = dict(request.get("metadata") or {})
    if not known.is_fresh:
        request["metadata"][REPLACES_KEY] = old_id
    if "config" in request and request["config"] is None:
        request["config"] = copy.deepcopy(default_config)
    return {key: value for key, value in {**request, "rollout_id": new_id}.items() if value is not None}


def _fields(item: Any, known: Tracked) -> dict[str, Any]:
    """Return every field of an `EnqueuedRollout`, with the input as it was posted.

    A hook may have put any object there; what its agents get, and what is posted again, is the JSON.
    """
    fields = item.model_dump(exclude={"input"})
    posted = known.request or item.model_dump(mode="json", include={"input"})
    return {**fields, "input": posted.get("input")}


def _age(item: Any) -> tuple[int, int]:
    """Sort key: the order of pulling."""
    return item.step, item.sample_idx_in_step
