"""Synchronous training: untouched, but for a checkpoint of an asynchronous run whose samples it would skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.openrlhf import internals
from agl_async_ckpt.openrlhf.client_state import KEY, read_entry

if TYPE_CHECKING:
    _PPOTrainer = Any
else:
    _PPOTrainer = internals.plain_class(internals.SYNC_MODULE, "PPOTrainer")


class GuardedPPOTrainer(_PPOTrainer):
    """OpenRLHF's `PPOTrainer`, which does not resume where it would skip samples or repeat an episode."""

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Return the client states of the checkpoint.

        Raises:
            StateMismatchError: It holds generated samples, or a finished episode.
            StateFormatError: Our entry is there and cannot be used.
        """
        states: dict[str, Any] = dict(super().init_checkpoint_states())
        entry = states.pop(KEY, None)
        if entry is not None:
            where = str(internals.actor_checkpoint(self.args))
            state = read_entry(entry, where, states["global_step"])
            if state.num_buffered or state.exhausted:
                raise StateMismatchError(
                    f"{where} was saved by an asynchronous run after step {state.global_step}, with "
                    f"{state.num_buffered} generated samples to be trained and its episode "
                    f"{'finished' if state.exhausted else 'unfinished'}; synchronous training would "
                    f"{'skip them' if state.num_buffered else 'train the episode again'}.",
                    act="Resume with --train.async_enable.",
                )
        return states
