"""What the extension keeps beside a trainer: settings, the run's identity, in-flight rollouts, pending restores."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt._version import __version__
from agl_async_ckpt.carry_over import InFlight
from agl_async_ckpt.codec import check_batch_encodable
from agl_async_ckpt.config import SECTION, AsyncCheckpointConfig, read_config
from agl_async_ckpt.fingerprint import take_fingerprint
from agl_async_ckpt.layout import FILE_NAME
from agl_async_ckpt.report import ResumeReport
from agl_async_ckpt.run_identity import RunIdentity
from agl_async_ckpt.state import Fingerprint, RngState

log = logging.getLogger(__name__)

METRICS_PREFIX = "training/async_ckpt"


class Session:
    """State of the extension for one trainer object.

    Attributes:
        config: Validated settings.
        active: Whether this run's checkpoints hold the input position: enabled, and asynchronous.
        fingerprint: Of this run's inputs; only while active.
        run: Identity of the output folder; set when `fit()` has decided where to begin.
        in_flight: Rollouts enqueued and not trained.
        pending_rng: Generators to put back at the first training step.
        report: Of the resume that this `fit()` began with, if any.
    """

    def __init__(self, trainer: Any) -> None:
        self.config: AsyncCheckpointConfig = read_config(trainer.config)
        self.active: bool = self.config.enabled and capture.is_async(trainer)
        self.fingerprint = Fingerprint()
        if self.active:
            capture.require_sole_writer(trainer, FILE_NAME)
            capture.require_stateful_sampler(trainer)
            self.fingerprint = take_fingerprint(trainer)
        self._announce(trainer)
        self.begin()

    def begin(self) -> None:
        """Forget everything of an earlier `fit()` of the same trainer object."""
        self.run: RunIdentity | None = None
        self.parent_run_id: str | None = None
        self.in_flight = InFlight()
        self.pending_rng: RngState | None = None
        self.report: ResumeReport | None = None
        self._checked_batch = False

    def adopt_run(self, run: RunIdentity) -> None:
        """Work as `run` from now on."""
        self.run = run
        self.in_flight.run_id = run.run_id

    def before_pull(self, trainer: Any) -> None:
        """Admit waiting groups, leaving room for one new input."""
        in_flight = self.in_flight
        in_flight.forget_trained(capture.carry_over(trainer))
        room = capture.async_batch_size(trainer) - 1
        capture.set_carry_over(trainer, in_flight.admit(capture.carry_over(trainer), room=room))

    def after_pull(self, trainer: Any, batch: Any) -> None:
        """Refuse on the first batch what the first checkpoint, hours later, could not carry."""
        if self._checked_batch:
            return
        check_batch_encodable(batch)
        check_batch_encodable(capture.buffered_batch(trainer) or {})
        self._checked_batch = True

    def settle(self, trainer: Any, manager: Any) -> None:
        """Have the server hold every active in-flight rollout."""
        in_flight = self.in_flight
        in_flight.default_config = capture.default_rollout_config(manager)
        in_flight.to_create |= in_flight.undecided
        in_flight.undecided = set()
        recreated = in_flight.create_missing(capture.carry_over(trainer), manager)
        if self.report is not None and recreated:
            self.report.recreated += recreated
            log.info(self.report.in_flight_text())

    def restore_rng(self) -> None:
        """Put the generators back; once, at the first training step, because a validation moves them."""
        if self.pending_rng is not None:
            capture.set_rng_state(self.pending_rng)
            self.pending_rng = None

    def metrics(self, trainer: Any) -> dict[str, int]:
        """Return the numbers of this step for the trainer's own metrics."""
        groups = {item.data_id for item in capture.carry_over(trainer)}
        buffered = capture.buffered_batch(trainer)
        return {
            f"{METRICS_PREFIX}/num_buffered_inputs": len(next(iter(buffered.values()))) if buffered else 0,
            f"{METRICS_PREFIX}/num_in_flight_groups": len(groups) + len(self.in_flight.waiting),
            f"{METRICS_PREFIX}/input_epoch": int(trainer.epoch),
        }

    def _announce(self, trainer: Any) -> None:
        versions = ", ".join(
            f"{name} {version}" for name, version in capture.written_by().items() if "agl-" not in name
        )
        if self.active:
            folder = Path(trainer.config.trainer.default_local_dir)
            log.info(
                "agl-async-ckpt %s is active (%s; %s): each checkpoint in %s holds the exact input position.",
                __version__,
                self.config.summary(),
                versions,
                folder,
            )
        elif self.config.enabled:
            log.info(
                "agl-async-ckpt %s is loaded; synchronous training keeps VERL's checkpoints as they are.", __version__
            )
        else:
            log.warning(
                "agl-async-ckpt %s is switched off (%s.enabled=false): a resume skips buffered and in-flight inputs.",
                __version__,
                SECTION,
            )
