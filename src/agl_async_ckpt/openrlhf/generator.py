"""The producing side: OpenRLHF's generator, whose every queued batch carries the state of its boundary."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import wrapt

from agl_async_ckpt._logging import ensure_visible
from agl_async_ckpt.codec.values import check_batch_encodable
from agl_async_ckpt.folder.mismatch import differences, mismatch
from agl_async_ckpt.openrlhf import internals
from agl_async_ckpt.openrlhf.boundary import Boundary, TailShelf
from agl_async_ckpt.openrlhf.client_state import KEY
from agl_async_ckpt.openrlhf.samples import from_columns, to_columns
from agl_async_ckpt.openrlhf.settings import data_settings, recorded_settings, tail_settings, writes_checkpoints
from agl_async_ckpt.state import Fingerprint, InputState

if TYPE_CHECKING:
    _SamplesGenerator = _GenerateSamplesActor = Any
else:
    _SamplesGenerator = internals.samples_generator_class()
    _GenerateSamplesActor = internals.plain_class(internals.ASYNC_MODULE, "GenerateSamplesActor")

logger = logging.getLogger(__name__)


class PromptStream:
    """One pass over the prompt loader, which knows whether it has ended and never asks a loader again that has.

    OpenRLHF forgets its iterator when it has ended; a call that finds none begins the next pass.
    """

    def __init__(self, prompts: Iterator[Any] | None) -> None:
        self._prompts = prompts

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Any:
        if self._prompts is None:
            raise StopIteration
        try:
            return next(self._prompts)
        except StopIteration:
            self._prompts = None
            raise

    @property
    def drained(self) -> bool:
        """Whether the loader has said that it has no more prompts."""
        return self._prompts is None


class CheckpointedSamplesGenerator(_SamplesGenerator):
    """OpenRLHF's `SamplesGenerator` with a state that can be taken and put back between two batches."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._stream: PromptStream | None = None  # None between two episodes
        internals.set_buffered_samples(self, [])

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Any], float | None, int, bool]:
        """Return one training batch as OpenRLHF does.

        The samples left when the loader drains are handed out too, on versions that would drop them and start another
        pass over the loader within the episode.
        """
        if self._stream is None:
            self._stream = PromptStream(iter(self.prompts_dataloader))
        internals.set_prompt_stream(self, self._stream)
        samples, pass_rate, num_prompts, _ = super().generate_samples(**generate_kwargs)
        ended = self._stream.drained and not self.tail
        if ended:
            self._stream = None
        return samples, pass_rate, num_prompts, ended

    @property
    def tail(self) -> list[Any]:
        """Samples that were generated and not handed out, oldest first."""
        return internals.buffered_samples(self)

    @property
    def exhausted(self) -> bool:
        """Whether the loader has handed out the last prompt of the episode; for use after a batch."""
        return self._stream is None or self._stream.drained

    def restore(self, tail: list[Any], *, exhausted: bool) -> None:
        """Go on where a state was taken, before anything is generated; the loader has its own state back already."""
        internals.set_buffered_samples(self, tail)
        self._stream = PromptStream(None) if exhausted and tail else None


class _BoundaryQueue(wrapt.ObjectProxy):
    """The rollout queue, as the generator sees it: a batch that is put gets the state of its boundary.

    The generator puts a batch right after it has taken it, so what it holds then is what comes after this batch; when
    the trainer saves, generation has run ahead.
    """

    def __init__(self, queue: Any, stamp: Any) -> None:
        super().__init__(queue)
        self._self_stamp = stamp

    def put(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__.put(internals.with_client_state(item, self._self_stamp), *args, **kwargs)


class CheckpointedGenerateSamplesActor(_GenerateSamplesActor):
    """OpenRLHF's `GenerateSamplesActor`, which sends and restores boundaries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ensure_visible()
        internals.require_supported()
        internals.keep_drained_batches(PromptStream)
        super().__init__(*args, **kwargs)
        plain = self.samples_generator
        self.samples_generator = CheckpointedSamplesGenerator(
            strategy=plain.strategy,
            prompts_dataloader=plain.prompts_dataloader,
            eval_dataloader=plain.eval_dataloader,
            tokenizer=plain.tokenizer,
            vllm_engines=plain.vllm_engines,
        )
        self.rollout_queue = _BoundaryQueue(self.rollout_queue, self._stamp)
        self._shelf = TailShelf()
        self._num_episodes_done = 0
        self._tail_checked = False
        self._data_settings = data_settings(self.args, self.prompts_dataloader.dataset)

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore before `fit`: an `InputState`, or the loader's own state from a checkpoint without one.

        Raises:
            StateMismatchError: The state does not fit this run.
        """
        if not isinstance(state_dict, InputState):
            super().load_state_dict(state_dict)
            return
        state, args = state_dict, self.args
        found = differences(state.fingerprint, Fingerprint({**self._data_settings, **tail_settings(args)}))
        if found:
            otherwise = (
                f"without this extension (python -m {internals.TRAIN_COMMAND}), which skips the "
                f"{state.num_buffered} generated samples in it."
            )
            raise mismatch(found, internals.actor_checkpoint(args), otherwise)
        tail = from_columns(state.buffered_batch)
        super().load_state_dict(dict(state.loader_state))
        self.samples_generator.restore(tail, exhausted=state.exhausted)
        self._num_episodes_done = int(state.exhausted and not tail)
        logger.info(
            "Inputs resume after step %d: episode %d, %d generated samples to train first, prompt loader %s.",
            state.global_step,
            state.epoch + self._num_episodes_done,
            len(tail),
            "drained" if state.exhausted else "at its saved position",
        )

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        """Generate, beginning with the next episode if the restored one had been handed out as a whole."""
        super().fit(episode=episode + self._num_episodes_done, total_consumed_prompts=total_consumed_prompts)

    def _stamp(self, client_states: Mapping[str, Any]) -> dict[str, Any]:
        if not writes_checkpoints(self.args):
            return dict(client_states)
        tail = self.samples_generator.tail
        if tail and not self._tail_checked:
            # At the first tail of a run, not at its first checkpoint hours later.
            check_batch_encodable(to_columns(tail))
            self._tail_checked = True
        boundary = Boundary(
            tail=self._shelf.place(tail),
            num_samples=len(tail),
            exhausted=self.samples_generator.exhausted,
            must_match=self._data_settings,
            must_match_tail=tail_settings(self.args),
            recorded=recorded_settings(self.args),
        )
        return {**client_states, KEY: boundary}
