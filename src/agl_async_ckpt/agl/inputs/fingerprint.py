"""What the inputs of a run come from: its data set, sampler and loader."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs.dataset_content import read_content
from agl_async_ckpt.config import SECTION
from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.folder.mismatch import COLUMNS, CONTENT, LENGTH, Difference, mismatch
from agl_async_ckpt.state import Fingerprint, InputState

log = logging.getLogger(__name__)

NUM_WORKERS = "data.dataloader_num_workers"
LOADER_BATCH = "loader batch size"


def take_fingerprint(trainer: internals.Trainer) -> Fingerprint:
    """Read the fingerprint of this run's dataset, sampler and loader."""
    data = trainer.config.data
    loader = trainer.train_dataloader
    sampler = type(loader.sampler)
    content = read_content(trainer.train_dataset)
    must_match = {
        LENGTH: len(trainer.train_dataset),
        COLUMNS: content.columns,
        CONTENT: content.digest,
        "data.seed": data.get("seed"),
        "data.shuffle": bool(data.get("shuffle")),
        "sampler class": f"{sampler.__module__}.{sampler.__qualname__}",
        "drop_last": bool(loader.drop_last),
    }
    if content.columns is None:
        del must_match[COLUMNS]
    if content.digest is None:
        del must_match[CONTENT]
        log.info("A resume will not notice if rows of the data set have changed: %s.", content.problem)
    return Fingerprint(
        must_match=must_match,
        recorded={
            LOADER_BATCH: int(loader.batch_size),
            "data.train_batch_size": internals.train_batch_size(trainer),
            "async_train_batch_size": internals.async_batch_size(trainer),
            NUM_WORKERS: int(loader.num_workers),
            "rollout.n": internals.group_size(trainer),
        },
    )


def refusal(found: Sequence[Difference], state: InputState, step_dir: Path) -> StateMismatchError:
    """Compose what is said of a saved position that does not fit, with how to go on without it."""
    otherwise = (
        f"set {SECTION}.on_mismatch=reset to drop the saved position "
        f"({state.num_buffered} buffered, {state.num_in_flight} in flight)."
    )
    return mismatch(found, step_dir, otherwise)
