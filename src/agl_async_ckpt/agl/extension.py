"""What the extension keeps of one trainer object, over all of its `fit()` calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agl_async_ckpt._version import __version__
from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.keeper import RolloutKeeper
from agl_async_ckpt.agl.in_flight.rollout_manager import InFlightRolloutManager
from agl_async_ckpt.agl.inputs.fingerprint import take_fingerprint
from agl_async_ckpt.agl.life import Life, refusing
from agl_async_ckpt.agl.recorder import NotingManager, Recorder
from agl_async_ckpt.agl.retention import Retention
from agl_async_ckpt.agl.stop.leaving import LeavableManager, Validations, delete_rollouts
from agl_async_ckpt.agl.stop.step_end import StepEnd
from agl_async_ckpt.codec.values import check_encodable
from agl_async_ckpt.config import SECTION, AsyncCheckpointConfig, read_config
from agl_async_ckpt.exceptions import StateWriteError
from agl_async_ckpt.folder.lock import OutputLock
from agl_async_ckpt.folder.run_identity import RunIdentity
from agl_async_ckpt.ledger.entry import ResumeKind
from agl_async_ckpt.state import Fingerprint
from agl_async_ckpt.storage.layout import FILE_NAME

log = logging.getLogger(__name__)


class Extension:
    """The extension of one trainer object.

    Attributes:
        config: Validated settings.
        trains: False for an evaluation (`trainer.val_only`), which the trainer carries out alone: only the checkpoint
            is found for it.
        active: Whether checkpoints are to hold the input position: it trains, enabled, and asynchronously.
        fingerprint: Of this run's inputs; empty unless active.
        retention: Which models are kept.
        step_end: Whether a step is saved out of turn, or is the last one.
        life: The one of this `fit()`; None until its run is known, and where checkpoints are left to VERL.
        ledger: Of this `fit()`'s inputs; None if it is off, or training is not asynchronous.
    """

    def __init__(self, trainer: internals.Trainer, save: Callable[[], Any] = lambda: None) -> None:
        """Validate settings and inputs.

        Args:
            trainer: The trainer.
            save: Its save; saves step `global_steps`.

        Raises:
            ConfigError, ActivationError, UnencodableValueError: See `CheckpointOverrides`.
        """
        self.config: AsyncCheckpointConfig = read_config(trainer.config)
        self.trains: bool = internals.starts_training(trainer.config.trainer)
        self.active: bool = self.trains and self.config.enabled and internals.is_async(trainer)
        self.fingerprint = Fingerprint()
        self._has_own_states = False
        if self.active:
            internals.require_known_versions(trainer, self.config.untested_versions)
            internals.require_sole_writer(trainer, FILE_NAME)
            internals.require_stateful_sampler(trainer)
            with internals.generators_kept():
                self._has_own_states = _check_own_states(trainer)
                self.fingerprint = take_fingerprint(trainer)
        self.retention = Retention()
        self.step_end = StepEnd(self.config, trainer.config.trainer, save)
        self.life: Life | None = None
        self.ledger: Recorder | None = None
        self._validations = Validations(self.step_end.leave_validation)
        self._lock: OutputLock | None = None
        self._announce(trainer)

    # --- one `fit()` ------------------------------------------------------------------------------------------------

    def forget_earlier_fit(self) -> None:
        """Forget everything of an earlier `fit()` of the same trainer object."""
        self.leave_folder()
        self.life = None
        self._validations.left.clear()

    def enter_folder(self, folder: Path) -> None:
        """Be the one trainer that writes into an output folder, until `leave_folder`.

        Raises:
            FolderInUseError: Another process does, and goes on for longer than `lock_wait_s`.
            StateWriteError: The folder cannot be written.
        """
        self._lock = OutputLock(folder, wait_s=self.config.lock_wait_s)

    def begin_life(self, trainer: internals.Trainer, folder: Path, run: RunIdentity, *, own_folder: bool) -> Life:
        """Work as `run` in its output folder from now on; see `RolloutKeeper` for `own_folder`."""
        on_wait = self.step_end.leave_validation
        keeper = RolloutKeeper(trainer, self.config, folder, run, own_folder=own_folder, on_wait=on_wait)
        self.life = Life(trainer, run, keeper, has_own_states=self._has_own_states)
        return self.life

    def leave_folder(self) -> None:
        """Let another trainer write into the output folder."""
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def leave_rollouts(self, trainer: internals.Trainer, *, saved: bool) -> None:
        """Delete the rollouts of a validation that was left from the server, and those in flight if they are saved."""
        if self.life is None:
            if self._validations.left:
                delete_rollouts(trainer, self._validations.left)
            return
        keeper = self.life.keeper
        ours = keeper.groups.validating()
        if saved:
            ours |= {item.rollout_id for item in keeper.all_carried()}
            delete_rollouts(trainer, ours, keeper.groups.owns if self.config.reclaim else lambda record: False)
        elif ours:
            delete_rollouts(trainer, ours)

    def stand_back_without_life(self) -> None:
        """Leave everything to a trainer of the user's whose `_load_checkpoint` does not call `super()`."""
        if self.active and self.life is None:
            self.active = False
            log.warning(
                "This trainer loads checkpoints by itself (its _load_checkpoint does not call super()): no position "
                "can be put back, so its checkpoints hold none."
            )

    def manager_class(self, manager_cls: type) -> type:
        """Return the class of rollout managers that works for this `fit()`."""
        if self.ledger is not None:
            manager_cls = internals.with_mixin(manager_cls, NotingManager, _async_ckpt_recorder=self.ledger)
        if self.life is not None:
            return internals.with_mixin(manager_cls, InFlightRolloutManager, _async_ckpt_keeper=self.life.keeper)
        if not self.config.enabled:
            return manager_cls
        return internals.with_mixin(manager_cls, LeavableManager, _async_ckpt_validations=self._validations)

    # --- the ledger -------------------------------------------------------------------------------------------------

    def open_ledger(
        self,
        trainer: internals.Trainer,
        folder: Path,
        *,
        resume: ResumeKind,
        resumed_from: Path | None,
        loader_rows: int | None,
        num_ahead: int = 0,
    ) -> None:
        """Begin to write which inputs each step pulls and trains; the arguments are those of `Recorder`.

        Raises:
            StateWriteError: The ledger cannot be written, while the checkpoints are ours.
        """
        if not (self.config.ledger and internals.is_async(trainer)):
            return
        try:
            self.ledger = Recorder(
                trainer,
                folder,
                resume=resume,
                resumed_from=resumed_from,
                in_flight=self._in_flight(trainer),
                loader_rows=loader_rows,
                num_ahead=num_ahead,
                run=None if self.life is None else self.life.run,
            )
        except StateWriteError as error:
            self._on_ledger_error(error)

    def sync_ledger(self, step: int | None = None) -> None:
        """Make the ledger durable, before a checkpoint of `step` refers to it.

        Raises:
            StateWriteError: It cannot be, while the checkpoints are ours.
        """
        if self.ledger is None:
            return
        if step is not None:
            self.ledger.on_save(step)
        try:
            self.ledger.sync()
        except StateWriteError as error:
            self._on_ledger_error(error)
            self.ledger = None

    def on_pulled(self, trainer: internals.Trainer, batch: Any) -> None:
        """Note what was pulled; refuse rows that are not the saved ones, or that the next save could not carry.

        Raises:
            StateMismatchError: The first pull of a resume does not begin with the rows that were buffered.
            UnencodableValueError: See `Life.check_pulled`.
        """
        if self.life is not None:
            self.life.check_first_pull(batch)
        if self.ledger is not None:
            self.ledger.on_pulled(trainer, batch)
        if self.life is not None:
            self.life.check_pulled()

    def on_step_done(self, trainer: internals.Trainer, result: Any) -> None:
        """Write the ledger's line of a step, and see that this package's metrics are with it.

        Args:
            trainer: The trainer.
            result: What `_train_step` returned: None, or (metrics, training batch).
        """
        if self.ledger is not None:
            self.ledger.on_step_done(trainer, self._in_flight(trainer), result)
        self.add_metrics(result)

    def add_metrics(self, result: Any) -> None:
        """Add this package's metrics to those of a step, once; `result` is as above."""
        if self.life is not None and result is not None:
            self.life.add_metrics(result[0])

    def on_training_done(self) -> None:
        """Write that `fit()` came to its end."""
        if self.life is not None:
            self.life.keeper.on_found()
        if self.ledger is not None:
            self.ledger.finish()
            self.sync_ledger()

    def _in_flight(self, trainer: internals.Trainer) -> list[Any]:
        """Return every `EnqueuedRollout` in flight, oldest first."""
        carried = internals.carry_over(trainer)  # in this order already, as the manager leaves it
        if self.life is None or not self.life.keeper.groups.waiting:
            return carried
        return self.life.keeper.groups.everything(carried)

    def _on_ledger_error(self, error: StateWriteError) -> None:
        if self.active:
            raise error
        log.warning("%s", error)

    def _announce(self, trainer: internals.Trainer) -> None:
        versions = ", ".join(
            f"{name} {version}" for name, version in internals.written_by().items() if "agl-" not in name
        )
        if not self.trains:
            log.info(
                "agl-async-ckpt %s: an evaluation (trainer.val_only), which takes the model alone and changes nothing.",
                __version__,
            )
        elif self.active:
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


def _check_own_states(trainer: internals.Trainer) -> bool:
    """Refuse a state of a user's sampler or data set that no checkpoint could hold; return whether there is any."""
    parts = internals.stateful_parts(trainer)
    for name, part in parts.items():
        state = None
        with suppress(Exception):  # it may have none before its first pass; each pull looks again
            state = part.state_dict()
        with refusing(f"the {name} has"):
            check_encodable(state, "its state")
    return bool(parts)
