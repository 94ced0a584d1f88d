"""What one life of a trainer does about its rollouts on the server: the one object that managers and trainer ask.

At its first rollout a life closes the way to a dead trainer's models, asks the server about every rollout of the
checkpoint, decides, and has the server hold what is missing. Later it deals with rollouts that fail of a death or an
outage, and with a server that has forgotten some (docs/in-flight.md). An old id is never created again: controllers
never start an agent for an id that they have seen. Old agents that live on are answered "not found".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.carry_over import InFlight
from agl_async_ckpt.agl.in_flight.patience import Patience
from agl_async_ckpt.agl.in_flight.server_client import ServerClient
from agl_async_ckpt.agl.in_flight.standing import Fate, Policy, Standing, fate_at_start, fate_later
from agl_async_ckpt.config import AsyncCheckpointConfig
from agl_async_ckpt.folder.liveness import ProofOfLife
from agl_async_ckpt.folder.run_identity import RunIdentity, is_latest_life
from agl_async_ckpt.state import PromptGroup

log = logging.getLogger(__name__)

MAX_IDS = 3
LATER_DRAIN_WAIT_S = 5.0


@dataclass
class Outcome:
    """Ids under which rollouts were in the checkpoint (or, reclaimed, on the server), by what happened to them."""

    adopted: list[str] = field(default_factory=list[str])
    reused: list[str] = field(default_factory=list[str])
    recreated: list[str] = field(default_factory=list[str])
    rerun: list[str] = field(default_factory=list[str])
    reclaimed: list[str] = field(default_factory=list[str])

    def take(self, fates: Mapping[str, Fate]) -> None:
        """Sort rollouts in by what was decided about them."""
        lists = {
            Fate.ADOPTED: self.adopted,
            Fate.REUSED: self.reused,
            Fate.SERVED: self.reused,
            Fate.CREATED: self.recreated,
            Fate.RERUN: self.rerun,
        }
        for rollout_id, fate in fates.items():
            lists[fate].append(rollout_id)

    def text(self, step: int) -> str:
        """Say what happened to the rollouts in flight of the checkpoint of `step`."""
        return (
            f"In-flight rollouts of step {step}: {_count(self.adopted)} adopted, "
            f"{_count(self.reused)} finished before and reused, {_count(self.recreated)} created again under new "
            f"ids, {_count(self.rerun)} run again because they failed or ended without a trainer; "
            f"{_count(self.reclaimed)} of this run that no checkpoint holds were removed from the server."
        )


class RolloutKeeper:
    """Keeps the rollouts in flight of one life.

    Attributes:
        groups: What is known of the rollouts.
        patience: With which the server is waited for.
        outcome: What happened to the rollouts of the checkpoint.
    """

    def __init__(
        self,
        trainer: internals.Trainer,
        config: AsyncCheckpointConfig,
        folder: Path,
        run: RunIdentity,
        *,
        own_folder: bool,
        on_wait: Callable[[], None],
    ) -> None:
        """Keep nothing yet.

        Args:
            trainer: The trainer.
            config: Its settings.
            folder: The output folder.
            run: Identity of the output folder.
            own_folder: The life goes on with the run of its checkpoint, or begins one: ids on the server are its own.
            on_wait: Is called while rollouts or the server are waited for; what it raises ends the wait.
        """
        self._trainer = trainer
        self._config = config
        self.groups = InFlight(run_id=run.run_id, mode=config.in_flight, max_bytes=config.in_flight_max_bytes)
        self.patience = Patience(config.server_wait_s, self.groups.note_outage, on_wait)
        self.outcome = Outcome()
        self._proof = ProofOfLife(folder, run.run_id, lambda: is_latest_life(folder, run))
        self._policy = Policy(
            own_folder=own_folder,
            adopt=config.adopt,
            reclaim=config.reclaim,
            lives=self._proof.earlier_lives,
            hooks_reward=internals.has_hooks(trainer),
        )
        self._restored_step: int | None = None
        self._has_asked = False
        self._has_settled = False
        self._drain_began_at: float | None = None
        self._num_stale_requests = 0
        self._has_left_requests = False

    # --- what the trainer asks --------------------------------------------------------------------------------------

    def restore(self, groups: Iterable[PromptGroup], step: int) -> None:
        """Take over the prompt groups of a checkpoint, and have the trainer carry those for which there is room."""
        self._restored_step = step
        self.groups.restore(groups, group_size=internals.group_size(self._trainer))
        internals.set_carry_over(self._trainer, [])
        self.admit()

    def admit(self) -> None:
        """Have the trainer carry waiting groups, with room left for one new input."""
        room = internals.async_batch_size(self._trainer) - 1
        carried = self.groups.admit(internals.carry_over(self._trainer), room=room)
        internals.set_carry_over(self._trainer, carried)

    def all_carried(self) -> list[Any]:
        """Return every `EnqueuedRollout` in flight, of waiting groups too, oldest first."""
        return self.groups.everything(internals.carry_over(self._trainer))

    def client(self, client: Any) -> ServerClient:
        """Return the trainer's client of the server, or a manager's, as it is to be used."""
        return ServerClient(
            client,
            self.patience,
            self.groups,
            on_created=self.on_created,
            on_answer=self.on_answer,
            accepts_drain=self._accepts_drain,
        )

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Judge what the gateway reports of itself, while the trainer waits for it to be drained."""
        self._drain_began_at = time.monotonic()
        try:
            yield
        finally:
            self._drain_began_at = None

    def on_rollout(self) -> None:
        """Before the first rollout of a life, close the way to a dead trainer's models.

        Raises:
            ServerError: The server cannot be reached, or refuses us.
        """
        if not self._has_asked:
            agl_server.delete_models(internals.agl_client(self._trainer))
            self._has_asked = True

    def _accepts_drain(self, num_requests: int) -> bool:
        began_at = self._drain_began_at
        return began_at is not None and self.is_drained(num_requests, time.monotonic() - began_at)

    def is_drained(self, num_requests: int, waited_s: float) -> bool:
        """Tell whether a paused gateway counts as drained.

        Requests to the dead trainer's model endpoint can hang for half an hour; no more of them are left than the
        smallest count seen. After `drain_wait_s` they are left alone; later steps do not wait that long again, but a
        little, for a request of ours that is counted among them because one of them has ended meanwhile.
        """
        self._num_stale_requests = min(self._num_stale_requests, num_requests)
        if num_requests == 0:
            return True
        enough_s = self._config.drain_wait_s
        if self._has_left_requests:
            enough_s = min(enough_s, LATER_DRAIN_WAIT_S)
        if num_requests > self._num_stale_requests or waited_s < enough_s:
            return False
        log.log(
            logging.INFO if self._has_left_requests else logging.WARNING,
            "Going on after %.0f s with %d model requests in the gateway that went to the dead trainer's endpoint.",
            waited_s,
            num_requests,
        )
        self._has_left_requests = True
        return True

    # --- what the rollout managers ask ------------------------------------------------------------------------------

    def on_models_deleted(self) -> None:
        """Count the model requests that go to the dead trainer's endpoints: none of ours is registered yet.

        Later calls come when the gateway was drained of ours and our models are deleted: fewer may be left by then.
        """
        if self._has_settled and not self._num_stale_requests:
            return
        num_requests = agl_server.num_proxied_requests(internals.agl_client(self._trainer))
        self._num_stale_requests = min(self._num_stale_requests, num_requests) if self._has_settled else num_requests

    def on_models_registered(self, manager: internals.RolloutManager) -> None:
        """Have the server hold every carried rollout; at the first call, decide about all that were restored."""
        self.groups.default_config = internals.default_rollout_config(manager)
        is_first = not self._has_settled
        if is_first:
            self._settle()
            self._has_settled = True
        self.groups.create_missing(internals.carry_over(self._trainer), manager)
        if is_first and self._restored_step is not None:
            log.info(self.outcome.text(self._restored_step))
        elif is_first and self.outcome.reclaimed:
            log.info("Removed %d rollouts of earlier starts of this run from the server.", len(self.outcome.reclaimed))

    def on_answer(self, date_header: str | None) -> None:
        """Keep the proof of life fresh with the `Date` header of an answer of the server."""
        self._proof.seen(date_header)

    def on_created(self, response: Any) -> None:
        """Note when this life began to create rollouts; `response` is the server's answer to a creation."""
        if self._proof.has_begun:
            return
        with suppress(ValueError, TypeError, KeyError):  # whoever reads the answer next complains
            self._proof.begin(min(float(record["status"]["created_at"]) for record in response.json()))

    def on_found(self) -> None:
        """Say that an outage is over, if there was one: the server has shown that it knows a rollout."""
        absence = self.patience.take_absence()
        if absence is not None:
            log.warning("%s and answers again. Training goes on.", absence)

    def rerun(self, manager: Any, rollout_id: str) -> str:
        """Run a rollout again that failed, or brought nothing to train from, perhaps for want of a trainer or server.

        Returns:
            Its new id; the trainer's record of it is changed in place.
        """
        [item] = [item for item in self._active(manager) if item.rollout_id == rollout_id]
        was_served = self.groups.standing(rollout_id) is Standing.SERVED
        self.groups.settle({rollout_id: Fate.RERUN}, doubted=False)
        self.groups.create_missing([item], manager)
        if self._config.reclaim and not was_served:  # an id that is served may be another run's on the server
            agl_server.delete_rollouts(internals.agl_client(self._trainer), [rollout_id])
        log.info(
            "Rollout %s failed, or brought nothing to train from, around a death or an outage: run again as %s.",
            rollout_id,
            item.rollout_id,
        )
        self.outcome.rerun.append(rollout_id)
        return item.rollout_id

    def recover(self, manager: Any, rollout_id: str) -> str:
        """Have a server that does not know a rollout hold what is waited for: it was restarted.

        Args:
            manager: The one of this step, with models registered.
            rollout_id: The rollout that the server does not know.

        Returns:
            The id that the rollout has now; the trainer's record of it is changed in place.

        Raises:
            ServerError: The server did not answer in time, or refuses.
        """
        absence = self.patience.take_absence()
        active = self._active(manager)
        [item] = [item for item in active if item.rollout_id == rollout_id]
        client = internals.agl_client(self._trainer)
        manager.client.register_again()  # before anything is created: an agent that finds no model fails
        fates = self._fates_later(active, agl_server.list_rollouts(client))
        if not fates:
            return item.rollout_id
        self._proof.forget()
        self.groups.settle(fates, doubted=False)
        num_created = len(self.groups.create_missing(active, manager))
        num_lost = list(fates.values()).count(Fate.CREATED)
        waiting = f", {num_lost - num_created} to be created when there is room" if num_lost > num_created else ""
        log.warning(
            "%s and came back without the rollouts of this run: %d created again under new ids%s, "
            "%d that had ended kept with their events. Training goes on.",
            absence or f"The agl-server at {client.base_url} was restarted",
            num_created,
            waiting,
            len(fates) - num_lost,
        )
        return item.rollout_id

    # --- decisions --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ask the server about everything that was restored, and delete what no checkpoint holds."""
        items = self.all_carried()
        client = internals.agl_client(self._trainer)
        records = agl_server.list_rollouts(client)
        ids = [item.rollout_id for item in items if self.groups.standing(item.rollout_id) is Standing.UNDECIDED]
        tracked, policy = self.groups.tracked, self._policy
        fates = {name: fate_at_start(tracked[name].finished, records.get(name), policy) for name in ids}
        self.groups.settle(fates, doubted=True)
        self.outcome.take(fates)
        self.outcome.reclaimed += self._reclaimable(items, records)
        if not any(map(self.groups.owns, records.values())):  # another server, with a clock of its own
            self._proof.forget()
        agl_server.delete_rollouts(client, self.outcome.reclaimed)

    def _reclaimable(self, items: Iterable[Any], records: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the ids of this run's rollouts on the server that nothing waits for: in no checkpoint, or replaced."""
        if not self._policy.reclaim:
            return []
        ids = {item.rollout_id for item in items}
        kept = {rollout_id for rollout_id in ids if self.groups.standing(rollout_id) is not Standing.TO_CREATE}
        return [
            rollout_id for rollout_id, record in records.items() if rollout_id not in kept and self.groups.owns(record)
        ]

    def _fates_later(self, active: Iterable[Any], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Fate]:
        """Decide about every rollout that is waited for, of waiting groups too, and that the server does not know."""
        fates: dict[str, Fate] = {}
        for item in self.groups.everything(active):
            known = self.groups.tracked.get(item.rollout_id)
            if known is not None and not known.is_read and known.standing is Standing.ON_SERVER:
                fates[item.rollout_id] = fate_later(known.finished, records.get(item.rollout_id))
        return {rollout_id: fate for rollout_id, fate in fates.items() if fate is not Fate.LEFT}

    def _active(self, manager: Any) -> list[Any]:
        """Return the `EnqueuedRollout`s that the trainer carries and that the manager has created in this step."""
        carried = internals.carry_over(self._trainer)
        ids = {item.rollout_id for item in carried}
        return [*carried, *(item for item in manager.enqueued if item.rollout_id not in ids)]


def _count(ids: list[str]) -> str:
    shown = ", ".join(ids[:MAX_IDS])
    more = ", …" if len(ids) > MAX_IDS else ""
    return f"{len(ids)} ({shown}{more})" if ids else "0"
