"""Ray and the lives that are lived on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.queue import Queue

from tests.openrlhf.rig.arguments import parse, training_words
from tests.openrlhf.rig.hosts import STOP, GeneratorHost, TrainerHost
from tests.openrlhf.rig.machine import CrashError, Group, Machine

SEED = 7


@dataclass(frozen=True)
class Life:
    """What one process life did.

    Attributes:
        trained: Prompts of every training step that ended, in order.
        generated: Prompts that the engine answered, in order.
        start_step: The step it resumed after; 0 for a fresh start.
        counted: `episode` and `total_consumed_prompts` of the last trained batch.
    """

    trained: list[list[str]]
    generated: list[str]
    start_step: int
    counted: dict[str, int]

    @property
    def prompts(self) -> list[str]:
        """All trained prompts, in order."""
        return [prompt for batch in self.trained for prompt in batch]


class Stage:
    """Long-lived actors, and the same steps that OpenRLHF's trainer takes with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _start_ray()
        from openrlhf.trainer.ppo_trainer_async import VLLMLock

        self.machine, self.lock = Machine.remote(), VLLMLock.remote()
        self.generator, self.trainer = GeneratorHost.remote(), TrainerHost.remote()
        self._queues: dict[int, tuple[Queue, Queue]] = {}

    def args(self, ckpt: Path, num_prompts: int, **settings: Any) -> Any:
        """Return OpenRLHF's arguments for a run that saves in `ckpt`; see `training_words`."""
        args = parse(*training_words(self.folder, num_prompts, **settings))
        args.ckpt.path = str(ckpt)
        for part, name in ((args.eval, "steps"), (args.ckpt, "save_steps")):  # as PPOTrainerAsync does
            if getattr(part, name) == -1:
                setattr(part, name, float("inf"))
        return args

    def live(
        self,
        args: Any,
        *,
        crash_at: int | None = None,
        extended: bool = True,
        in_order: bool = False,
        seed: int = SEED,
    ) -> Life:
        """Start or resume a run, and train until the end or until step `crash_at` fails."""
        size = args.train.async_queue_size
        if size not in self._queues:
            self._queues[size] = Queue(maxsize=size), Queue(maxsize=size)
        rollout_queue, slots = self._queues[size]
        parts = {"machine": self.machine, "lock": self.lock, "rollout_queue": rollout_queue, "rollout_slots": slots}
        ray.get(self.machine.begin.remote(str(Path(args.ckpt.path) / "_actor"), crash_at))
        ray.get(
            [
                self.generator.begin.remote(args, extended=extended, in_order=in_order, seed=seed, parts=parts),
                self.trainer.begin.remote(args, extended=extended, parts=parts),
            ]
        )
        states = ray.get(self.trainer.init_checkpoint_states.remote())
        if states["global_step"] > 0:
            ray.get(self.generator.load_state_dict.remote(states["data_loader_state_dict"]))
        for _ in range(size):
            slots.put(0)
        generating = self.generator.fit.remote(states["episode"], states.get("total_consumed_prompts", 0))
        training = self.trainer.fit.remote(states["global_step"])
        crashed = False
        try:
            ray.wait([generating, training], num_returns=1)
            ray.get(training if crash_at is not None else [training, generating])
        except RayTaskError as error:
            if "CrashError" not in str(error):
                raise
            crashed = True
        finally:
            self._stop(generating, rollout_queue, slots)
        assert crashed == (crash_at is not None), f"{crash_at=}, {crashed=}"
        story = ray.get(self.machine.story.remote())
        counted = ray.get(self.trainer.latest_client_states.remote())
        return Life(story["trained"], story["generated"], states["global_step"], counted)

    def _stop(self, generating: Any, rollout_queue: Queue, slots: Queue) -> None:
        """End the generator as a kill would, and leave the queues empty for the next life."""
        told = False
        while not ray.wait([generating], timeout=0.02)[0]:
            _drain(rollout_queue)
            if not told and not slots.full():
                slots.put(STOP)
                told = True
        _drain(rollout_queue)
        _drain(slots)

    def group(self) -> Group:
        """Return the model group of the stage."""
        return Group(self.machine)

    def close(self) -> None:
        """End Ray and everything on it."""
        ray.shutdown()


def _start_ray(attempts: int = 3) -> None:
    """Start Ray; again if it has not come up, as on a machine with far more to do than processors."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=200 * 2**20,
                logging_level="ERROR",
            )
            return
        except Exception:
            ray.shutdown()
            if attempt == attempts:
                raise


def _drain(queue: Queue) -> None:
    while not queue.empty():
        queue.get()


__all__ = ["SEED", "CrashError", "Life", "Stage"]
