"""Run one life of a training run with the real trainer, in this process, up to its end or a chosen death."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agl_async_ckpt.exceptions import TrainingStopped
from tests.rig.agents import PROMPT_OFFSET, row_of
from tests.rig.record import Life, LogRecorder, Recorder
from tests.rig.settings import RunSettings, compose_config, dataset_rows
from tests.rig.standins import CheckpointManager, LLMServers, Tokenizer, WorkerGroup, rich_collate

POINTS = ("loaded", "validating", "pulled", "trained", "updated", "save", "actor_saved", "critic_saved", "saved")
"""Instants at which a life can end: (point, step). `validating` is when a rollout of a validation has ended and is not
read yet, `save` before the extension sees the save, `saved` after it."""


@dataclass(frozen=True)
class Parts:
    """What a user may put into a trainer in place of the rig's own.

    Attributes:
        dataset: Makes the training data set from the rig's.
        collate: Collate function.
        sampler: Makes the sampler from the config's `data` and the training data set.
    """

    dataset: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    sampler: Callable[[Any, Any], Any] | None = None


class Death(BaseException):
    """The process dies here, as far as the trainer can tell: not an `Exception`, so nobody handles it."""


class Rig:
    """What the recording trainer needs to know of the life that it runs in."""

    def __init__(self, recorder: Recorder, die_at: Callable[[str, int], bool]) -> None:
        self.recorder = recorder
        self.clients: list[httpx.Client] = []
        self.polled: dict[str, bool] = {}
        self.done: set[str] = set()
        self._die_at = die_at

    def at(self, point: str, step: int) -> None:
        """Die here if this is the chosen instant."""
        if self._die_at(point, step):
            raise Death(f"{point} {step}")


def _rows(batch: Any) -> list[int]:
    return [] if not batch else [int(row) for row in batch["index"]]


def _comparable(metrics: dict[str, Any]) -> dict[str, float]:
    """What agent-lightning counts about a step; nothing that is a time, and nothing of the extension's own."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("training/") and not name.startswith(("training/async_ckpt/", "training/async/proxy_"))
    }


def _samples(batch: Any) -> list[list[Any]]:
    """Of each row of an update: prompt tokens, response tokens, their log-probs, score."""
    tensors = batch.batch
    width = tensors["prompts"].shape[1]
    samples: list[list[Any]] = []
    for row in range(len(batch)):
        mask = tensors["attention_mask"][row].bool()
        samples.append(
            [
                tensors["prompts"][row][mask[:width]].tolist(),
                tensors["responses"][row][mask[width:]].tolist(),
                tensors["rollout_log_probs"][row][mask[width:]].tolist(),
                tensors["token_level_scores"][row].sum().item(),
            ]
        )
    return samples


def _groups(rollouts: list[Any]) -> list[int]:
    """Row of each prompt group, in order."""
    return list({rollout.data_id: row_of(rollout.input) for rollout in rollouts}.values())


