"""Follows the inputs of one trainer life and writes their ledger.

A prompt group is known by its data id, which stays through every resume, while hooks may change a request, and the ids
of rollouts change when they are created again. So a row is named when it is pulled, its group when it is enqueued, and
what later comes back of it is named by looking up.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs.row_names import RowNames, knows_positions
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.folder.run_identity import RunIdentity
from agl_async_ckpt.ledger.entry import End, Gap, InputName, ResumeKind, Start, Step, position_of
from agl_async_ckpt.ledger.passes import PassCounter
from agl_async_ckpt.ledger.reader import Ledger, read_ledger
from agl_async_ckpt.ledger.writer import LedgerWriter
from agl_async_ckpt.state import num_rows

if TYPE_CHECKING:
    from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager as _Manager
else:
    _Manager = object

log = logging.getLogger(__name__)


def _groups(rollouts: Iterable[Any]) -> dict[str, Any]:
    """Return data id -> one rollout of each prompt group, in order."""
    return {rollout.data_id: rollout for rollout in rollouts}


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
        trainer: internals.Trainer,
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
        self._rows = RowNames(with_position=knows_positions(trainer.train_dataset))
        self._names: dict[str, InputName] = {}  # data id -> name, of what is in flight
        is_fork = resumed_from is not None and not resumed_from.parent.samefile(output_dir)
        if in_flight:
            source = _read(resumed_from.parent) if resumed_from and is_fork else own
            self._names = self._recalled(_groups(in_flight), int(trainer.global_steps), source)
        # Rows that a changed batch size had read ahead come behind the saved ones; the first step counts them as drawn.
        buffered = self._rows.of_pulled(internals.buffered_batch(trainer))
        self._buffered = buffered[: len(buffered) - num_ahead]
        self._begin_step()
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
            in_flight=tuple(map(self._name, _groups(in_flight))),
            buffered=tuple(self._buffered),
            loader_rows=loader_rows,
            num_rows=len(loader.sampler),
            loader_batch=int(loader.batch_size),
            drop_last=bool(loader.drop_last),
            time=time.time(),
            each_row_once=internals.draws_each_row_once(loader.sampler, len(trainer.train_dataset)),
        )
        self._passes = PassCounter(start, num_ahead=num_ahead)
        self._last_line = self._last_step = start.step
        self._has_warned = False
        self._writer.append(start)

    def _begin_step(self) -> None:
        self._buffered_before = self._buffered
        self._pulled: list[InputName] = []
        self._handed_out: list[InputName] = []
        self._drawn: tuple[tuple[int, int], ...] = ()
        self._columns: set[str] = set()
        self._enqueued: list[InputName] = []
        self._completed: list[str] | None = None  # data ids, once a manager has waited

    # --- what the trainer does --------------------------------------------------------------------------------------

    def on_pulled(self, trainer: internals.Trainer, batch: Any) -> None:
        """Note what one pull of a step has brought: `batch`, of which the buffered rows come first."""
        num_known = len(self._buffered)
        buffered = internals.buffered_batch(trainer)
        rest = self._buffered[num_rows(batch) :]
        pulled = self._buffered[: num_rows(batch)]
        pulled += self._rows.of_pulled(batch, num_known)
        self._buffered = rest + self._rows.of_pulled(buffered, len(rest))
        handed_out = [*pulled, *self._buffered][num_known:]
        self._drawn += self._passes.draw(len(handed_out), epoch=int(trainer.epoch))
        self._pulled += pulled
        self._handed_out += handed_out
        self._columns.update(batch)

    def on_enqueued(self, data: Mapping[str, Any]) -> list[InputName]:
        """Name the rows that are about to be enqueued; a trainer may have sorted, filtered or changed what it pulled.

        Args:
            data: Column name -> (num_rows,) array.
        """
        columns = {name: column for name, column in data.items() if name in self._columns}
        names = self._as_pulled(self._rows.of_enqueued(columns))
        self._enqueued += names
        return names

    def on_completed(self, names: Sequence[InputName], completed: Sequence[Any], carry_over: Iterable[Any]) -> None:
        """Note what came of it: `CompletedRollout`s, and `EnqueuedRollout`s that are carried over.

        Args:
            names: What `on_enqueued` returned.
            completed: Finished.
            carry_over: Unfinished.
        """
        done = _groups(completed)
        for data_id, rollout in (done | _groups(carry_over)).items():
            place = int(rollout.sample_idx_in_step)
            if data_id not in self._names and place < len(names):
                self._names[data_id] = names[place]
        self._completed = [*(self._completed or ()), *done]

    def on_step_done(self, trainer: internals.Trainer, in_flight: Sequence[Any], result: Any) -> None:
        """Write the line of a step, if the trainer has shown what it trained.

        Args:
            trainer: The trainer, at the end of `_train_step`.
            in_flight: Every `EnqueuedRollout` that is not trained, oldest first.
            result: What `_train_step` returned: None, or (metrics, training batch).
        """
        self._last_step = int(trainer.global_steps)
        used = internals.trained_ids(result)
        still = _groups(in_flight)
        if self._completed is None or used is None or not used <= set(self._completed):
            self._warn()
        else:
            handed_out = None
            if [*self._buffered_before, *self._handed_out] != [*self._enqueued, *self._buffered]:
                handed_out = tuple(self._handed_out)
            self._writer.append(
                Step(
                    run_id=self._run_id,
                    life=self._life,
                    step=self._last_step,
                    epoch=int(trainer.epoch),
                    pulled=tuple(self._enqueued),
                    drawn=self._drawn,
                    trained=tuple(self._name(data_id) for data_id in self._completed if data_id in used),
                    dropped_by_trainer=tuple(self._name(data_id) for data_id in self._completed if data_id not in used),
                    in_flight=tuple(map(self._name, still)),
                    buffered=tuple(self._buffered),
                    loader_rows=self._passes.rows,
                    time=time.time(),
                    handed_out=handed_out,
                )
            )
            self._last_line = self._last_step
        self._names = {data_id: self._names[data_id] for data_id in still if data_id in self._names}
        self._rows.forget_all_but(self._buffered)
        self._begin_step()

    def on_save(self, step: int) -> None:
        """Write that steps up to `step`, which is being saved, are without a line, if they are."""
        if step > self._last_line:
            self._warn()
            self._writer.append(Gap(self._run_id, self._life, step, time.time()))

    def _warn(self) -> None:
        if not self._has_warned:
            log.warning(
                "This trainer does not show which inputs its steps train (a _train_step of its own): the ledger has no "
                "line of them, and an audit cannot tell whether any was lost. Checkpoints hold the input position."
            )
        self._has_warned = True

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

    def _name(self, data_id: str) -> InputName:
        return self._names.get(data_id, "unknown")

    def _as_pulled(self, names: list[InputName]) -> list[InputName]:
        """Give rows that the trainer has changed the names that they had when they were pulled."""
        known = [*self._buffered_before, *self._handed_out]
        if not Counter(names) - Counter(known):
            return names
        by_position = {position_of(name): name for name in known}
        if self._rows.with_position and all(position_of(name) in by_position for name in names):
            return [by_position[position_of(name)] for name in names]
        return list(self._pulled) if len(names) == len(self._pulled) else names

    def _recalled(self, groups: Mapping[str, Any], step: int, source: Ledger | None) -> dict[str, InputName]:
        """Return the names of prompt groups that a resume from `step` has put back, by data id.

        They are those that the line of that step leaves in flight. If several lives have done the step, the one that
        fits the requests best, for hooks may change them; if equally, the latest. Without a line the request's own.
        """
        said = [self._rows.of_request(rollout.input) for rollout in groups.values()]
        lines = [] if source is None else [entry for entry in reversed(source.entries) if isinstance(entry, Step)]
        held = [line.in_flight for line in lines if line.step == step and len(line.in_flight) == len(said)]
        names = max(held, key=lambda names: sum(map(eq, names, said)), default=said)
        return dict(zip(groups, names, strict=True))


def _read(output_dir: Path) -> Ledger | None:
    try:
        return read_ledger(output_dir)
    except AsyncCheckpointError:  # none yet, or damaged: names are computed again
        return None


class NotingManager(_Manager):
    """The extension of agent-lightning's asynchronous rollout manager that notes what goes in and comes out."""

    _async_ckpt_recorder: Recorder

    def enqueue_and_wait_until_group_completed(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Enqueue and wait as the manager does."""
        names = self._async_ckpt_recorder.on_enqueued(data)
        completed, carry_over = super().enqueue_and_wait_until_group_completed(data, *args, **kwargs)
        self._async_ckpt_recorder.on_completed(names, completed, carry_over)
        return completed, carry_over
