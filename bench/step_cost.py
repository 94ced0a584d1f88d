"""What a training step pays: the mixin's hooks, the ledger's line and the metrics, and whether that grows.

The trainer, its loader and its configuration are real; the rollouts are agent-lightning's own records, finished oldest
first. Timed is only what this package adds, as CPU time. Its hooks around posting a rollout are timed by themselves,
per rollout: they run while agents are started, in a step that waits for them anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.figures import Figure
from bench.timing import median, resident

NAME = "step_cost"
TITLE = "per training step"

Clock = Callable[[], float]


class SteppedTrainer:
    """A real trainer whose steps are played, with our hooks at the places where the real ones call them."""

    def __init__(self, folder: Path, *, num_rows: int, batch: int, active: int, rollout_n: int, text: str) -> None:
        from agl_async_ckpt.folder.run_identity import RunIdentity
        from tests.rig.life import build_trainer, quiet
        from tests.rig.settings import RunSettings

        # More epochs than are needed: the trainer counts its steps beforehand.
        settings = RunSettings(num_rows, batch, active, rollout_n=rollout_n, epochs=10**6, shuffle=True, text=text)
        with quiet():
            self.trainer = build_trainer(settings, folder, "http://127.0.0.1:9")
        self.trainer.global_steps, self.trainer.epoch = 0, 1
        self.extension = self.trainer._async_ckpt
        self._batch, self._active, self._n = batch, active, rollout_n
        self.life = self.extension.begin_life(self.trainer, folder, RunIdentity("bench"), own_folder=True)
        self.extension.open_ledger(self.trainer, folder, resume="none", resumed_from=None, loader_rows=0)

    def step(self, clock: Clock) -> tuple[float, float]:
        """Play one step; returns the seconds of our hooks, and those of noting what is posted."""
        from tests.rig.life import stock_trainer

        trainer, extension = self.trainer, self.extension
        trainer.global_steps += 1
        started = clock()
        self.life.on_pull()
        ours = clock() - started
        num_missing = self._active - len(trainer._carry_over_rollouts) // self._n
        batch = stock_trainer()._next_train_batch_dict_with_size(trainer, num_missing)  # type: ignore[attr-defined]
        started = clock()
        extension.on_pulled(trainer, batch)
        ours += clock() - started
        new, requests = self._enqueue(batch, num_missing)
        started = clock()
        self.life.keeper.groups.outgoing(requests)
        noting = clock() - started
        everything = [*trainer._carry_over_rollouts, *new]
        done, trainer._carry_over_rollouts = everything[: self._batch * self._n], everything[self._batch * self._n :]
        result = {}, SimpleNamespace(non_tensor_batch={"uid": _object_array([item.data_id for item in done])})
        started = clock()
        names = extension.ledger.on_enqueued(batch)
        extension.ledger.on_completed(names, done, trainer._carry_over_rollouts)
        extension.on_step_done(trainer, result)
        return ours + clock() - started, noting

    def _enqueue(self, batch: Any, num_groups: int) -> tuple[list[Any], list[dict[str, Any]]]:
        from agl_async_ckpt.agl import internals

        step = self.trainer.global_steps
        new: list[Any] = []
        requests: list[dict[str, Any]] = []
        for place in range(num_groups):
            row = {name: column[place] for name, column in batch.items() if not hasattr(column, "dim")}
            for sibling in range(self._n):
                rollout_id = f"{step}-{place}-{sibling}"
                fields = {
                    "data_id": f"{step}-{place}",
                    "rollout_id": rollout_id,
                    "step": step,
                    "sample_idx_in_step": place,
                    "enqueue_time": 0.0,
                    "input": row,
                }
                new.append(internals.enqueued_rollout(fields))
                requests.append({"rollout_id": rollout_id, "input": row, "is_train": True, "config": {}})
        return new, requests

    def close(self) -> None:
        """Close the ledger, the loader and the connections."""
        from tests.rig.life import close_trainer

        self.extension.leave_folder()
        close_trainer(self.trainer)


def measure(folder: Path, *, quick: bool = False) -> list[Figure]:
    """Measure; `quick` with tiny sizes, for the figures' form and not for their values."""
    active, num_steps, num_long = (8, 5, 40) if quick else (1024, 40, 100_000)
    ours, noting, io = _steps(folder / "wide", active, num_steps, "question " * 20)
    long, _, _ = _steps(folder / "long_inputs", active, num_steps, "question " * 450)
    what = f"hooks, ledger and metrics, A={active}, n=8"
    figures = [
        Figure(NAME, f"{what}, inputs of 200 bytes", median(ours), "s", 5e-3, "CPU time"),
        Figure(NAME, f"{what}, inputs of 4 KB", median(long), "s", 5e-3, "CPU time"),
        Figure(NAME, "of that, the ledger's write", median(io), "s", None, "handed to the kernel; synced at a save"),
        Figure(NAME, "noting a rollout as it is posted", median(noting) / (active // 2 * 8), "s", None, "per rollout"),
    ]
    first, last, grown = _long_run(folder / "long", num_long)
    return [
        *figures,
        Figure(NAME, f"last tenth of {num_long} steps", last / first, "x", 1.1, "against the second tenth, A=8"),
        Figure(NAME, "memory grown in the last nine tenths", float(grown), "bytes", 2.0**20 * 8),
    ]


def _steps(folder: Path, active: int, num_steps: int, text: str) -> tuple[list[float], list[float], list[float]]:
    stepped = SteppedTrainer(folder, num_rows=8 * active, batch=active // 2, active=active, rollout_n=8, text=text)
    writer = stepped.extension.ledger._writer
    io: list[float] = []
    append = writer.append

    def timed(entry: Any) -> None:
        started = time.process_time()
        append(entry)
        io.append(time.process_time() - started)

    writer.append = timed
    try:
        seconds = [stepped.step(time.process_time) for _ in range(num_steps)]
    finally:
        stepped.close()
    return [ours for ours, _ in seconds[2:]], [noting for _, noting in seconds[2:]], io[2:]


def _long_run(folder: Path, num_steps: int) -> tuple[float, float, int]:
    stepped = SteppedTrainer(folder, num_rows=4096, batch=4, active=8, rollout_n=2, text="question")
    tenth = num_steps // 10
    try:
        for _ in range(tenth):
            stepped.step(time.process_time)
        before = resident()
        second = [stepped.step(time.process_time)[0] for _ in range(tenth)]
        for _ in range(7 * tenth):
            stepped.step(time.process_time)
        last = [stepped.step(time.process_time)[0] for _ in range(tenth)]
        return median(second), median(last), resident() - before
    finally:
        stepped.close()


def _object_array(items: list[Any]) -> Any:
    import numpy as np

    return np.array([*items, None], dtype=object)[:-1]
