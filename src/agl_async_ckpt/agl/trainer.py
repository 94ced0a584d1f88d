"""The trainer extension: overrides only. What they do is in `extension`, `life`, `resume` and `save`.

class MyTrainer(AsyncCheckpointMixin, AgentLightningRayPPOTrainer): ...     # a trainer of your own
AsyncCheckpointTrainer, in a module of its own                              # the mixin on agent-lightning's
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from agl_async_ckpt._logging import ensure_visible
from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.extension import Extension
from agl_async_ckpt.agl.resume import load_checkpoint
from agl_async_ckpt.agl.save import save_checkpoint
from agl_async_ckpt.agl.stop.leaving import keep_ended
from agl_async_ckpt.exceptions import ActivationError, TrainingStopped

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object

log = logging.getLogger(__name__)

FRAMEWORKS = ("agentlightning", "verl")


def _do_step(trainer: CheckpointOverrides, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do one training step of `trainer`, and what goes before and after it."""
    extension = trainer._async_ckpt
    extension.step_end.on_step_begins(trainer)
    if extension.life is not None:
        extension.life.on_step()
    result = _train(trainer, partial(train_step, *args, **kwargs))
    extension.on_step_done(trainer, result)  # None: no trainable batch, the step number advances without a save
    extension.step_end.on_step_ends(trainer)
    return result


def _train(trainer: CheckpointOverrides, train_step: Callable[[], Any]) -> Any:
    """Train a step; one that dies of prompt groups of the checkpoint is done again, with the inputs that come next.

    The trainer alone forgets at a restart what was in flight. Put back, inputs of which no agent ever makes a row would
    end every start.
    """
    life = trainer._async_ckpt.life
    from_checkpoint = frozenset() if life is None else life.keeper.groups.restored
    while True:
        restored = from_checkpoint & {item.data_id for item in internals.carry_over(trainer)}
        try:
            return train_step()
        except RuntimeError as error:
            spent = restored - {item.data_id for item in internals.carry_over(trainer)}
            if not spent or not internals.found_no_rows(error):
                raise
            log.warning(
                "Step %d: the %d prompt groups that were taken brought no row to train, %d of them from the "
                "checkpoint. They are left out, and the step goes on with the inputs that come next.",
                trainer.global_steps,
                internals.train_batch_size(trainer),
                len(spent),
            )


class CheckpointOverrides(_Trainer):
    """The overrides themselves. In a class of its own so that a trainer which is extended twice runs them once."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class in which the framework's own methods come first.

        Raises:
            ActivationError: The mixin is listed after the trainer class, so that none of its overrides would run.
        """
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base is CheckpointOverrides:
                return
            if base.__module__.partition(".")[0] in FRAMEWORKS and not issubclass(base, CheckpointOverrides):
                raise ActivationError(
                    f"{cls.__qualname__} lists AsyncCheckpointMixin after {base.__name__}: no checkpoint would hold "
                    "the input position.",
                    act=f"Write class {cls.__name__}(AsyncCheckpointMixin, {base.__name__}).",
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the trainer, then validate settings and inputs.

        Raises:
            ConfigError: `agentlightning.async_checkpoint` holds an unknown key or a value that is not allowed.
            ActivationError: The sampler has no state, or agent-lightning writes our file itself.
            UnencodableValueError: The state of the sampler or of the data set holds what no checkpoint can hold.
        """
        ensure_visible()
        super().__init__(*args, **kwargs)
        self._async_ckpt = Extension(self, lambda: self._save_checkpoint())

    def fit(self) -> Any:
        """Train; the output folder is this trainer's alone until the end.

        Raises:
            TrainingStopped: A stop was asked for; what was trained is saved.
        """
        extension, step_end = self._async_ckpt, self._async_ckpt.step_end
        step_end.on_fit_begins()
        # Attributes of the instance, which the loop finds first: methods of a trainer of one's own are followed whether
        # they call `super()` or not.
        own_step, own_manager = self._train_step, self._make_rollout_manager
        self._train_step = partial(_do_step, self, own_step)
        self._make_rollout_manager = lambda manager_cls: own_manager(extension.manager_class(manager_cls))
        try:
            result = super().fit()
            step_end.on_loop_ends(self)
            extension.on_training_done()
            return result
        except TrainingStopped as error:
            # Without its frames, which hold agent-lightning's trackers open: a run that stops is finished there.
            stopped = error.with_traceback(None)
            if stopped.saved:
                internals.finish_background_save(self)
            extension.leave_rollouts(self, saved=stopped.saved)
            step_end.answer()
        finally:
            del self._train_step, self._make_rollout_manager
            step_end.put_freq_back()
            extension.leave_folder()
        raise stopped

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        if "_train_step" not in vars(self):  # in a `fit` of one's own that does not call `super()`
            return _do_step(self, super()._train_step, *args, **kwargs)
        result = super()._train_step(*args, **kwargs)
        self._async_ckpt.add_metrics(result)  # here, so that a subclass finds them in what it gets
        return result

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        return self._async_ckpt.step_end.validate(self, partial(super()._validate, *args, **kwargs))

    def _save_checkpoint(self) -> Any:
        life, step_end = self._async_ckpt.life, self._async_ckpt.step_end
        if life is not None and step_end.request is not None:
            keep_ended(self, life.keeper.groups)
        result = save_checkpoint(self, self._async_ckpt, super()._save_checkpoint)
        step_end.on_saved(self)
        return result

    def _load_checkpoint(self) -> Any:
        return load_checkpoint(self, self._async_ckpt, super()._load_checkpoint)

    def _make_rollout_manager(self, manager_cls: Any) -> Any:
        if "_make_rollout_manager" not in vars(self):  # in a `fit` of one's own, as above
            manager_cls = self._async_ckpt.manager_class(manager_cls)
        return super()._make_rollout_manager(manager_cls)

    def _rollout(self, *args: Any, **kwargs: Any) -> Any:
        self._async_ckpt.stand_back_without_life()
        if self._async_ckpt.life is not None:
            self._async_ckpt.life.keeper.on_rollout()
        return super()._rollout(*args, **kwargs)

    def _ensure_agl_client(self) -> Any:
        life, client = self._async_ckpt.life, super()._ensure_agl_client()
        return client if life is None else life.keeper.client(client)

    def _pause_and_drain_gateway(self, *args: Any, **kwargs: Any) -> Any:
        life = self._async_ckpt.life
        with nullcontext() if life is None else life.keeper.draining():
            return super()._pause_and_drain_gateway(*args, **kwargs)

    def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
        life = self._async_ckpt.life
        if life is not None:
            life.on_pull()
        batch = super()._next_train_batch_dict_for_rollout()
        if life is not None:  # where the pull by size is one's own and calls no `super()`
            life.check_first_pull(batch)
        return batch

    def _next_train_batch_dict_with_size(self, size: int) -> dict[str, Any]:
        batch = super()._next_train_batch_dict_with_size(size)  # a trainer of one's own may pull several times a step
        self._async_ckpt.on_pulled(self, batch)
        return batch


class AsyncCheckpointMixin(CheckpointOverrides):
    """Exact input checkpoints for a trainer of your own; list it before the trainer class it extends.

    Example:
        class MyTrainer(AsyncCheckpointMixin, AgentLightningRayPPOTrainer): ...
    """


def extend(trainer_cls: type) -> type:
    """Return `trainer_cls` with exact input checkpoints, under its own name."""
    return internals.with_mixin(trainer_cls, CheckpointOverrides)
