"""Long-lived Ray actors in which OpenRLHF's actor classes live their lives: importing it takes seconds per process."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import ray
import torch
import wrapt

from tests.openrlhf.rig.machine import Group

STOP = "stop"


class Stopped(Exception):  # noqa: N818 - the end of a life, not an error
    """The generator's process ends here."""


class StoppableSlots(wrapt.ObjectProxy):
    """The real queue of slots; the token `STOP` ends the generator that gets it."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        token = self.__wrapped__.get(*args, **kwargs)
        if token == STOP:
            raise Stopped
        return token


class OrderedRay(wrapt.ObjectProxy):
    """Ray, whose `wait` takes answers in the order of their requests.

    OpenRLHF keeps samples in the order in which its engines complete them, and `ray.wait` picks any that is complete;
    lives can be compared only if it is the same order.
    """

    def wait(self, references: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        self.__wrapped__.wait(references[:1], **options)
        return references[:1], references[1:]


def _take_answers_in_order() -> None:
    module = importlib.import_module("openrlhf.trainer.ppo_utils.samples_generator")
    if not isinstance(module.ray, OrderedRay):
        module.ray = OrderedRay(ray)


def _cache_slow_loads() -> None:
    """Read each file of prompts and the tokenizer once per process: hundreds of lives use the same ones."""
    trainer = importlib.import_module("openrlhf.trainer.ppo_trainer")
    trainer_async = importlib.import_module("openrlhf.trainer.ppo_trainer_async")
    if hasattr(trainer.blending_datasets, "by_path"):
        return
    load, tokenizer = trainer.blending_datasets, functools.cache(trainer.get_tokenizer)
    by_path: dict[str, Any] = {}

    def blending_datasets(path: str, *args: Any, **kwargs: Any) -> Any:
        if path not in by_path:
            by_path[path] = load(path, *args, **kwargs)
        return by_path[path]

    blending_datasets.by_path = by_path
    trainer.blending_datasets = blending_datasets
    trainer_async.get_tokenizer = lambda pretrain, *_, **__: tokenizer(pretrain, None, "left")


def strategy(args: Any, in_order: bool) -> Any:
    """Build OpenRLHF's strategy; with `in_order` its loader does not shuffle."""
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    built = DeepspeedStrategy(args=args)
    if in_order:
        setup = built.setup_dataloader
        built.setup_dataloader = lambda data, size, pin, shuffle, *rest, **more: setup(
            data, size, pin, False, *rest, **more
        )
    return built


@ray.remote(num_cpus=0)
class GeneratorHost:
    """Hosts `GenerateSamplesActor`."""

    def begin(self, args: Any, *, extended: bool, in_order: bool, seed: int, parts: dict[str, Any]) -> None:
        """Build the actor as a new process would."""
        _cache_slow_loads()
        _take_answers_in_order()
        torch.manual_seed(seed)
        if extended:
            from agl_async_ckpt.openrlhf.generator import CheckpointedGenerateSamplesActor as Generator
        else:
            from openrlhf.trainer import ppo_trainer_async

            Generator = ppo_trainer_async.GenerateSamplesActor.__ray_actor_class__  # noqa: N806
        self.actor = Generator(
            args.actor.model_name_or_path,
            strategy(args, in_order),
            [parts["machine"]],
            vllm_lock=parts["lock"],
            rollout_queue=parts["rollout_queue"],
            rollout_slots=StoppableSlots(parts["rollout_slots"]),
            max_len=64,
            max_new_tokens=None,
        )

    def load_state_dict(self, state: Any) -> None:
        self.actor.load_state_dict(state)

    def fit(self, episode: int, total_consumed_prompts: int) -> bool:
        """Run to the end, or to `STOP`; returns whether the end was reached."""
        try:
            self.actor.fit(episode=episode, total_consumed_prompts=total_consumed_prompts)
        except Stopped:
            return False
        return True


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@ray.remote(num_cpus=0)
class TrainerHost:
    """Hosts `TrainingActor`."""

    def begin(self, args: Any, *, extended: bool, parts: dict[str, Any]) -> None:
        """Build the actor as a new process would."""
        _cache_slow_loads()
        if extended:
            from agl_async_ckpt.openrlhf.trainer import CheckpointedTrainingActor as Trainer
        else:
            from openrlhf.trainer import ppo_trainer_async

            Trainer = ppo_trainer_async.TrainingActor.__ray_actor_class__  # noqa: N806
        self.actor = Trainer(
            args.actor.model_name_or_path,
            strategy(args, False),
            Group(parts["machine"]),
            None,
            None,
            None,
            [parts["machine"]],
            vllm_lock=parts["lock"],
            rollout_queue=parts["rollout_queue"],
            rollout_slots=parts["rollout_slots"],
        )

    def init_checkpoint_states(self) -> Any:
        self._records = _Records()
        logging.getLogger("agl_async_ckpt").addHandler(self._records)
        try:
            return self.actor.init_checkpoint_states()
        finally:
            logging.getLogger("agl_async_ckpt").removeHandler(self._records)

    def warnings(self) -> list[str]:
        """Return what the last start warned of."""
        return self._records.texts

    def fit(self, global_step: int) -> None:
        self.actor.fit(global_step=global_step)

    def latest_client_states(self) -> Any:
        """Return the client states of the last trained batch, without what is not theirs to compare."""
        states = dict(self.actor._latest_client_states)
        return {key: states[key] for key in ("episode", "total_consumed_prompts") if key in states}
