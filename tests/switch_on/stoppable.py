"""Named in VERL_USE_EXTERNAL_MODULES of the workers: trainings of a few short steps, for stops in real Ray.

The task runner, the trainer that it builds and the overrides of this package are real; below them, agent-lightning's
loop, step, load and save are a few lines that leave files behind.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

STEP_S = 3.0
NUM_STEPS = 60


def in_step(step: int) -> str:
    """Name of the file that a step leaves when it begins."""
    return f"in_step_{step}"


def saved(step: int) -> str:
    """Name of the file that a save leaves."""
    return f"saved_{step}"


def _leave(trainer: Any, name: str) -> None:
    Path(trainer.config.trainer.default_local_dir, name).touch()


def _fit(self: Any) -> None:
    self.global_steps = 0
    self._load_checkpoint()
    self.global_steps += 1
    while self.global_steps <= NUM_STEPS:
        self._train_step({}, False)
        if self.config.trainer.save_freq > 0 and self.global_steps % self.config.trainer.save_freq == 0:
            self._save_checkpoint()
        self.global_steps += 1


def _train_step(self: Any, *_args: Any) -> Any:
    _leave(self, in_step(self.global_steps))
    time.sleep(STEP_S)


def _take_over(module: ModuleType) -> None:
    extended: Any = vars(module)["AgentLightningRayPPOTrainer"]
    stock: Any = [cls for cls in extended.__mro__ if cls.__module__ == module.__name__][-1]
    stock.init_workers = lambda self: None
    stock.fit, stock._train_step = _fit, _train_step
    stock._load_checkpoint = lambda self: None
    stock._save_checkpoint = lambda self: _leave(self, saved(self.global_steps))


wrapt.register_post_import_hook(_take_over, "agentlightning.verl.trainer")
