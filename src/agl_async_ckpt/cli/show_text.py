"""What `show` prints of an input state: tables of a few rows and columns, texts cut, arrays by shape."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.values import is_array, short
from agl_async_ckpt.codec.loader_state import rows_yielded
from agl_async_ckpt.folder.mismatch import LENGTH
from agl_async_ckpt.state import Batch, InputState, PromptGroup
from agl_async_ckpt.storage.trailer import Trailer
from agl_async_ckpt.words import plural

DEFAULT_COLUMNS = 4
TEXT_WIDTH = 40
ID_WIDTH = 9


def print_state(
    path: Path,
    state: InputState,
    trailer: Trailer,
    inputs: Sequence[Mapping[str, Any]],
    *,
    columns: Sequence[str] | None,
    limit: int,
) -> None:
    """Print what an input state holds.

    Args:
        path: Of the file.
        state: Its content.
        trailer: Of the file.
        inputs: (num_groups,), the input of each group in flight.
        columns: To show of the inputs; None for a few of them.
        limit: How many rows, and how many groups.
    """
    parent = f", forked from run {state.parent_run_id}" if state.parent_run_id else ""
    output.say(f"{path}: step {state.global_step} of run {state.run_id}{parent}")
    versions = ", ".join(f"{name} {version}" for name, version in state.written_by.items())
    output.say(f"Saved {output.duration(time.time() - trailer.saved_at)} ago by {versions or 'unknown versions'}.")
    output.say(f"Epoch {state.epoch}: {position_words(state)}.")
    output.say()
    _print_buffered(state, columns, limit)
    output.say()
    _print_in_flight(state, trailer, inputs, columns, limit)
    if state.num_dropped_groups:
        output.say(f"{plural(state.num_dropped_groups, 'group')} in flight left out: in_flight=drop.")
    facts = {**state.fingerprint.must_match, **state.fingerprint.recorded}
    if facts:
        output.say()
        output.say("The inputs come from:")
        for name, value in facts.items():
            output.say(f"  {name}: {output.cut(short(value), 2 * TEXT_WIDTH)}")


def position_words(state: InputState) -> str:
    """Say how far the loader is in its epoch."""
    rows, length = rows_yielded(state.loader_state), state.fingerprint.must_match.get(LENGTH)
    if state.exhausted:
        return "the loader has handed out its last batch"
    if rows is None:
        return "how far the loader is cannot be told from its state"
    return f"the loader has handed out {rows}{'' if length is None else f' of {length}'} rows"


def _print_buffered(state: InputState, wanted: Sequence[str] | None, limit: int) -> None:
    batch = state.buffered_batch
    output.say(f"Buffered: {plural(state.num_buffered, 'row')} pulled and not yet enqueued.")
    if not batch or not state.num_buffered or not limit:
        return
    rows = [batch_row(batch, index) for index in range(min(limit, state.num_buffered))]
    columns = _columns(wanted, rows[0])
    if not columns:
        return
    table = [[index, *(output.cut(short(row[name]), TEXT_WIDTH) for name in columns)] for index, row in enumerate(rows)]
    output.print_table(("row", *columns), table, right=("row",))
    _print_rest(state.num_buffered, limit, len(columns), len(rows[0]))


def _print_in_flight(
    state: InputState, trailer: Trailer, inputs: Sequence[Mapping[str, Any]], wanted: Sequence[str] | None, limit: int
) -> None:
    output.say(f"In flight: {plural(state.num_in_flight, 'prompt group')}, oldest first.")
    if not state.carry_over or not limit:
        return
    columns = _columns(wanted, _ordered(inputs[0], state.buffered_batch))
    table = [
        [
            output.cut(group.data_id, ID_WIDTH),
            group.step,
            output.duration(age_s(group, trailer)),
            f"{_num_finished(group)} of {len(group.rollouts)}",
            *(output.cut(short(row.get(name)), TEXT_WIDTH) for name in columns),
        ]
        for group, row in zip(state.carry_over[:limit], inputs, strict=False)
    ]
    headers = ("data_id", "step", "age", "finished", *columns)
    output.print_table(headers, table, right=("step", "age"), spare=("age", "finished"))
    _print_rest(state.num_in_flight, limit, len(columns), len(inputs[0]))


def _print_rest(num_rows: int, limit: int, num_shown: int, num_columns: int) -> None:
    left = []
    if num_rows > limit:
        left.append(f"{num_rows - limit} more: --rows {num_rows}")
    if num_columns > num_shown:
        left.append(f"{plural(num_columns - num_shown, 'more column')}: --column NAME")
    if left:
        output.say(f"({'; '.join(left)})")


def age_s(group: PromptGroup, trailer: Trailer) -> float | None:
    """Return the seconds from the first enqueue to the save, by the trainer's clock; None if the file has none."""
    times = [rollout.enqueued.get("enqueue_time") for rollout in group.rollouts]
    known = [float(moment) for moment in times if isinstance(moment, int | float)]
    return trailer.saved_at - min(known) if known else None


def _num_finished(group: PromptGroup) -> int:
    return sum(rollout.finished is not None for rollout in group.rollouts)


def batch_row(batch: Batch, index: int) -> dict[str, Any]:
    """Return one row of a loader batch."""
    return {str(name): column[index] for name, column in batch.items()}


def _ordered(row: Mapping[str, Any], batch: Batch | None) -> dict[str, Any]:
    """Order the columns of an input as in the buffered rows, then by name: VERL hands them on in any order."""
    places = {str(name): place for place, name in enumerate(batch or {})}
    return {name: row[name] for name in sorted(row, key=lambda name: (places.get(name, len(places)), name))}


def _columns(wanted: Sequence[str] | None, first_row: Mapping[str, Any]) -> list[str]:
    """Choose the columns to show: those asked for, or a few, what a person can read first."""
    if wanted is not None:
        return [name for name in dict.fromkeys(wanted) if name in first_row]
    readable = [name for name, value in first_row.items() if not is_array(value)]
    return (readable or list(first_row))[:DEFAULT_COLUMNS]
