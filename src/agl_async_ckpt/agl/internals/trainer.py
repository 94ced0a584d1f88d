"""agent-lightning's trainer: what it has buffered and in flight."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from agl_async_ckpt.agl.internals.protocols import Trainer, TrainerSection
from agl_async_ckpt.state import Batch


def is_async(trainer: Trainer) -> bool:
    """Tell whether the trainer pulls and trains asynchronously."""
    return bool(trainer.is_async)


def starts_training(section: TrainerSection) -> bool:
    """Tell whether a `fit()` trains; else it is an evaluation.

    agent-lightning reads `val_only` only where it validates before training: without that validation it trains.

    Args:
        section: The config's `trainer`.
    """
    return not (section.get("val_before_train", True) and section.get("val_only", False))


def async_batch_size(trainer: Trainer) -> int:
    """Return A, the prompt groups in flight while a step waits (async_train_batch_size)."""
    return int(trainer.config.agentlightning.async_rollout.async_train_batch_size)


def train_batch_size(trainer: Trainer) -> int:
    """Return B, the prompt groups that a step trains."""
    return int(trainer.config.data.train_batch_size)


def group_size(trainer: Trainer) -> int:
    """Return the number of rollouts of a prompt group."""
    return int(trainer.config.actor_rollout_ref.rollout.n)


def has_hooks(trainer: Trainer) -> bool:
    """Tell whether the config names hooks of the user's, which may post rewards."""
    return bool(trainer.config.agentlightning.get("hooks"))


def trained_ids(result: Any) -> set[str] | None:
    """Return the data ids of the prompt groups of which a step has used a sample; None if the trainer hides them.

    Args:
        result: What `_train_step` returned: None, or (metrics, training batch) with the data ids of its rows as `uid`.
    """
    ids = () if result is None else result[1].non_tensor_batch.get("uid")
    return None if ids is None else set(ids)


def buffered_batch(trainer: Trainer) -> Batch | None:
    """Return the rows that were pulled and not yet enqueued.

    `_train_dataloader_buf` is set on the first partial pull only; no version declares it in `__init__`.
    """
    return getattr(trainer, "_train_dataloader_buf", None)


def set_buffered_batch(trainer: Trainer, batch: Batch | None) -> None:
    """Replace the buffered rows; `fit()` does not reset them, so a second `fit()` would begin with the old tail."""
    trainer._train_dataloader_buf = batch


def joined_column(columns: Sequence[Any]) -> Any:
    """Join columns of loader batches as a pull does, whose function for it is inside a method.

    Raises:
        TypeError, ValueError, RuntimeError: Whatever the pull would raise.
    """
    import numpy as np
    import torch

    if isinstance(columns[0], torch.Tensor):
        return torch.cat(list(columns), dim=0)
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(list(columns), axis=0)
    return [item for column in columns for item in column]


def carry_over(trainer: Trainer) -> list[Any]:
    """Return the enqueued and unfinished `EnqueuedRollout`s in the trainer's order; there is no public reader."""
    return trainer._carry_over_rollouts


def set_carry_over(trainer: Trainer, rollouts: list[Any]) -> None:
    """Replace the carry-over: the next pull counts its groups, and the next rollout waits for them."""
    trainer._carry_over_rollouts = rollouts


def agl_client(trainer: Trainer) -> Any:
    """Return the trainer's client of the agl-server; it is made on first use, by this method only."""
    return trainer._ensure_agl_client()


def enqueued_rollout(fields: Mapping[str, Any]) -> Any:
    """Build agent-lightning's `EnqueuedRollout`; fields that this version does not know are left out by pydantic."""
    from agentlightning.verl.agl_rollout_manager import EnqueuedRollout

    return EnqueuedRollout(**copy.deepcopy(dict(fields)))


def renew_enqueued(item: Any, rollout_id: str, enqueue_time: float) -> None:
    """Give an `EnqueuedRollout` the id of its re-creation, in place; step, sample index and data id stay."""
    item.rollout_id = rollout_id
    item.enqueue_time = enqueue_time
    item.running_at = None
    item.finished_at = None


def found_no_rows(error: RuntimeError) -> bool:
    """Tell whether a step has died because the prompt groups that it took brought no row to train.

    agent-lightning has no type of its own for it. It raises when these groups are read, deleted, and no longer carried
    over.
    """
    return "zero training rows" in str(error)
