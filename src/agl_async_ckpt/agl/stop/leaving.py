"""What a trainer that stops on request does about its rollouts: nothing of this run is left on the server.

Their agents would go on without a model, and fail, or burn what they cost. What has ended goes into the checkpoint
first; the rest is created again by the resume, from the same requests, as after a restart of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.carry_over import InFlight
from agl_async_ckpt.agl.in_flight.kept_events import has_answer, has_reward, measured
from agl_async_ckpt.agl.in_flight.patience import Patience
from agl_async_ckpt.agl.in_flight.server_client import ServerClient
from agl_async_ckpt.agl.in_flight.server_errors import named
from agl_async_ckpt.agl.in_flight.standing import Standing
from agl_async_ckpt.exceptions import ServerError

if TYPE_CHECKING:
    from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase as _Manager
else:
    _Manager = object

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long to wait for an answer: the machine may have seconds left, and the checkpoint is exact without one."""


class ValidationLeft(BaseException):
    """A validation ends because a stop is asked for. Past every `except Exception` on its way."""


class Validations:
    """The validations of a trainer whose rollouts nobody tracks, because it trains synchronously.

    Attributes:
        left: Ids of the rollouts of one that was left.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        """Note nothing yet; `on_wait` is called before each look at a rollout, and raises ValidationLeft."""
        self.on_wait = on_wait
        self.left: set[str] = set()


class LeavableManager(_Manager):
    """The extension of a rollout manager whose validations can be left, where training is synchronous."""

    _async_ckpt_validations: Validations

    def _create_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        self.enqueued = super()._create_rollouts(*args, **kwargs)
        return self.enqueued

    def _get_rollout(self, rollout_id: str) -> Any:
        try:
            self._async_ckpt_validations.on_wait()
        except ValidationLeft:
            self._async_ckpt_validations.left.update(item.rollout_id for item in self.enqueued)
            raise
        return super()._get_rollout(rollout_id)


def brief_client(trainer: internals.Trainer) -> ServerClient:
    """Return a client that asks once, past whatever waits for a server that is away."""
    client = internals.agl_client(trainer)
    plain = client.__wrapped__ if isinstance(client, ServerClient) else client
    return ServerClient(plain, Patience(0.0, answer_s=ANSWER_S), InFlight())


def keep_ended(trainer: internals.Trainer, in_flight: InFlight) -> None:
    """Fetch the events of rollouts that have ended since the last look, for the checkpoint that follows.

    Without an answer of the server the checkpoint is as good: it holds their requests.

    Their hooks have not run, and may take longer than the machine has: those of the resume do. What hooks could change
    on the server only is not kept, and runs again.
    """
    if in_flight.mode != "keep":
        return
    try:
        client = brief_client(trainer)
        records = agl_server.list_rollouts(client)
        items = in_flight.everything(internals.carry_over(trainer))
        ended = [item.rollout_id for item in items if _is_to_keep(in_flight, records.get(item.rollout_id), item)]
        if not ended:
            return
        manager = internals.rollout_manager(trainer)
        manager.client.close()
        manager.client = client
        for rollout_id in ended:
            with named(client, f"rollout {rollout_id}"):
                _keep(in_flight, manager, rollout_id, records[rollout_id])
    except ServerError as error:
        log.warning("What has ended in flight is not in the checkpoint, only its requests are: %s", error)


def delete_rollouts(
    trainer: internals.Trainer, rollout_ids: Iterable[str], owns: Callable[[Mapping[str, Any]], bool] = lambda _: False
) -> None:
    """Delete rollouts of this run from the server; their agents end at their next call.

    Call it when the checkpoint is published. If the server does not answer they are left: a resume adopts them.

    Args:
        trainer: The trainer.
        rollout_ids: Those that nobody waits for any more.
        owns: Tells of a record of the server whether it goes, too.
    """
    ours = frozenset(rollout_ids)
    try:
        client = brief_client(trainer)
        records = agl_server.list_rollouts(client)
        found = [rollout_id for rollout_id, record in records.items() if rollout_id in ours or owns(record)]
        agl_server.delete_rollouts(client, found)
        log.info("Removed %d rollouts of this run from the server; a resume creates again what it needs.", len(found))
    except ServerError as error:
        log.warning("The rollouts of this run may still be on the server; a resume adopts them: %s", error)


def _is_to_keep(in_flight: InFlight, record: Mapping[str, Any] | None, item: Any) -> bool:
    known = in_flight.tracked.get(item.rollout_id)
    return (
        record is not None
        and record["status"]["state"] == "succeeded"
        and known is not None
        and known.standing is not Standing.SERVED
        and in_flight.wants_events(item.rollout_id, hooks_act=False)
    )


def _keep(in_flight: InFlight, manager: internals.RolloutManager, rollout_id: str, record: Mapping[str, Any]) -> None:
    raw, triplets = internals.fetch_events(manager, rollout_id)
    finished, num_bytes = measured(internals.rollout_record(record), raw, triplets)
    hooks_act = internals.hooks_act(manager)
    if hooks_act and in_flight.tracked[rollout_id].finished is None and has_reward(finished):
        return  # a judge asked by a hook may correct this reward on the server itself, which is about to lose it
    in_flight.keep(rollout_id, finished, num_bytes, is_worth=hooks_act or has_answer(triplets))