class RecordingMixin:
    """Goes in front of a trainer class: notes what it does, and stands in for the calls to GPU workers."""

    rig: Rig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor_rollout_wg = WorkerGroup("actor", self._worker_saved)
        self.critic_wg = WorkerGroup("critic", self._worker_saved)
        self.checkpoint_manager = CheckpointManager()
        # VERL 0.8.0 and 0.7.1; agent-lightning takes the first if it is there.
        self.llm_server_manager = self.async_rollout_manager = LLMServers()

    def _worker_saved(self, role: str, step: int) -> None:
        self.rig.at(f"{role}_saved", step)

    def _position(self: Any) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "in_flight": _groups(self._carry_over_rollouts),
            "buffered": _rows(getattr(self, "_train_dataloader_buf", None)),
        }

    def _load_checkpoint(self: Any) -> Any:
        result = super()._load_checkpoint()  # type: ignore[misc]
        weights = {
            group.role: group.loaded_step
            for group in (self.actor_rollout_wg, self.critic_wg)
            if group.loaded_step is not None
        }
        self.rig.recorder.emit(
            "loaded",
            step=self.global_steps,
            weights=weights,
            total_steps=self.total_training_steps,
            **self._position(),
        )
        self.rig.at("loaded", self.global_steps)
        return result

    def _next_train_batch_dict_for_rollout(self: Any) -> dict[str, Any]:
        import numpy as np

        batch = super()._next_train_batch_dict_for_rollout()  # type: ignore[misc]
        self.rig.recorder.emit("pulled", step=self.global_steps, epoch=self.epoch, rows=_rows(batch))
        self.rig.at("pulled", self.global_steps)
        # `DataProto` takes tensors and arrays only, the trainer's buffer lists too.
        return {
            name: np.fromiter(value, dtype=object, count=len(value)) if isinstance(value, list) else value
            for name, value in batch.items()
        }

    def _make_rollout_manager(self: Any, manager_cls: type) -> Any:
        manager = super()._make_rollout_manager(manager_cls)  # type: ignore[misc]
        self.rig.polled, self.rig.done = {}, set()
        manager.__class__ = _paced(type(manager), self)
        self.rig.clients.append(manager.client)
        return manager

    def _train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._train_step(*args, **kwargs)  # type: ignore[misc]
        self.rig.recorder.emit("metrics", step=self.global_steps, values=_comparable(result[0] if result else {}))
        return result

    def _rollout(self: Any, gen_batch: Any, is_train: bool) -> Any:
        try:
            return super()._rollout(gen_batch, is_train)  # type: ignore[misc]
        finally:
            # agent-lightning leaves them to the garbage collector.
            while self.rig.clients:
                self.rig.clients.pop().close()

    def _save_checkpoint(self: Any) -> None:
        self.rig.at("save", self.global_steps)
        super()._save_checkpoint()  # type: ignore[misc]
        self.rig.recorder.emit("saved", step=self.global_steps, **self._position())
        self.rig.at("saved", self.global_steps)

    def _compute_old_log_prob(self, batch: Any) -> Any:
        import torch
        from verl import DataProto

        return DataProto.from_single_dict(
            {"old_log_probs": torch.zeros(batch.batch["responses"].shape, dtype=torch.float32)}
        ), 0.0

    def _compute_values(self, batch: Any) -> Any:
        import torch
        from verl import DataProto

        return DataProto.from_single_dict({"values": torch.zeros(batch.batch["responses"].shape, dtype=torch.float32)})

    def _update_critic(self, batch: Any) -> Any:
        from verl import DataProto

        return DataProto.from_single_dict({}, meta_info={"metrics": {}})

    def _update_actor(self: Any, batch: Any) -> Any:
        from verl import DataProto

        rows = (batch.batch["prompts"][:, -1] - PROMPT_OFFSET).tolist()
        self.rig.recorder.emit("updated", step=self.global_steps, rows=rows, samples=_samples(batch))
        self.rig.at("updated", self.global_steps)
        return DataProto.from_single_dict({}, meta_info={"metrics": {}})


def _paced(manager_cls: type, trainer: Any) -> type:
    """A subclass of a rollout manager that, instead of sleeping between two passes, lets the agents act."""

    class Paced(manager_cls):
        # Class-level defaults: an instance turns into this class after its `__init__`.
        _rig_target: int | None = None

        @property
        def _poll_interval_seconds(self) -> float:
            # Read when a pass has found too little and the manager is about to sleep.
            rig = trainer.rig
            open_ids = [rid for rid, is_open in rig.polled.items() if is_open]
            rig.polled = {}
            report = {
                "step": trainer.global_steps,
                "polled": open_ids,
                "num_groups": None if self._rig_target is None else self._rig_target - len(rig.done),
                "rollout_n": self._train_rollout_n,
            }
            response = self.client.post("/rig/wait", json=report)
            if response.status_code != 200:
                raise AssertionError(response.text)
            return 0.0

        def _get_rollout(self, rollout_id: str) -> Any:
            from agentlightning.schemas import TERMINAL_STATES

            rollout = super()._get_rollout(rollout_id)
            # Its own id: a rollout that is run again comes back under another one.
            trainer.rig.polled[rollout.rollout_id] = rollout.status.state not in TERMINAL_STATES
            if not rollout.is_train and rollout.status.state in TERMINAL_STATES:
                trainer.rig.at("validating", trainer.global_steps)
            return rollout

        def _build_completed_rollout(self, enqueued_rollout: Any, rollout: Any) -> Any:
            trainer.rig.done.add(enqueued_rollout.data_id)
            return super()._build_completed_rollout(enqueued_rollout, rollout)

        def enqueue_and_wait_until_group_completed(self, data: Any, carry_over: Any, **kwargs: Any) -> Any:
            self._rig_target = kwargs["target_finished_group_num"]
            completed, rest = super().enqueue_and_wait_until_group_completed(data, carry_over, **kwargs)
            _note_trained(trainer, completed)
            return completed, rest

        def enqueue_and_wait_until_completed(self, data: Any, *, is_train: bool) -> Any:
            completed = super().enqueue_and_wait_until_completed(data, is_train=is_train)
            if is_train:
                _note_trained(trainer, completed)
            return completed

    return Paced


