"""The rollout managers of agent-lightning, extended for in-flight rollouts.

Requests are noted and tagged as they are posted. What a rollout has left is kept once it has ended and its hook has
run. While the server knows a rollout it is asked, and is right; what is kept answers when it does not. A rollout whose
end proves nothing is run again, and so is one that the server has lost before its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.carry_over import Tracked
from agl_async_ckpt.agl.in_flight.keeper import RolloutKeeper
from agl_async_ckpt.agl.in_flight.kept_events import has_answer, has_reward, kept_events, measured, with_event
from agl_async_ckpt.agl.in_flight.server_errors import named, server_error
from agl_async_ckpt.agl.in_flight.standing import Fate, Standing
from agl_async_ckpt.exceptions import UnknownRolloutError

if TYPE_CHECKING:
    from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager as _Manager
else:
    _Manager = object

MAX_LOSSES = 5
"""How often a rollout may be unknown right after it was created again: two servers behind one address never agree."""


class InFlightRolloutManager(_Manager):
    """The extension of a rollout manager that works for one life.

    Attributes:
        _async_ckpt_keeper: What is known of the rollouts, and what is done about them.
        enqueued: The `EnqueuedRollout`s that this manager has created.
    """

    _async_ckpt_keeper: RolloutKeeper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client = self._async_ckpt_keeper.client(self.client)
        self.enqueued: list[Any] = []
        self._hooks_act = internals.hooks_act(self)
        self._looks = False
        self._hooked: tuple[str, Any] | None = None
        self._fresh: tuple[str, tuple[list[Any], list[Any]]] | None = None

    def register_model(self, server_addresses: list[str]) -> Any:
        self._async_ckpt_keeper.on_models_deleted()
        models = super().register_model(server_addresses)
        self._async_ckpt_keeper.on_models_registered(self)
        return models

    def _create_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        self.enqueued = super()._create_rollouts(*args, **kwargs)
        return self.enqueued

    def _get_rollout(self, rollout_id: str) -> Any:
        for _ in range(MAX_LOSSES):
            known = self._async_ckpt_keeper.groups.tracked.get(rollout_id)
            self._looks = True
            try:
                return self._look_at(rollout_id, known)
            except UnknownRolloutError:
                if known is None:
                    raise
            finally:
                self._looks = False
            rollout_id = self._async_ckpt_keeper.recover(self, rollout_id)
        raise server_error(
            self.client.base_url,
            f"did not know rollout {rollout_id} right after it was created, {MAX_LOSSES} times",
            act="One server has to answer all requests at this address.",
        )

    def _look_at(self, rollout_id: str, known: Tracked | None) -> Any:
        self._fresh = None
        if known is not None and known.standing is Standing.SERVED and known.finished is not None:
            rollout = internals.rollout_record(known.finished.record)
        else:
            with named(self.client, f"rollout {rollout_id}"):
                rollout = super()._get_rollout(rollout_id)
            self._async_ckpt_keeper.on_found()
        if known is None or not internals.has_ended(rollout):
            return rollout
        if known.doubted and internals.has_failed(rollout):
            return self._get_rollout(self._async_ckpt_keeper.rerun(self, rollout_id))
        try:
            self._run_hook(rollout)
            triplets = self._keep(rollout, known)
        except UnknownRolloutError:
            known.num_vanished += 1
            if known.num_vanished < MAX_LOSSES:
                raise
            raise server_error(
                self.client.base_url,
                f"did not know rollout {rollout_id} right after it had ended, {MAX_LOSSES} times",
                act="Look for what deletes it: a hook may.",
            ) from None
        if known.doubted and not self._is_proven(known, triplets):
            return self._get_rollout(self._async_ckpt_keeper.rerun(self, rollout_id))
        known.doubted = False
        return rollout

    def _run_hook(self, rollout: Any) -> None:
        # Here, and not when the loop calls for it: a server that is lost meanwhile is dealt with as any loss is.
        # The loop reads the state before it does: a hook may change what it is given.
        given = rollout.model_copy(deep=True) if internals.calls_hooks(self) else rollout
        if internals.has_failed(rollout):
            super()._run_failed_hook(given)
        else:
            super()._run_succeeded_hook(given)
        self._hooked = rollout.rollout_id, given

    def _has_run(self, rollout: Any) -> bool:
        """Tell whether the hook of a rollout has just run; what it has changed shows from here on."""
        if self._hooked is None or rollout.rollout_id != self._hooked[0]:
            return False
        vars(rollout).update(vars(self._hooked[1]))
        return True

    def _run_succeeded_hook(self, rollout: Any) -> None:
        if not self._has_run(rollout):
            super()._run_succeeded_hook(rollout)

    def _run_failed_hook(self, rollout: Any) -> None:
        if not self._has_run(rollout):
            super()._run_failed_hook(rollout)

    def _keep(self, rollout: Any, known: Tracked) -> list[Any]:
        """Fetch what a rollout has left, if it is asked for; return its triplet events if it is doubted."""
        rollout_id = rollout.rollout_id
        wanted = self._async_ckpt_keeper.groups.wants_events(rollout_id, hooks_act=self._hooks_act)
        is_doubted = known.doubted and known.finished is None
        if known.standing is not Standing.SERVED and (wanted or is_doubted or self._is_read_at_once(known)):
            raw, triplets = self._fetch_rollout_events(rollout_id)
            self._fresh = rollout_id, (raw, triplets)
            if wanted and not self._is_read_at_once(known):
                is_worth = not internals.has_failed(rollout) and has_answer(triplets)
                self._async_ckpt_keeper.groups.keep(rollout_id, *measured(rollout, raw, triplets), is_worth=is_worth)
            return triplets
        return kept_events(known.finished, format="triplet") if known.doubted and known.finished else []

    def _is_read_at_once(self, known: Tracked) -> bool:
        """Tell whether the loop builds the sample of a rollout next: nobody waits for a sibling."""
        return internals.rollouts_per_group(self) == 1 or not known.is_train

    def _is_proven(self, known: Tracked, triplets: list[Any]) -> bool:
        """Tell whether a success is its own, as far as can be seen.

        A reward may still come to the server that has the rollout; to what is served only a hook could post one,
        and that has run.
        """
        lacks_reward = known.finished is not None and not has_reward(known.finished)
        return has_answer(triplets) and not (known.standing is Standing.SERVED and lacks_reward)

    def _fetch_rollout_events(self, rollout_id: str) -> tuple[list[Any], list[Any]]:
        if self._fresh is None or self._fresh[0] != rollout_id:
            return super()._fetch_rollout_events(rollout_id)
        (_, events), self._fresh = self._fresh, None  # of a moment ago; built once
        if rollout_id in self._async_ckpt_keeper.groups.tracked:
            self._async_ckpt_keeper.groups.tracked[rollout_id].is_read = True
        return events

    def _get_events(self, rollout_id: str, **kwargs: Any) -> list[Any]:
        known = self._async_ckpt_keeper.groups.tracked.get(rollout_id)
        if known is not None and known.finished is not None and known.standing is Standing.SERVED:
            return kept_events(known.finished, **kwargs)
        try:
            with named(self.client, f"rollout {rollout_id}"):
                events = super()._get_events(rollout_id, **kwargs)
        except UnknownRolloutError:
            if self._looks or known is None or known.finished is None:
                raise
            self._async_ckpt_keeper.groups.settle({rollout_id: Fate.SERVED}, doubted=False)
            return kept_events(known.finished, **kwargs)
        if not kwargs.get("format") and not kwargs.get("event_type"):
            self._async_ckpt_keeper.groups.last_read = rollout_id, list(events)
        return events

    def _post_event(self, rollout_id: str, attempt_id: str, event: Any) -> Any:
        known = self._async_ckpt_keeper.groups.tracked.get(rollout_id)
        if known is None or known.standing is not Standing.SERVED:
            try:
                with named(self.client, f"rollout {rollout_id}"):
                    posted = super()._post_event(rollout_id, attempt_id, event)
                if self._async_ckpt_keeper.groups.last_read[0] == rollout_id:
                    self._async_ckpt_keeper.groups.last_read[1].append(posted)
                return posted
            except UnknownRolloutError:
                if known is None or known.finished is None:
                    raise
                self._async_ckpt_keeper.groups.settle({rollout_id: Fate.SERVED}, doubted=False)
        assert known.finished is not None, "what is served is kept"
        posted = internals.recorded_event(rollout_id, attempt_id, event)
        self._async_ckpt_keeper.groups.keep(rollout_id, *with_event(known.finished, posted), is_worth=known.is_worth)
        return posted

    def _delete_rollout(self, rollout_id: str) -> None:
        known = self._async_ckpt_keeper.groups.tracked.get(rollout_id)
        if known is None or known.standing is not Standing.SERVED:
            super()._delete_rollout(rollout_id)
        self._async_ckpt_keeper.groups.forget(rollout_id)
