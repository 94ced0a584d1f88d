"""Named in VERL_USE_EXTERNAL_MODULES of the workers: trainings of a few short steps, for stops in real Ray.

The task runner, the trainer that it builds and the overrides of this package are real; below them, agent-lightning's
loop, step, load and save are a few lines that leave files behind.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from tests.switch_on.names import ENDS

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


def ends_of_children() -> dict[str, int | None]:
    """End programs as rewards in a worker do; exit codes, None for one that does not end."""
    started = subprocess.Popen(["sleep", "6"])
    started.terminate()
    forking = multiprocessing.get_context("fork")
    runs = forking.Event()
    forked = forking.Process(target=lambda: runs.set() or time.sleep(6))
    forked.start()
    runs.wait(10)  # an earlier one meets Ray's handler where Python ignores what it raises
    forked.terminate()
    forked.join(3)
    ends = {"forked": forked.exitcode}
    for name, process in {"started": started, "timeout": subprocess.Popen(["timeout", "1", "sleep", "6"])}.items():
        try:
            ends[name] = process.wait(3)
        except subprocess.TimeoutExpired:
            ends[name] = None
            process.kill()
            process.wait()
    forked.kill()
    forked.join()
    return ends


def _train_step(self: Any, *_args: Any) -> Any:
    if self.global_steps == 1:
        Path(self.config.trainer.default_local_dir, ENDS).write_text(json.dumps(ends_of_children()))
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