def _note_trained(trainer: Any, completed: list[Any]) -> None:
    step = trainer.global_steps
    trainer.rig.recorder.emit("trained", step=step, rows=_groups(completed), num_rollouts=len(completed))
    trainer.rig.at("trained", step)


def stock_trainer() -> type:
    """agent-lightning's trainer, without the extension."""
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    return AgentLightningRayPPOTrainer


def extended_trainer() -> type:
    """The trainer of this package."""
    import agl_async_ckpt

    return agl_async_ckpt.AsyncCheckpointTrainer


@functools.cache
def warm_up() -> None:
    """Make lives cheap, once per process: half of a short one goes by in parsing and collecting the same again.

    A process that has imported the frameworks holds half a million objects, which the garbage collector looks through
    again and again; of them none becomes garbage. In forked processes that would also copy the memory that they share.
    """
    import verl.single_controller.ray
    import verl.trainer.main_ppo  # noqa: F401
    from omegaconf import OmegaConf, base

    from agl_async_ckpt.agl import internals

    with contextlib.suppress(ImportError):
        importlib.import_module("wandb")  # which agent-lightning imports at the first step
    _small_ca_file()
    base.parse = functools.cache(base.parse)  # a parse tree is only read
    OmegaConf.to_container(compose_config(RunSettings(4, 1, 2), ".", ""), resolve=True)
    internals.written_by()
    gc.collect()
    gc.freeze()


@functools.cache
def _datasets(n: int, text: str, columns: tuple[str, ...]) -> tuple[Any, Any]:
    """Of training and validation; lives of the same rows share them, since nothing changes a dataset."""
    from agentlightning.verl.dataset import LoadedDataset

    rows = dataset_rows(RunSettings(n, 1, 2, text=text, columns=columns))
    return LoadedDataset(rows), LoadedDataset(rows[:2])


def build_trainer(
    settings: RunSettings,
    out_dir: Path | str,
    base_url: str,
    *,
    trainer_cls: type | None = None,
    recorder: Recorder | None = None,
    die_at: Callable[[str, int], bool] = lambda point, step: False,
    parts: Parts | None = None,
) -> Any:
    """The trainer as agent-lightning's task runner builds it, with recording and the stand-ins; not yet run.

    Args:
        settings: The run.
        out_dir: The output folder.
        base_url: Of the server.
        trainer_cls: Default: this package's trainer.
        recorder: Where events go.
        die_at: Called with each of `POINTS` and the step; True ends the life there.
        parts: What a user has put into it.
    """
    warm_up()
    config = compose_config(settings, out_dir, base_url)
    dataset, val_dataset = _datasets(settings.n, settings.text, settings.columns)
    parts = parts or Parts()
    if parts.dataset is not None:
        dataset = parts.dataset(dataset)
    base = trainer_cls or extended_trainer()
    rig = Rig(recorder or Recorder(), die_at)
    cls: Any = type(base.__name__, (RecordingMixin, base), {"rig": rig})
    collate = parts.collate or (rich_collate if settings.payload == "rich" else None)
    return assemble(cls, config, dataset, val_dataset, collate=collate, make_sampler=parts.sampler)


