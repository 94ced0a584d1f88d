"""The trainer extension: overrides only. What they do is in `save`, `resume`, `session` and `rollout_manager`.

class MyTrainer(AsyncCheckpointMixin, AgentLightningRayPPOTrainer): ...     # a trainer of your own
AsyncCheckpointTrainer                                                      # the mixin on agent-lightning's
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wrapt

from agl_async_ckpt._logging import ensure_visible
from agl_async_ckpt.resume import load_checkpoint
from agl_async_ckpt.rollout_manager import extended_manager
from agl_async_ckpt.save import save_checkpoint
from agl_async_ckpt.session import Session

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class CheckpointOverrides(_Trainer):
    """The overrides themselves. In a class of its own so that a trainer which is extended twice runs them once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the trainer, then validate settings and inputs.

        Raises:
            ConfigError: `agentlightning.async_checkpoint` holds an unknown key or a value that is not allowed.
            ActivationError: The sampler has no state, or agent-lightning writes our file itself.
        """
        ensure_visible()
        super().__init__(*args, **kwargs)
        self._async_ckpt = Session(self)

    def _save_checkpoint(self) -> Any:
        return save_checkpoint(self, self._async_ckpt, super()._save_checkpoint)

    def _load_checkpoint(self) -> Any:
        return load_checkpoint(self, self._async_ckpt, super()._load_checkpoint)

    def _make_rollout_manager(self, manager_cls: Any) -> Any:
        session = self._async_ckpt
        if session.active:
            manager_cls = extended_manager(
                manager_cls, session.in_flight, lambda manager: session.settle(self, manager)
            )
        return super()._make_rollout_manager(manager_cls)

    def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
        session = self._async_ckpt
        if not session.active:
            return super()._next_train_batch_dict_for_rollout()
        session.before_pull(self)
        batch = super()._next_train_batch_dict_for_rollout()
        session.after_pull(self, batch)
        return batch

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        session = self._async_ckpt
        if session.active:
            session.restore_rng()
        result = super()._train_step(*args, **kwargs)
        if session.active and result is not None:  # None: no trainable batch, the step number advances without a save
            result[0].update(session.metrics(self))
        return result


class AsyncCheckpointMixin(CheckpointOverrides):
    """Exact input checkpoints for a trainer of your own; list it before the trainer class it extends.

    Example:
        class MyTrainer(AsyncCheckpointMixin, AgentLightningRayPPOTrainer): ...
    """


def extend(trainer_cls: type) -> type:
    """Return `trainer_cls` with exact input checkpoints, under its own name."""
    namespace = {"__module__": trainer_cls.__module__, "__doc__": trainer_cls.__doc__}
    return type(trainer_cls.__name__, (CheckpointOverrides, trainer_cls), namespace)


def _build_trainer() -> type:
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    namespace = {"__module__": __name__, "__doc__": "`AsyncCheckpointMixin` on agent-lightning's trainer."}
    return type("AsyncCheckpointTrainer", (AsyncCheckpointMixin, AgentLightningRayPPOTrainer), namespace)


if TYPE_CHECKING:
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    class AsyncCheckpointTrainer(AsyncCheckpointMixin, AgentLightningRayPPOTrainer):
        """`AsyncCheckpointMixin` on agent-lightning's trainer."""
else:
    # Importing agent-lightning's trainer takes seconds; the class is built when it is called, subclassed or inspected.
    AsyncCheckpointTrainer = wrapt.LazyObjectProxy(_build_trainer)
