"""Follows the inputs of one trainer life and writes their ledger.

A prompt group is known by (step that enqueued it, place in that step's pull): agent-lightning keeps both through every
resume, while hooks may change a request, and ids change when a rollout is created again. So a pulled row is named once,
and what later comes back of it is named by looking up.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.ledger.entry import End, InputName, ResumeKind, Start, Step
from agl_async_ckpt.ledger.input_id import batch_names, knows_positions, request_name
from agl_async_ckpt.ledger.passes import PassCounter
from agl_async_ckpt.ledger.reader import Ledger, read_ledger
from agl_async_ckpt.ledger.writer import LedgerWriter
from agl_async_ckpt.state import num_rows
from agl_async_ckpt.storage.run_identity import RunIdentity

log = logging.getLogger(__name__)

GroupKey = tuple[int, int]
"""(step that enqueued the prompt group, place in its pull)."""


def key_of(rollout: Any) -> GroupKey:
    """The key of the prompt group of an `EnqueuedRollout` or `CompletedRollout`."""
    return int(rollout.step), int(rollout.sample_idx_in_step)


def _keys(rollouts: Iterable[Any]) -> dict[str, GroupKey]:
    """Data id -> key of the prompt groups of `rollouts`, in order."""
    groups = {rollout.data_id: rollout for rollout in rollouts}
    return {data_id: key_of(rollout) for data_id, rollout in groups.items()}


class Recorder:
    """Writes the ledger of one life.

    Args:
        trainer: The trainer, with its checkpoint loaded.
        output_dir: Its output folder.
        resume: What became of the input position.
        resumed_from: The step folder that was loaded, or None.
        in_flight: Every `EnqueuedRollout` that was put back, oldest first.
        loader_rows: Rows of the pass that the loader has handed out by the loaded position; None if unknown.
        num_ahead: Rows read since then, at the end of the buffered ones.
        run: Identity of the output folder; None to take the ledger's run id, or a new one, and count its lives on.

    Raises:
        StateWriteError: The output folder cannot be written.
    """

    def __init__(
        self,
        trainer: Any,
        output_dir: Path,
        *,
        resume: ResumeKind,
        resumed_from: Path | None,
        in_flight: Sequence[Any],
        loader_rows: int | None,
        num_ahead: int = 0,
        run: RunIdentity | None = None,
    ) -> None:
        self._writer = LedgerWriter(output_dir)
        own = _read(output_dir)
        earlier = [] if own is None else own.starts
        run = run or RunIdentity(earlier[-1].run_id if earlier else uuid.uuid4().hex)
        self._run_id = run.run_id
        # Starts with enabled=false count on here and not in the run file: a number must not come twice.
        next_life = 1 + max((start.life for start in earlier if start.run_id == self._run_id), default=0)
        self._life = max(run.life, next_life)
        self._positions = knows_positions(trainer.train_dataset)
        self._names: dict[GroupKey, InputName] = {}
        is_fork = resumed_from is not None and not resumed_from.parent.samefile(output_dir)
        if in_flight:
            self._names = self._recalled(in_flight, _read(resumed_from.parent) if resumed_from and is_fork else own)
        # Rows that a changed batch size had read ahead come behind the saved ones; the first step counts them as drawn.
        buffered = batch_names(capture.buffered_batch(trainer), 0, with_position=self._positions)
        self._buffered = buffered[: len(buffered) - num_ahead]
        self._in_flight = [self._name(key) for key in _keys(in_flight).values()]
        self._completed: dict[str, GroupKey] = {}
        self._pulled: list[InputName] = []
        loader = trainer.train_dataloader
        start = Start(
            run_id=self._run_id,
            life=self._life,
            step=int(trainer.global_steps),
            epoch=int(trainer.epoch) + 1,  # fit() adds 1 after loading
            resume=resume,
            resumed_from=None if resumed_from is None else str(resumed_from),
            is_fork=is_fork,
            parent_run_id=run.parent_run_id,
            in_flight=tuple(self._in_flight),
            buffered=tuple(self._buffered),
            loader_rows=loader_rows,
            num_rows=len(loader.sampler),
            loader_batch=int(loader.batch_size),
            drop_last=bool(loader.drop_last),
            time=time.time(),
        )
        self._passes = PassCounter(start, num_ahead=num_ahead)
        self._drawn: tuple[tuple[int, int], ...] = ()
        self._last_step = start.step
        self._writer.append(start)

    # --- what the trainer does --------------------------------------------------------------------------------------

    def pulled(self, trainer: Any, batch: Any) -> None:
        """Note what a step has pulled: `batch`, of which the buffered rows come first."""
        step, num_known = int(trainer.global_steps), len(self._buffered)
        buffered = capture.buffered_batch(trainer)
        rest = self._buffered[num_rows(batch) :]
        self._pulled = self._buffered[: num_rows(batch)]
        self._pulled += batch_names(batch, num_known, with_position=self._positions)
        self._buffered = rest + batch_names(buffered, len(rest), with_position=self._positions)
        num_drawn = len(self._pulled) + len(self._buffered) - num_known
        self._drawn = self._passes.draw(num_drawn, epoch=int(trainer.epoch))
        self._names |= {(step, place): name for place, name in enumerate(self._pulled)}

    def completed(self, rollouts: Iterable[Any]) -> None:
        """Note the `CompletedRollout`s that a step has got back."""
        self._completed = _keys(rollouts)

    def step_done(self, trainer: Any, in_flight: Sequence[Any], trained_data_ids: Any) -> None:
        """Write the line of a step.

        Args:
            trainer: The trainer, at the end of `_train_step`.
            in_flight: Every `EnqueuedRollout` that is not trained, oldest first.
            trained_data_ids: (num_rows,) array of the data ids of the training batch; None if there was none.
        """
        used = set() if trained_data_ids is None else set(trained_data_ids.tolist())
        names = {data_id: self._name(key) for data_id, key in self._completed.items()}
        still = _keys(in_flight).values()
        self._in_flight = [self._name(key) for key in still]
        self._writer.append(
            Step(
                run_id=self._run_id,
                life=self._life,
                step=int(trainer.global_steps),
                epoch=int(trainer.epoch),
                pulled=tuple(self._pulled),
                drawn=self._drawn,
                trained=tuple(name for data_id, name in names.items() if data_id in used),
                dropped_by_trainer=tuple(name for data_id, name in names.items() if data_id not in used),
                in_flight=tuple(self._in_flight),
                buffered=tuple(self._buffered),
                loader_rows=self._passes.rows,
                time=time.time(),
            )
        )
        self._last_step = int(trainer.global_steps)
        self._names = {key: self._names[key] for key in still if key in self._names}
        self._completed, self._pulled, self._drawn = {}, [], ()

    def sync(self) -> None:
        """Make every line durable.

        Raises:
            StateWriteError: A line is not on disk.
        """
        self._writer.sync()

    def finish(self) -> None:
        """Write that training is over."""
        self._writer.append(End(self._run_id, self._life, self._last_step, time.time()))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    # --- names ------------------------------------------------------------------------------------------------------

    def _name(self, key: GroupKey) -> InputName:
        return self._names.get(key, "unknown")

    def _recalled(self, rollouts: Sequence[Any], source: Ledger | None) -> dict[GroupKey, InputName]:
        """Names of prompt groups that an earlier life has pulled.

        Those that the ledger has of that pull. If several lives have done that step, the one that fits the request; if
        none fits, for hooks may change requests, the latest. Without such a line the request's own.
        """
        names: dict[GroupKey, InputName] = {}
        wanted = {key_of(rollout): rollout.input for rollout in rollouts}
        lines = [] if source is None else [entry for entry in reversed(source.entries) if isinstance(entry, Step)]
        for (step, place), request in wanted.items():
            said = request_name(request, with_position=self._positions)
            pulled = [line.pulled[place] for line in lines if line.step == step and place < len(line.pulled)]
            names[step, place] = said if said in pulled or not pulled else pulled[0]
        return names


def _read(output_dir: Path) -> Ledger | None:
    try:
        return read_ledger(output_dir)
    except AsyncCheckpointError:  # none yet, or damaged: names are computed again
        return None


def noting_manager(manager_cls: type, recorder: Recorder) -> type:
    """Return a subclass of agent-lightning's asynchronous rollout manager that notes which prompt groups came back."""

    class NotingManager(manager_cls):
        def enqueue_and_wait_until_group_completed(self, *args: Any, **kwargs: Any) -> Any:
            completed, carry_over = super().enqueue_and_wait_until_group_completed(*args, **kwargs)
            recorder.completed(completed)
            return completed, carry_over

    NotingManager.__name__ = manager_cls.__name__
    NotingManager.__qualname__ = manager_cls.__qualname__
    return NotingManager
