"""One `fit()` whose checkpoints hold the input position: what it restores, pulls, has in flight and reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.keeper import RolloutKeeper
from agl_async_ckpt.agl.inputs.first_pull import FirstPull
from agl_async_ckpt.agl.report import ResumeReport
from agl_async_ckpt.codec.values import check_batch_encodable, check_encodable
from agl_async_ckpt.config import SECTION
from agl_async_ckpt.exceptions import UnencodableValueError
from agl_async_ckpt.folder.run_identity import RunIdentity
from agl_async_ckpt.state import InputState, RngState, num_rows

log = logging.getLogger(__name__)

METRICS_PREFIX = "training/async_ckpt"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Say of a value that cannot be carried where it was met, and how the trainer alone would train it."""
    try:
        yield
    except UnencodableValueError as error:
        raise UnencodableValueError(
            f"No checkpoint can hold what {what}: {error}",
            act=f"Or train without exact checkpoints: {SECTION}.enabled=false.",
        ) from None


class Life:
    """What the extension keeps of one `fit()`; it exists once the run of its output folder is known.

    Attributes:
        run: Identity of the output folder, with the number of this life.
        keeper: What is in flight, and what is done about it on the server.
        pending_rng: Generators to put back at the first training step.
        report: What the resume that this life began with has restored; None if it began from scratch.
        in_loop: The first step has begun: before it `fit()` has not counted the epoch on, which it does after loading.
    """

    def __init__(
        self,
        trainer: internals.Trainer,
        run: RunIdentity,
        keeper: RolloutKeeper,
        *,
        has_own_states: bool,
    ) -> None:
        """Begin a life.

        Args:
            trainer: The trainer.
            run: Identity of its output folder.
            keeper: Of its rollouts; nothing is in flight yet.
            has_own_states: The loader's state holds some of a sampler or a data set of the user's.
        """
        self._trainer = trainer
        self.run = run
        self.keeper = keeper
        self.pending_rng: RngState | None = None
        self.report: ResumeReport | None = None
        self.in_loop = False
        self._first_pull: FirstPull | None = None
        self._has_own_states = has_own_states
        self._step_metrics: dict[str, Any] = {}
        self._save_metrics: dict[str, float] = {}

    def restore(self, state: InputState, buffered: Any, step_dir: Path, reason: str) -> None:
        """Take over what a checkpoint holds beside the loader's position.

        Args:
            state: Of the checkpoint.
            buffered: The rows that the trainer has buffered now: those of the state, and what was read after them.
            step_dir: The checkpoint folder.
            reason: Why this one.
        """
        self._first_pull = FirstPull(buffered, step_dir)
        self.keeper.restore(state.carry_over, state.global_step)
        self.pending_rng = state.rng_state
        self.report = ResumeReport(
            step_dir, reason, state, self.keeper.outcome, num_waiting=len(self.keeper.groups.waiting)
        )
        log.info("%s", self.report.restored_text())

    def on_step(self) -> None:
        """Put the generators back at the first training step, because a validation before it moves them."""
        self.in_loop = True
        if self.pending_rng is not None:
            internals.set_rng_state(self.pending_rng)
            self.pending_rng = None

    def on_pull(self) -> None:
        """Admit waiting groups before a pull, leaving room for one new input."""
        self.in_loop = True
        self.keeper.groups.forget_trained(internals.carry_over(self._trainer))
        self.keeper.admit()

    def check_first_pull(self, batch: Any) -> None:
        """Compare the first pull of a resume with the rows that were buffered; later ones are not looked at.

        Raises:
            StateMismatchError: It does not begin with them.
        """
        if self._first_pull is not None:
            self._first_pull.check(batch, internals.buffered_batch(self._trainer))
            self._first_pull = None

    def check_pulled(self) -> None:
        """Refuse what a pull has left behind that the next save could not carry.

        Raises:
            UnencodableValueError: A value that stays buffered, or one of the loader's state. What is in flight was
                posted as JSON and can always be carried.
        """
        with refusing(f"step {self._trainer.global_steps} leaves buffered"):
            check_batch_encodable(internals.buffered_batch(self._trainer) or {})
        if self._has_own_states:
            with refusing("the loader has"):
                check_encodable(internals.loader_state(self._trainer), "its state")

    def note_save(self, seconds: float, num_bytes: int) -> None:
        """Note what the last save has cost; the trainer logs the step's metrics after it."""
        values = {"last_save_s": seconds, "last_save_bytes": num_bytes}
        self._save_metrics = {f"{METRICS_PREFIX}/{name}": value for name, value in values.items()}
        self._step_metrics.update(self._save_metrics)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Add this package's numbers to the metrics of a step, once."""
        if metrics is not self._step_metrics:
            self._step_metrics = metrics
            metrics.update(self._metrics())

    def _metrics(self) -> dict[str, float]:
        """Return the numbers of this step, with the counts of this life's resume."""
        groups = {item.data_id for item in self.keeper.groups.members(internals.carry_over(self._trainer))}
        values = {
            "num_buffered_inputs": num_rows(internals.buffered_batch(self._trainer)),
            "num_in_flight_groups": len(groups),
            "input_epoch": int(self._trainer.epoch),
        }
        if self.report is not None:
            values |= self.report.metrics()
        return {f"{METRICS_PREFIX}/{name}": value for name, value in values.items()} | self._save_metrics
