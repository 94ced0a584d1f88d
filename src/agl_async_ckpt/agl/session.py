"""What the extension keeps beside a trainer: settings, the run's identity, in-flight rollouts, pending restores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agl_async_ckpt._version import __version__
from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.carry_over import InFlight
from agl_async_ckpt.agl.in_flight.patience import Patience, PatientClient
from agl_async_ckpt.agl.in_flight.recovery import active_rollouts, is_new_server, log_return, recover
from agl_async_ckpt.agl.in_flight.rollout_manager import extended_manager
from agl_async_ckpt.agl.in_flight.settle import Outcome, Policy, decide, reclaimable
from agl_async_ckpt.agl.inputs.fingerprint import take_fingerprint
from agl_async_ckpt.agl.inputs.first_pull import FirstPull
from agl_async_ckpt.agl.recorder import Recorder, noting_manager
from agl_async_ckpt.agl.report import ResumeReport
from agl_async_ckpt.agl.retention import Retention
from agl_async_ckpt.agl.stop.leaving import leavable_manager
from agl_async_ckpt.codec.values import check_batch_encodable, check_encodable
from agl_async_ckpt.config import SECTION, AsyncCheckpointConfig, read_config
from agl_async_ckpt.exceptions import StateWriteError, UnencodableValueError
from agl_async_ckpt.folder.liveness import ProofOfLife
from agl_async_ckpt.folder.lock import OutputLock
from agl_async_ckpt.folder.run_identity import RunIdentity, is_latest_life
from agl_async_ckpt.ledger.entry import ResumeKind
from agl_async_ckpt.state import Fingerprint, RngState, num_rows
from agl_async_ckpt.storage.layout import FILE_NAME

log = logging.getLogger(__name__)

METRICS_PREFIX = "training/async_ckpt"
LATER_DRAIN_WAIT_S = 5.0


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Say of a value that cannot be carried where it was met, and how the trainer alone would train it."""
    try:
        yield
    except UnencodableValueError as error:
        raise UnencodableValueError(
            f"No checkpoint can hold what {what}: {error}",
            act=f"Or train without exact checkpoints: {SECTION}.enabled=false.",
        ) from None


