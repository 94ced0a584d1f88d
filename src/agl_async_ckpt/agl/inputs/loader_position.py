"""The loader at a saved position, also where its batch size or its number of workers has changed since.

The position is a row of the current pass. The rest of that pass is what the saved run would still have taken of it, in
the same order; later passes are cut, and with or without workers shuffled, as the new settings have it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs.fingerprint import LOADER_BATCH, NUM_WORKERS
from agl_async_ckpt.codec.loader_state import obstacle_to_conversion, pass_has_ended, rows_yielded, state_for_workers
from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.folder.mismatch import Difference
from agl_async_ckpt.state import Batch, Fingerprint, InputState, num_rows

log = logging.getLogger(__name__)

NEXT_ROWS = "next rows of the epoch"
NUM_NEXT_ROWS = 8


def loader_differences(trainer: internals.Trainer, state: InputState) -> list[Difference]:
    """List changes of the loader's settings that this loader state does not allow; empty if the resume is exact."""
    loader = trainer.train_dataloader
    changes = [
        (NUM_WORKERS, _saved(state, NUM_WORKERS, loader.num_workers), int(loader.num_workers)),
        (LOADER_BATCH, _saved(state, LOADER_BATCH, loader.batch_size), int(loader.batch_size)),
    ]
    if all(saved == current for _, saved, current in changes):
        return []
    versions = state.written_by.get("torchdata"), internals.written_by().get("torchdata")
    obstacle = obstacle_to_conversion(state.loader_state, versions)
    if obstacle is None:
        return []
    return [Difference(name, saved, current, obstacle) for name, saved, current in changes if saved != current]


def with_next_rows(
    trainer: internals.Trainer, fingerprint: Fingerprint, loader_state: Mapping[str, Any]
) -> Fingerprint:
    """Return the fingerprint of a save: with the rows that the loader would hand out next."""
    rows = internals.next_rows(trainer, loader_state, NUM_NEXT_ROWS)
    return fingerprint if rows is None else replace(fingerprint, recorded={**fingerprint.recorded, NEXT_ROWS: rows})


def order_differences(trainer: internals.Trainer, state: InputState) -> list[Difference]:
    """List the rows that come next, if this torch draws others from the saved generator than the one that saved it.

    To be asked where nothing else differs: another data set has another order anyway.
    """
    saved = state.fingerprint.recorded.get(NEXT_ROWS)
    if saved is None:
        return []
    current = internals.next_rows(trainer, state.loader_state, NUM_NEXT_ROWS)
    if current is None or current == saved:
        return []
    versions = state.written_by.get("torch"), internals.written_by().get("torch")
    reason = "the saved generator gives another order with torch {1} than with {0}".format(*versions)
    return [Difference(NEXT_ROWS, saved, current, reason)]


def open_loader(trainer: internals.Trainer, state: InputState) -> Batch | None:
    """Open the training loader at the saved position.

    With another batch size the rows that the saved run would still have taken of the pass need not fill the new
    batches, and the loader would leave the last ones out. So many that the others do fill them are read here.

    Returns:
        The buffered rows: those of the state, followed by the ones read here.

    Raises:
        StateMismatchError: torchdata refuses the state, or rows read now do not fit those in the file.
    """
    loader = trainer.train_dataloader
    loader_state: Mapping[str, Any] = state.loader_state
    saved_workers = _saved(state, NUM_WORKERS, loader.num_workers)
    buffered = state.buffered_batch
    num_ahead = rows_to_read_ahead(trainer, state)
    if num_ahead:
        ahead, loader_state = internals.read_ahead(trainer, loader_state, num_ahead)
        buffered, saved_workers = joined(buffered, ahead), 0
        log.info(
            "The loader batch was %s and is %d: the next %d rows of the epoch are read as one smaller batch, so that "
            "its rest is the one that was to come.",
            state.fingerprint.recorded[LOADER_BATCH],
            loader.batch_size,
            num_ahead,
        )
    if saved_workers != loader.num_workers:
        loader_state = state_for_workers(loader_state, loader.num_workers)
    internals.restore_loader(trainer, loader_state)
    return buffered


def rows_to_read_ahead(trainer: internals.Trainer, state: InputState) -> int:
    """Return how many of the rows that the saved run would still take of the pass do not fill a batch of this run."""
    loader = trainer.train_dataloader
    saved_batch = _saved(state, LOADER_BATCH, loader.batch_size)
    if saved_batch == loader.batch_size or not loader.drop_last or pass_has_ended(state.loader_state):
        return 0
    rows = rows_yielded(state.loader_state)
    assert rows is not None, "loader_differences refuses a state that cannot tell"
    to_come = (len(loader.sampler) - rows) // saved_batch * saved_batch
    return to_come % loader.batch_size


def _saved(state: InputState, name: str, default: Any) -> int:
    return int(state.fingerprint.recorded.get(name, default))


def joined(first: Batch | None, second: Batch) -> Batch:
    """Return one batch with the rows of both, as the trainer joins what it has pulled.

    Raises:
        StateMismatchError: A column is missing on one side, or its two parts cannot be joined.
    """
    if not num_rows(first):
        return second
    assert first is not None
    try:
        if first.keys() != second.keys():
            raise TypeError("the columns differ")
        return {name: internals.joined_column([column, second[name]]) for name, column in first.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = [{name: type(column).__name__ for name, column in batch.items()} for batch in (first, second)]
        names = sorted(name for name in {*kinds[0], *kinds[1]} if kinds[0].get(name) != kinds[1].get(name))
        rows = [(f"{name} {where}", side.get(name)) for name in names for where, side in _sides(kinds)]
        raise StateMismatchError(
            f"The saved rows and the rows of this run's loader cannot be one batch: {error}.",
            rows,
            "Resume with the data set and the collate function of the saved run.",
        ) from error


def _sides(kinds: list[dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    return [("in the checkpoint", kinds[0]), ("in this run", kinds[1])]
