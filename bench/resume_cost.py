"""Opening the loader at a saved position, against the length of the data set and against other ways to get there.

All sides end with the same next batch, which is compared. (a) torchdata alone: load the loader's state. (b) A skip
loop, accelerate's `skip_first_batches`. (c) A set of the consumed ids, and a loader that is iterated again from the
start of the epoch. Ours adds to (a) what this package does around it: fingerprint, checks and conversion.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.figures import Figure, told
from bench.timing import alternate, median
from tests.rig.bare import bare_trainer

NAME = "resume_cost"
TITLE = "loader at a saved position"

BATCH = 256
SEED = 7


class Rows:
    """A map-style data set of any length: a row costs what a row of a list costs."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"question {index}", "index": index}


def collate(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns of lists."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def measure(folder: Path, *, quick: bool = False) -> list[Figure]:
    """Measure; `quick` with tiny sizes, for the figures' form and not for their values."""
    figures: list[Figure] = []
    for num_rows in (10**3, 3000) if quick else (10**3, 10**4, 10**5, 10**6, 10**7):
        for shuffle in (True, False):
            figures += _one(num_rows, shuffle=shuffle, repeats=1 if quick or num_rows >= 10**7 else 3)
    return figures


def _one(num_rows: int, *, shuffle: bool, repeats: int) -> list[Figure]:
    from agl_async_ckpt.agl.inputs.fingerprint import take_fingerprint
    from agl_async_ckpt.agl.inputs.loader_position import (
        loader_differences,
        open_loader,
        order_differences,
        with_next_rows,
    )
    from agl_async_ckpt.folder.mismatch import differences
    from agl_async_ckpt.state import InputState

    dataset = Rows(num_rows)
    config = {
        "data": {"train_batch_size": BATCH, "seed": SEED, "shuffle": shuffle},
        "agentlightning": {"async_rollout": {"async_train_batch_size": 2 * BATCH}},
        "actor_rollout_ref": {"rollout": {"n": 1}},
    }
    trainer = _trainer(dataset, config, _loader(dataset, shuffle))
    num_batches = num_rows // BATCH // 2
    state, wanted, consumed = _halfway(trainer, num_batches)
    fingerprint = take_fingerprint(trainer)
    saved_in = time.process_time()
    fingerprint = with_next_rows(trainer, fingerprint, state)
    saved_in = time.process_time() - saved_in
    saved = InputState(1, 1, False, state, None, (), None, fingerprint, "bench", written_by=_versions())

    # accelerate is imported outside the time.
    from accelerate import skip_first_batches

    def torchdata_alone() -> None:
        loader = _loader(dataset, shuffle)
        loader.load_state_dict(state)
        assert next(iter(loader)) == wanted

    def ours() -> None:
        resumed = _trainer(dataset, trainer.config, _loader(dataset, shuffle))
        assert not differences(saved.fingerprint, fingerprint)
        assert not loader_differences(resumed, saved)
        assert not order_differences(resumed, saved)
        open_loader(resumed, saved)
        assert next(resumed._train_dataloader_iter) == wanted

    def skip_loop() -> None:
        assert next(iter(skip_first_batches(_plain_loader(dataset, shuffle), num_batches))) == wanted

    def consumed_ids() -> None:
        batch: list[dict[str, Any]] = []
        for found in _plain_loader(dataset, shuffle):
            batch += [
                {"question": question, "index": index}
                for question, index in zip(found["question"], found["index"], strict=True)
                if index not in consumed
            ]
            if len(batch) >= BATCH:
                break
        assert collate(batch[:BATCH]) == wanted

    sides: dict[str, Callable[[], None]] = {
        "torchdata": torchdata_alone,
        "ours": ours,
        "skip": skip_loop,
        "consumed": consumed_ids,
    }
    seconds = {
        name: median(times) for name, times in alternate(sides, repeats=repeats, clock=time.process_time).items()
    }
    what = f"{num_rows:.0e} rows, {'shuffled' if shuffle else 'in order'}".replace("e+0", "e")
    ours_s = seconds["ours"]
    return [
        Figure(
            NAME, f"{what}: ours", ours_s, "s", None, f"CPU time; the save's look at what comes {told(saved_in, 's')}"
        ),
        # Of small data sets the constant part is all there is: it is told, and the growth is judged.
        Figure(
            NAME,
            f"{what}: ours against torchdata alone",
            ours_s / seconds["torchdata"],
            "x",
            1.15 if num_rows >= 10**6 else None,
            f"{told(seconds['torchdata'], 's')}",
        ),
        Figure(NAME, f"{what}: a skip loop takes", seconds["skip"] / ours_s, "x", None, "as long as ours"),
        Figure(NAME, f"{what}: consumed ids take", seconds["consumed"] / ours_s, "x", None, "as long as ours"),
    ]


def _halfway(trainer: Any, num_batches: int) -> tuple[dict[str, Any], Any, set[int]]:
    """State after half an epoch, the batch that comes next, and the ids that were handed out."""
    iterator = trainer._train_dataloader_iter = iter(trainer.train_dataloader)
    consumed: set[int] = set()
    for _ in range(num_batches):
        consumed.update(next(iterator)["index"])
    state = trainer.train_dataloader.state_dict()
    other = _loader(trainer.train_dataset, trainer.config.data["shuffle"])
    other.load_state_dict(state)
    return state, next(iter(other)), consumed


def _trainer(dataset: Rows, config: Any, loader: Any) -> Any:
    """Make a trainer as far as the loader goes."""
    return bare_trainer(config, train_dataset=dataset, train_dataloader=loader, _train_dataloader_iter=None)


def _sampler(dataset: Rows, shuffle: bool) -> Any:
    import torch
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader.sampler import RandomSampler

    if not shuffle:
        return SequentialSampler(dataset)
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED))


def _loader(dataset: Rows, shuffle: bool) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        dataset, batch_size=BATCH, sampler=_sampler(dataset, shuffle), drop_last=True, collate_fn=collate
    )


def _plain_loader(dataset: Rows, shuffle: bool) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=BATCH, sampler=_sampler(dataset, shuffle), drop_last=True, collate_fn=collate)


def _versions() -> dict[str, str]:
    from agl_async_ckpt.agl import internals

    return internals.written_by()