def assemble(
    cls: Any,
    config: Any,
    dataset: Any,
    val_dataset: Any,
    *,
    collate: Callable[..., Any] | None = None,
    make_sampler: Callable[..., Any] | None = None,
) -> Any:
    """Make a trainer of class `cls` as agent-lightning's task runner does, with a stand-in for the tokenizer.

    Args:
        cls: The class.
        config: Of the run.
        dataset: Of training.
        val_dataset: Of validation.
        collate: Default: VERL's.
        make_sampler: Called with the section `data` and the dataset; default: VERL's.
    """
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.main_ppo import create_rl_sampler
    from verl.trainer.ppo.utils import Role
    from verl.utils.dataset.rl_dataset import collate_fn

    return cls(
        config=config,
        tokenizer=Tokenizer(),
        processor=None,
        role_worker_mapping={Role.ActorRollout: None, Role.Critic: None},
        resource_pool_manager=ResourcePoolManager(resource_pool_spec={"global_pool": [1]}, mapping={}),
        ray_worker_group_cls=None,
        train_dataset=dataset,
        val_dataset=val_dataset,
        collate_fn=collate or collate_fn,
        train_sampler=(make_sampler or create_rl_sampler)(config.data, dataset),
    )


def pull_on(trainer: Any, until_step: int) -> None:
    """Go on pulling with the trainer's own code, B rows a step as every later step does, without training.

    Shows the rest of the stream from where a life ended, at a thousandth of the time.
    """
    size = trainer.config.data.train_batch_size
    for step in range(trainer.global_steps + 1, until_step + 1):
        trainer.global_steps = step
        rows = _rows(trainer._next_train_batch_dict_with_size(size))
        trainer.rig.recorder.emit("pulled", step=step, epoch=trainer.epoch, rows=rows, dry=True)


def close_trainer(trainer: Any) -> None:
    """Release what a process would lose at its end: loader workers, connections."""
    for iterator in (trainer._train_dataloader_iter, trainer.train_dataloader._iterator):
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
    trainer._train_dataloader_iter = None
    trainer.train_dataloader._iterator = None
    if trainer._agl_client is not None:
        trainer._agl_client.close()
    while trainer.rig.clients:
        trainer.rig.clients.pop().close()


@functools.cache
def _small_ca_file() -> str:
    """One certificate authority: httpx reads all of certifi's, 20 ms for each client, though nothing here uses TLS."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    # One file for all processes of a user: a killed process could not remove one of its own.
    path = Path(tempfile.gettempdir()) / f"rig-ca-{os.getuid()}.pem"
    mine = path.with_suffix(f".{os.getpid()}")
    mine.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    mine.replace(path)
    return str(path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what agent-lightning and VERL print, and make their clients cheap to build."""
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = _small_ca_file()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ.pop("SSL_CERT_FILE")
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before


def run_life(
    settings: RunSettings,
    out_dir: Path | str,
    base_url: str,
    *,
    trainer_cls: type | None = None,
    stop_after_step: int | None = None,
    die_at: tuple[str, int] | Callable[[str, int], bool] | None = None,
    pull_until: int | None = None,
    recorder: Recorder | None = None,
    parts: Parts | None = None,
) -> Life:
    """Run `fit` from its start to its end, or to a death.

    Args:
        settings: The run.
        out_dir: The output folder, kept between lives.
        base_url: Of the server; a queued rollout there is played when this trainer waits.
        trainer_cls: Default: this package's trainer.
        stop_after_step: Die right after the save of this step.
        die_at: Or a point of `POINTS` and a step, or a predicate over them.
        pull_until: After a death, pull on without training until this step.
        recorder: Where events go besides the result.
        parts: What a user has put into the trainer.

    Raises:
        Exception: Whatever `fit` raised by itself.
    """
    recorder = recorder or Recorder()
    if stop_after_step is not None:
        die_at = ("saved", stop_after_step)
    if die_at is None:
        predicate: Callable[[str, int], bool] = lambda point, step: False  # noqa: E731
    elif callable(die_at):
        predicate = die_at
    else:
        instant = die_at
        assert instant[0] in POINTS, f"{instant[0]!r} is none of {POINTS}"
        predicate = lambda point, step: (point, step) == instant  # noqa: E731
    with quiet(), LogRecorder(recorder, "agl_async_ckpt"):
        trainer = build_trainer(
            settings, out_dir, base_url, trainer_cls=trainer_cls, recorder=recorder, die_at=predicate, parts=parts
        )
        try:
            trainer.fit()
            recorder.emit("finished")
        except TrainingStopped as stopped:
            recorder.emit("stopped", step=stopped.step, saved=stopped.saved)
        except Death as death:
            recorder.emit("died", at=str(death))
            if pull_until is not None:
                pull_on(trainer, pull_until)
        finally:
            close_trainer(trainer)
    return Life.from_events(copy.deepcopy(recorder.events))