class Session:
    """State of the extension for one trainer object.

    Attributes:
        config: Validated settings.
        trains: False for an evaluation (`trainer.val_only`), which the trainer carries out alone: only the checkpoint
            is found for it.
        active: Whether this run's checkpoints hold the input position: it trains, enabled, and asynchronously.
        fingerprint: Of this run's inputs; only while active.
        run: Identity of the output folder; set when `fit()` has decided where to begin.
        in_flight: Rollouts enqueued and not trained.
        patience: With which the agl-server is waited for.
        pending_rng: Generators to put back at the first training step.
        retention: Which models are kept, over all `fit()` calls.
        in_loop: The first step has begun: before it `fit()` has not counted the epoch on, which it does after loading.
        report: Of the resume that this `fit()` began with, if any.
        first_pull: Checks the first pull after a resume, then None.
        ledger: Of this life's inputs; None if it is off, or training is not asynchronous.
    """

    _has_own_states = False
    """The loader's state holds some of a sampler or a data set of the user's."""

    _left_alone = False
    """A drain has gone on with requests that hang."""

    def __init__(self, trainer: internals.Trainer, waiting: Callable[[], None] = lambda: None) -> None:
        """Validate settings and inputs.

        Args:
            trainer: The trainer.
            waiting: Called while rollouts or the server are waited for; what it raises ends the wait.
        """
        self._waiting = waiting
        self.config: AsyncCheckpointConfig = read_config(trainer.config)
        self.trains: bool = internals.starts_training(trainer.config.trainer)
        self.active: bool = self.trains and self.config.enabled and internals.is_async(trainer)
        self.fingerprint = Fingerprint()
        if self.active:
            internals.require_known_versions(trainer, self.config.untested_versions)
            internals.require_sole_writer(trainer, FILE_NAME)
            internals.require_stateful_sampler(trainer)
            with internals.generators_kept():
                self._has_own_states = self._check_own_states(trainer)
                self.fingerprint = take_fingerprint(trainer)
        self.retention = Retention()
        self._lock: OutputLock | None = None
        self.ledger: Recorder | None = None
        self._announce(trainer)
        self.begin()

    def begin(self) -> None:
        """Forget everything of an earlier `fit()` of the same trainer object."""
        self.leave_folder()
        self.run: RunIdentity | None = None
        self.in_flight = InFlight(mode=self.config.in_flight, max_bytes=self.config.in_flight_max_bytes)
        self.patience = Patience(self.config.server_wait_s, self.in_flight.cross_gap, self._waiting)
        self.policy = Policy(own_folder=False)
        self.pending_rng: RngState | None = None
        self.report: ResumeReport | None = None
        self.first_pull: FirstPull | None = None
        self._proof: ProofOfLife | None = None
        self.in_loop = False
        self._server_reached = False
        self._settled = False
        self._num_stale_requests = 0
        self._left_alone = False
        self._step_metrics: dict[str, Any] = {}
        self._save_metrics: dict[str, float] = {}

    def enter_folder(self, output_dir: Path) -> None:
        """Be the one trainer that writes into an output folder, until `leave_folder`.

        Raises:
            FolderInUseError: Another process does, and goes on for longer than `lock_wait_s`.
            StateWriteError: The folder cannot be written.
        """
        self._lock = OutputLock(output_dir, wait_s=self.config.lock_wait_s)

    def leave_folder(self) -> None:
        """Let another trainer write into the output folder."""
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def adopt_run(self, run: RunIdentity, output_dir: Path) -> None:
        """Work as `run` in its output folder from now on."""
        self.run = run
        self.in_flight.run_id = run.run_id
        self._proof = ProofOfLife(output_dir, run.run_id, lambda: is_latest_life(output_dir, run))

    def allow_adoption(self, trainer: internals.Trainer, *, own_folder: bool) -> None:
        """Decide what a resume may do on the server."""
        self.policy = Policy(
            own_folder=own_folder,
            adopt=self.config.adopt,
            reclaim=self.config.reclaim,
            lives=self._proof.earlier_lives if self._proof else (),
            hooks_reward=internals.has_hooks(trainer),
        )

    # --- the ledger -------------------------------------------------------------------------------------------------

    def open_ledger(
        self,
        trainer: internals.Trainer,
        output_dir: Path,
        *,
        resume: ResumeKind,
        resumed_from: Path | None,
        loader_rows: int | None,
        num_ahead: int = 0,
    ) -> None:
        """Begin to write which inputs each step pulls and trains.

        Args:
            trainer: The trainer, with its checkpoint loaded.
            output_dir: Its output folder.
            resume: What became of the input position.
            resumed_from: The step folder that was loaded, or None.
            loader_rows: Rows of the pass that the loader has handed out by the loaded position.
            num_ahead: Rows read since then, at the end of the buffered ones.

        Raises:
            StateWriteError: The ledger cannot be written, while the checkpoints are ours.
        """
        if not (self.config.ledger and internals.is_async(trainer)):
            return
        try:
            self.ledger = Recorder(
                trainer,
                output_dir,
                resume=resume,
                resumed_from=resumed_from,
                in_flight=self.in_flight.everything(internals.carry_over(trainer)),
                loader_rows=loader_rows,
                num_ahead=num_ahead,
                run=self.run,
            )
        except StateWriteError as error:
            if self.active:
                raise
            log.warning("%s", error)

    def sync_ledger(self, step: int | None = None) -> None:
        """Make the ledger durable, before a checkpoint refers to it.

        Args:
            step: That is about to be saved.

        Raises:
            StateWriteError: It cannot be, while the checkpoints are ours.
        """
        if self.ledger is None:
            return
        if step is not None:
            self.ledger.saved(step)
        try:
            self.ledger.sync()
        except StateWriteError as error:
            if self.active:
                raise
            log.warning("%s", error)
            self.ledger = None

    def step_done(self, trainer: internals.Trainer, result: Any) -> None:
        """Write the ledger's line of a step, and see that this package's metrics are with it.

        Args:
            result: What `_train_step` returned: None, or (metrics, training batch).
        """
        if self.ledger is not None:
            in_flight = internals.carry_over(trainer)  # oldest first, as the manager leaves it
            if self.in_flight.waiting:
                in_flight = self.in_flight.everything(in_flight)
            self.ledger.step_done(trainer, in_flight, result)
        self.add_metrics(trainer, result)

    def add_metrics(self, trainer: internals.Trainer, result: Any) -> None:
        """Add this package's metrics to those of a step, once.

        Args:
            trainer: The trainer.
            result: What `_train_step` returned.
        """
        if self.active and result is not None and result[0] is not self._step_metrics:
            self._step_metrics = result[0]
            result[0].update(self.metrics(trainer))

    def training_done(self) -> None:
        """Write that `fit()` came to its end."""
        log_return(self.patience.take_absence())
        if self.ledger is not None:
            self.ledger.finish()
            self.sync_ledger()

    # --- pulling ----------------------------------------------------------------------------------------------------

    def before_pull(self, trainer: internals.Trainer) -> None:
        """Admit waiting groups, leaving room for one new input."""
        self.in_loop = True
        if not self.active:
            return
        in_flight = self.in_flight
        in_flight.forget_trained(internals.carry_over(trainer))
        room = internals.async_batch_size(trainer) - 1
        internals.set_carry_over(trainer, in_flight.admit(internals.carry_over(trainer), room=room))

    def check_first_pull(self, trainer: internals.Trainer, batch: Any) -> None:
        """Compare the first pull of a resume with the rows that were buffered; later ones are not looked at.

        Raises:
            StateMismatchError: It does not begin with them.
        """
        if self.first_pull is not None:
            self.first_pull.check(batch, internals.buffered_batch(trainer))
            self.first_pull = None

    def after_pull(self, trainer: internals.Trainer, batch: Any) -> None:
        """Note what was pulled; refuse rows that are not the saved ones, or that the next save could not carry.

        Raises:
            StateMismatchError: The first pull of a resume does not begin with the rows that were buffered.
            UnencodableValueError: A value that stays buffered, or one of the loader's state. What is in flight was
                posted as JSON and can always be carried.
        """
        self.check_first_pull(trainer, batch)
        if self.ledger is not None:
            self.ledger.pulled(trainer, batch)
        if not self.active:
            return
        with _refusing(f"step {trainer.global_steps} leaves buffered"):
            check_batch_encodable(internals.buffered_batch(trainer) or {})
        if self._has_own_states:
            with _refusing("the loader has"):
                check_encodable(internals.loader_state(trainer), "its state")

    def _check_own_states(self, trainer: internals.Trainer) -> bool:
        """Refuse a state of a user's sampler or data set that no checkpoint could hold; return if there is any."""
        parts = internals.stateful_parts(trainer)
        for name, part in parts.items():
            state = None
            with suppress(Exception):  # it may have none before its first pass; each pull looks again
                state = part.state_dict()
            with _refusing(f"the {name} has"):
                check_encodable(state, "its state")
        return bool(parts)

    # --- the server -------------------------------------------------------------------------------------------------

    def client(self, client: Any) -> Any:
        """Return the trainer's client of the server as it is to be used."""
        return PatientClient(client, self.patience) if self.active else client

    def manager_class(self, trainer: internals.Trainer, manager_cls: type) -> type:
        """Return the manager class that works for this session."""
        if self.ledger is not None:
            manager_cls = noting_manager(manager_cls, self.ledger)
        if not self.active:
            return leavable_manager(manager_cls, self.in_flight, self._waiting) if self.config.enabled else manager_cls
        return extended_manager(
            manager_cls,
            self.in_flight,
            self.patience,
            before_models=lambda: self.count_stale(trainer),
            settle=lambda manager: self.settle(trainer, manager),
            rerun=lambda manager, rollout_id: self.rerun(trainer, manager, rollout_id),
            lost=lambda manager, rollout_id: self.lost(trainer, manager, rollout_id),
            found=lambda: log_return(self.patience.take_absence()),
            created=self.created,
            alive=self.alive,
        )

    def stay_out(self) -> None:
        """Leave everything to a trainer of the user's whose `_load_checkpoint` does not call `super()`."""
        self.active = False
        log.warning(
            "This trainer loads checkpoints by itself (its _load_checkpoint does not call super()): no position can be "
            "put back, so its checkpoints hold none."
        )

    def before_rollout(self, trainer: internals.Trainer) -> None:
        """Before the first rollout of a start, close the way to a dead trainer's models.

        Raises:
            ServerError: The server cannot be reached, or refuses us.
        """
        if self.run is None:
            self.stay_out()
        elif not self._server_reached:
            agl_server.delete_models(internals.agl_client(trainer))
            self._server_reached = True

    def count_stale(self, trainer: internals.Trainer) -> None:
        """Count the model requests that go to the dead trainer's endpoints: none of ours is registered yet.

        Later calls come when the gateway was drained of ours and our models are deleted: fewer may be left by then.
        """
        if not self._settled:
            self._num_stale_requests = agl_server.num_proxied_requests(internals.agl_client(trainer))
        elif self._num_stale_requests:
            num_left = agl_server.num_proxied_requests(internals.agl_client(trainer))
            self._num_stale_requests = min(self._num_stale_requests, num_left)

    def created(self, response: Any) -> None:
        """Note when this life began to create rollouts; `response` is the server's answer to a creation."""
        if self._proof is None or self._proof.has_begun:
            return
        with suppress(ValueError, TypeError, KeyError):  # whoever reads the answer next complains
            self._proof.begin(min(float(record["status"]["created_at"]) for record in response.json()))

    def alive(self, date_header: str | None) -> None:
        """Keep the proof of life fresh; `date_header` is of an answer of the server."""
        if self._proof is not None:
            self._proof.seen(date_header)

    def settle(self, trainer: internals.Trainer, manager: internals.RolloutManager) -> None:
        """Have the server hold every active in-flight rollout; at the first call, decide about all of them."""
        in_flight = self.in_flight
        in_flight.default_config = internals.default_rollout_config(manager)
        outcome = None
        if not self._settled:
            outcome = self._settle_first(trainer, manager)
            self._settled = True
        in_flight.create_missing(internals.carry_over(trainer), manager)
        if outcome is None:
            return
        if self.report is not None:
            self.report.outcome = outcome
            log.info(self.report.in_flight_text())
        elif outcome.reclaimed:
            log.info("Removed %d rollouts of earlier starts of this run from the server.", len(outcome.reclaimed))

    def _settle_first(self, trainer: internals.Trainer, manager: internals.RolloutManager) -> Outcome:
        in_flight = self.in_flight
        items = in_flight.everything(internals.carry_over(trainer))
        client = internals.agl_client(trainer)
        records = agl_server.list_rollouts(client)
        outcome = decide(in_flight, items, records, self.policy)
        outcome.reclaimed = reclaimable(in_flight, items, records, self.policy)
        if self._proof is not None and is_new_server(in_flight, records):
            self._proof.forget()
        agl_server.delete_rollouts(client, outcome.reclaimed)
        return outcome

    def rerun(self, trainer: internals.Trainer, manager: internals.RolloutManager, rollout_id: str) -> str:
        """Run a rollout again that failed, or brought nothing to train from, perhaps for want of a trainer or server.

        Returns:
            Its new id; the trainer's record of it is changed in place.
        """
        items = [item for item in active_rollouts(trainer, manager) if item.rollout_id == rollout_id]
        known = self.in_flight.tracked[rollout_id]
        known.replaces = rollout_id
        self.in_flight.to_create.add(rollout_id)
        self.in_flight.create_missing(items, manager)
        if self.config.reclaim and not known.served:  # an id that is served may be another run's on the server
            agl_server.delete_rollouts(internals.agl_client(trainer), [rollout_id])
        log.info(
            "Rollout %s failed, or brought nothing to train from, around a death or an outage: run again as %s.",
            rollout_id,
            items[0].rollout_id,
        )
        if self.report is not None:
            self.report.outcome.rerun.append(rollout_id)
        return items[0].rollout_id

    def lost(self, trainer: internals.Trainer, manager: internals.RolloutManager, rollout_id: str) -> str:
        """Deal with a server that does not know a rollout: it was restarted.

        Returns:
            The id that the rollout has now; the trainer's record of it is changed in place.

        Raises:
            ServerError: The server did not answer in time, or refuses.
        """
        [item] = [item for item in active_rollouts(trainer, manager) if item.rollout_id == rollout_id]
        forget = self._proof.forget if self._proof is not None else lambda: None
        absence = self.patience.take_absence()
        recover(trainer, manager, self.in_flight, absence=absence, forget=forget)
        return item.rollout_id

    def drained(self, num_in_flight: int, waited_s: float) -> bool:
        """Whether a paused gateway counts as drained.

        Requests to the dead trainer's model endpoint can hang for half an hour; no more of them are left than the
        smallest count seen. After `drain_wait_s` they are left alone; later steps do not wait that long again, but a
        little, for a request of ours that is counted among them because one of them has ended meanwhile.
        """
        self._num_stale_requests = min(self._num_stale_requests, num_in_flight)
        if num_in_flight == 0:
            return True
        enough_s = self.config.drain_wait_s
        if self._left_alone:
            enough_s = min(enough_s, LATER_DRAIN_WAIT_S)
        if num_in_flight > self._num_stale_requests or waited_s < enough_s:
            return False
        log.log(
            logging.INFO if self._left_alone else logging.WARNING,
            "Going on after %.0f s with %d model requests in the gateway that went to the dead trainer's endpoint.",
            waited_s,
            num_in_flight,
        )
        self._left_alone = True
        return True

    # --- steps ------------------------------------------------------------------------------------------------------

    def restore_rng(self) -> None:
        """Put the generators back; once, at the first training step, because a validation moves them."""
        if self.pending_rng is not None:
            internals.set_rng_state(self.pending_rng)
            self.pending_rng = None

    def note_save(self, seconds: float, num_bytes: int) -> None:
        """Note what the last save has cost; the trainer logs the step's metrics after it."""
        values = {"last_save_s": seconds, "last_save_bytes": num_bytes}
        self._save_metrics = {f"{METRICS_PREFIX}/{name}": value for name, value in values.items()}
        self._step_metrics.update(self._save_metrics)

    def metrics(self, trainer: internals.Trainer) -> dict[str, float]:
        """Return the numbers of this step for the trainer's own metrics, with the counts of this life's resume."""
        groups = {item.data_id for item in self.in_flight.members(internals.carry_over(trainer))}
        values = {
            "num_buffered_inputs": num_rows(internals.buffered_batch(trainer)),
            "num_in_flight_groups": len(groups),
            "input_epoch": int(trainer.epoch),
        }
        if self.report is not None:
            values |= self.report.metrics()
        return {f"{METRICS_PREFIX}/{name}": value for name, value in values.items()} | self._save_metrics

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
