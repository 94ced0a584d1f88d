"""The first pull after a resume begins with the saved rows, or nothing is enqueued."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs.first_pull import FirstPull
from agl_async_ckpt.exceptions import StateMismatchError
from tests.rig.life import extended_trainer, run_life, stock_trainer
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer


def batch(*rows: int, **columns: list[Any]) -> dict[str, Any]:
    """Rows of one column, and others."""
    return {"index": np.array(rows, dtype=object), **columns}


@pytest.mark.parametrize(
    ("pulled", "left"),
    [(batch(6, 7), None), (batch(6, 7, 8), batch(9)), (batch(6), batch(7)), (batch(6, 7, z=[1, 2]), None)],
)
def test_saved_rows_at_the_head_are_accepted(pulled: dict[str, Any], left: dict[str, Any] | None) -> None:
    """Also where the pull is smaller than the tail, or adds a column."""
    FirstPull(batch(6, 7), Path("ckpt/global_step_1")).check(pulled, left)


@pytest.mark.parametrize(
    ("pulled", "left", "row"),
    [
        (batch(8, 9), None, 0),
        (batch(7, 6), None, 0),
        (batch(6, 8), batch(7), 1),
        (batch(6), None, 1),
        (batch(6), batch(8), 1),
        ({"other": [6, 7]}, None, 0),
    ],
)
def test_other_rows_at_the_head_are_refused(pulled: dict[str, Any], left: dict[str, Any] | None, row: int) -> None:
    """Lost, changed, or in another order: the message names the first row and the column."""
    with pytest.raises(StateMismatchError) as caught:
        FirstPull(batch(6, 7), Path("ckpt/global_step_1")).check(pulled, left)
    text = str(caught.value)
    assert f"the rows buffered in ckpt/global_step_1: row {row} of 2 differs in 'index'." in text
    assert "Nothing was enqueued." in text


@pytest.mark.parametrize(
    ("saved", "new"),
    [
        (np.array([6, 7]), np.array([8.5])),
        (np.array([True, False]), np.array([8])),
        (np.array([6, 7], dtype="i4"), np.array([8], dtype="i8")),
        (np.array(["a", "b"]), np.array(["long"])),
        (np.array([6, 7]), np.array(["long"])),
        (np.array([2**60 + 1, 2]), np.array([0.5])),
        (np.array(["2024-01-01", "NaT"], dtype="M8[D]"), np.array(["2024-01-01"], dtype="M8[s]")),
        (np.array(["2024-01-01", "NaT"], dtype="M8[D]"), np.array([None], dtype=object)),
        (torch.tensor([0.1, float("nan")]), torch.tensor([0.2], dtype=torch.float64)),
        (torch.tensor([[6], [7]], dtype=torch.int32), torch.tensor([[8]])),
    ],
    ids=lambda column: str(column.dtype),
)
def test_numbers_that_the_pull_has_converted_are_the_saved_ones(saved: Any, new: Any) -> None:
    """A collate function chooses a type for each batch, and joining batches one for all of them."""
    pulled = {"x": internals.joined_column([saved, new])}
    assert pulled["x"].dtype != saved.dtype
    FirstPull({"x": saved}, Path("x")).check(pulled, None)
    changed = {"x": internals.joined_column([saved[[1, 0]], new])}
    with pytest.raises(StateMismatchError, match="row 0 of 2 differs in 'x'"):
        FirstPull({"x": saved}, Path("x")).check(changed, None)


def test_change_in_place_is_noticed_behind_a_conversion() -> None:
    """The saved numbers are compared with what they were."""
    saved = np.array([6, 7])
    first_pull = FirstPull({"x": saved}, Path("x"))
    saved[1] = 9
    with pytest.raises(StateMismatchError, match=r"row [01] of 2 differs in 'x'"):
        first_pull.check({"x": np.concatenate([saved, [0.5]])}, None)


def test_numbers_of_a_narrower_type_are_not_the_saved_ones() -> None:
    """Joining never narrows."""
    with pytest.raises(StateMismatchError, match="row 0 of 2 differs in 'x'"):
        FirstPull({"x": np.array([6.0, 7.0])}, Path("x")).check({"x": np.array([6, 7, 8])}, None)


def test_rows_changed_in_place_are_noticed() -> None:
    """The content is taken when they are put back."""
    tail = batch(6, 7, note=[{"a": 1}, {"a": 2}])
    first_pull = FirstPull(tail, Path("x"))
    tail["note"][1]["a"] = 3
    with pytest.raises(StateMismatchError, match="row 1 of 2 differs in 'note'"):
        first_pull.check(tail, None)


def test_rows_of_unknown_content_are_let_through(caplog: pytest.LogCaptureFixture) -> None:
    """A comparison that cannot be made does not stop a run; it says so."""
    caplog.set_level(logging.INFO)
    FirstPull(batch(6, note=[object()]), Path("x")).check(batch(6, note=[object()]), None)
    assert "The first pull is not compared with the 1 buffered rows" in caplog.text


def test_trainer_that_loses_the_tail_is_stopped_before_it_enqueues(server: AglServer, tmp_path: Path) -> None:
    """A trainer of one's own that clears its buffer before a pull; in flight stays as it was."""
    run = settings("14/4/6", epochs=2)
    run_life(run, tmp_path, server.url, stop_after_step=1)
    before = set(server.rollouts())

    def lose(self: Any, size: int) -> Any:
        self._train_dataloader_buf = None
        return stock_trainer()._next_train_batch_dict_with_size(self, size)  # type: ignore[attr-defined]

    careless: Any = types.new_class(
        "Careless", (extended_trainer(),), {}, lambda names: names.update(_next_train_batch_dict_with_size=lose)
    )
    with pytest.raises(StateMismatchError, match=r"global_step_1: row 0 of 2 differs in '"):
        run_life(run, tmp_path, server.url, trainer_cls=careless)
    assert set(server.rollouts()) == before


def test_check_does_not_disturb_the_stream(server: AglServer, tmp_path: Path) -> None:
    """Tail of every kind of column, from a file, at each resume."""
    run = settings("14/4/6", payload="rich", shuffle=True, epochs=2)
    lives = [run_life(run, tmp_path, server.url, stop_after_step=step) for step in (1, 3)]
    lives.append(run_life(run, tmp_path, server.url))
    assert_continues(uninterrupted(run, server), *lives)
