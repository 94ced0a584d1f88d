"""The consuming side: OpenRLHF's training actor and the trainer that starts both actors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
import wrapt

from agl_async_ckpt._logging import ensure_visible
from agl_async_ckpt.openrlhf import internals
from agl_async_ckpt.openrlhf.client_state import KEY, LOADER_KEY, materialise, read_entry
from agl_async_ckpt.openrlhf.settings import announcement

if TYPE_CHECKING:
    _TrainingActor = _PPOTrainerAsync = Any
else:
    _TrainingActor = internals.plain_class(internals.ASYNC_MODULE, "TrainingActor")
    _PPOTrainerAsync = internals.plain_class(internals.ASYNC_MODULE, "PPOTrainerAsync")

logger = logging.getLogger(__name__)


class _SavingGroup(wrapt.ObjectProxy):
    """The actor models, as the trainer sees them: what is saved is materialised, at that moment and not before.

    Regular and best checkpoints both go through here.
    """

    def async_run_method(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        if method_name == "save_checkpoint" and kwargs.get("client_states"):
            # By reference: every rank gets it, and it may be large.
            kwargs["client_states"] = ray.put(materialise(kwargs["client_states"]))
        return self.__wrapped__.async_run_method(method_name, *args, **kwargs)


class CheckpointedTrainingActor(_TrainingActor):
    """OpenRLHF's `TrainingActor`, whose checkpoints hold the boundary of the batch that was trained last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ensure_visible()
        super().__init__(*args, **kwargs)
        self.actor_model_group = _SavingGroup(self.actor_model_group)

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return the client states of the checkpoint, with our state in the loader's place: that is what OpenRLHF
        hands to the generator.

        Raises:
            StateFormatError: Our entry is there and cannot be used.
        """
        states: dict[str, Any] = dict(super().init_checkpoint_states())
        entry = states.pop(KEY, None)
        where = str(internals.actor_checkpoint(self.args))
        if entry is not None:
            states[LOADER_KEY] = read_entry(entry, where, states["global_step"])
        elif states.get("global_step", 0) > 0:
            logger.warning(
                "%s holds no input state: it was saved without this extension. Samples that were generated and not "
                "trained by step %d are skipped, and a finished episode may be trained again.",
                where,
                states["global_step"],
            )
        return states


class CheckpointedPPOTrainerAsync(_PPOTrainerAsync):
    """OpenRLHF's `PPOTrainerAsync`, which starts the actors of this package."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        ensure_visible()
        version = internals.require_supported()
        internals.use_actors(
            generator=internals.actor_class(
                "agl_async_ckpt.openrlhf.generator",
                "CheckpointedGenerateSamplesActor",
                internals.GENERATOR_METHODS,
            ),
            trainer=internals.actor_class(__name__, "CheckpointedTrainingActor", internals.TRAINER_METHODS),
        )
        super().__init__(pretrain, strategy, *args, **kwargs)
        logger.info("%s", announcement(strategy.args, version))
