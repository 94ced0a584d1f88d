"""Ray worker hook of the real run that `blocking` starts: the demo's, and a trainer that times saves of both kinds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import wrapt

ROUNDS_VARIABLE = "AGL_BENCH_SAVES"
FILE_VARIABLE = "AGL_BENCH_FILE"


def setup() -> None:
    """Set a worker process up as the demo does, and time the saves of its trainer."""
    from cpu_training import worker_hook

    from agl_async_ckpt.agl.activation import TRAINER_CLASS, TRAINER_MODULE

    worker_hook.setup()

    def time_saves(module: Any) -> None:
        namespace = vars(module)
        namespace[TRAINER_CLASS] = timing_class(namespace[TRAINER_CLASS])

    wrapt.register_post_import_hook(time_saves, TRAINER_MODULE)


def timing_class(base: Any) -> Any:
    """A subclass whose first save is repeated: with the extension and without, in turns, into folders of their own."""
    from agl_async_ckpt.agl import save as our_save
    from agl_async_ckpt.agl.trainer import CheckpointOverrides

    class TimingTrainer(base):
        def _save_checkpoint(self) -> Any:
            seconds: dict[str, list[float]] = {"with": [], "without": [], "model sync": []}
            sync_models = our_save.sync_models

            def timed_sync(step_dir: Path) -> None:
                started = time.perf_counter()
                sync_models(step_dir)
                seconds["model sync"].append(time.perf_counter() - started)

            our_save.sync_models = timed_sync
            section = self.config.trainer
            ours, stock = section.default_local_dir, f"{section.default_local_dir}-stock"
            for _ in range(int(os.environ[ROUNDS_VARIABLE])):
                os.sync()
                started = time.perf_counter()
                result = super()._save_checkpoint()
                seconds["with"].append(time.perf_counter() - started)
                section.default_local_dir = stock
                os.sync()
                started = time.perf_counter()
                super(CheckpointOverrides, self)._save_checkpoint()
                seconds["without"].append(time.perf_counter() - started)
                section.default_local_dir = ours
            our_save.sync_models = sync_models
            target = Path(os.environ[FILE_VARIABLE])
            target.with_suffix(".tmp").write_text(json.dumps(seconds))
            target.with_suffix(".tmp").rename(target)
            return result

    TimingTrainer.__name__ = TimingTrainer.__qualname__ = base.__name__
    return TimingTrainer
