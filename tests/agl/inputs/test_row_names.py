"""The name of an input: the same in every process and with every numpy, and for the posted request as well."""

from __future__ import annotations

import copy
import datetime as dt
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_async_ckpt.agl.inputs import row_names
from agl_async_ckpt.agl.inputs.row_names import RowNames, knows_positions
from agl_async_ckpt.ledger.entry import Step, position_of
from agl_async_ckpt.ledger.reader import read_ledger
from tests.rig.life import run_life
from tests.rig.runs import settings
from tests.rig.server import AglServer

ROW = {"question": "Wie viel? ☕", "index": 3, "extra_info": {"index": 3, "b": [1, 2.5, None, True], "a": {"x": ""}}}
GOLDEN = "ea11af28e0a553b1"
CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


NAME_OF = "RowNames(with_position=False).of_request"
name_of = RowNames(with_position=False).of_request


def objects(*values: Any) -> Any:
    """A column of any values."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_digest_is_pinned() -> None:
    """A ledger goes on over upgrades: another digest of the same row would break its account."""
    assert name_of(ROW) == GOLDEN


def test_digest_is_the_same_in_another_process() -> None:
    """Whatever the seed of hashes."""
    code = f"from agl_async_ckpt.agl.inputs.row_names import RowNames\nprint({NAME_OF}({ROW!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == name_of(ROW)


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (objects("a", None), ["a", None]),
        ((1, "b"), [1, "b"]),
        (torch.tensor([1, 2]), [1, 2]),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        ({np.str_("a"): 1, np.int64(2): 3}, {"a": 1, 2: 3}),
        ([{"a": np.float64(1.5)}, [np.int8(2)]], [{"a": 1.5}, [2]]),
        ({1: 2}, {"1": 2}),  # as JSON posts it
        ({True: 1, None: 2, 0.5: 3, np.int64(7): 4}, {"true": 1, "null": 2, "0.5": 3, "7": 4}),
    ],
)
def test_digest_looks_at_the_value_and_not_at_its_container(value: Any, same: Any) -> None:
    """agent-lightning posts numpy values as plain ones; the order of keys says nothing."""
    assert name_of({"column": value}) == name_of({"column": same})


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        bytearray(b"bytes"),
        dt.datetime(2024, 1, 2, 3, 4, 5),
        Decimal("1.10"),
        {3, 1, 2},
        float("nan"),
        object(),
        np.datetime64("2024-01-01T00:00:00.000000001"),
        "\ud800",
        {1: "a", "1": "b"},
        {"nested": [object()]},
        CIRCULAR,
    ],
    ids=[
        "bytes",
        "bytearray",
        "datetime",
        "decimal",
        "set",
        "nan",
        "object",
        "datetime64",
        "surrogate",
        "keys",
        "nested",
        "circular",
    ],
)
def test_every_value_has_a_digest(value: Any) -> None:
    """Also what no request could carry; the training must not end over it."""
    assert name_of({"column": value}) == name_of({"column": value})
    assert len(name_of({"column": value})) == 16


def test_request_of_a_row_has_the_name_of_the_row() -> None:
    """The manager posts a row's columns as plain values, without its tensors."""
    from agentlightning.verl.agl_rollout_manager import _to_native

    batch = {
        "question": objects("a", "b"),
        "index": np.array([4, 5]),
        "scores": np.array([[0.5, 1.0], [2.0, 3.0]], dtype=np.float32),
        "extra_info": objects({"index": 4}, {"index": 5, "z": np.int64(2)}),
        "fake_ids": torch.ones(2, 1, dtype=torch.int),
    }
    posted = [{key: _to_native(column[i]) for key, column in batch.items() if key != "fake_ids"} for i in range(2)]
    rows = RowNames(with_position=True)
    names = rows.of_pulled(batch)
    assert names == [rows.of_request(request) for request in posted]
    assert [position_of(name) for name in names] == [4, 5]
    assert RowNames(with_position=False).of_pulled(batch, 1) == [names[1].partition("@")[0]]


def test_batch_of_nothing_has_no_names() -> None:
    """None, no columns, and all rows known already."""
    rows = RowNames(with_position=True)
    assert rows.of_pulled(None) == rows.of_pulled({}) == rows.of_pulled({"a": objects("x")}, 1) == []
    assert len(rows.of_pulled({"ids": torch.ones(2, 3)})) == 2


def pulled() -> dict[str, Any]:
    """Three rows with every kind of column."""
    return {
        "question": objects("a", "b", "c"),
        "index": [4, 5, 6],
        "scores": np.array([[0.5, 1.0], [2.0, 3.0], [float("nan"), 0.0]]),
        "extra_info": objects({"x": [1]}, {"x": [2]}, {"x": [3]}),
        "note": [None, 1.5, b"z"],
    }


def as_enqueued(batch: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """Columns as VERL hands them on: arrays of the objects that were pulled."""
    scores = {"scores": batch["scores"][order]}
    return {name: objects(*list(column))[order] for name, column in batch.items() if name != "scores"} | scores


def test_row_that_is_enqueued_as_it_was_pulled_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; a row changed in place is that row still."""
    batch, rows = pulled(), RowNames(with_position=True)
    names = rows.of_pulled(batch)
    batch["extra_info"][0]["x"].append(9)
    monkeypatch.setattr(row_names, "canonical", None)
    assert rows.of_enqueued(as_enqueued(batch, [2, 0, 1])) == [names[2], names[0], names[1]]


@pytest.mark.parametrize("column", ["question", "index", "scores", "extra_info", "note"])
def test_row_with_another_value_is_another_row(column: str) -> None:
    """In any column: an equal value in an object of its own is the same row, another value is not."""
    batch, rows = pulled(), RowNames(with_position=False)
    names = rows.of_pulled(batch)
    data = as_enqueued(batch, [0, 1, 2])
    data[column] = copy.deepcopy(data[column])
    assert rows.of_enqueued(data) == names
    data[column][1] = data[column][0]
    assert [one == other for one, other in zip(rows.of_enqueued(data), names, strict=True)] == [True, False, True]


def test_rows_that_are_forgotten_are_digested_again() -> None:
    """Their objects are gone, and others may lie where they lay."""
    batch, rows = pulled(), RowNames(with_position=False)
    names = rows.of_pulled(batch)
    rows.forget_all_but(names[1:2])
    batch["extra_info"][0]["x"].append(9)
    batch["extra_info"][1]["x"].append(9)
    found = rows.of_enqueued(as_enqueued(batch, [0, 1, 2]))
    assert [one == other for one, other in zip(found, names, strict=True)] == [False, True, True]


@pytest.mark.parametrize(
    ("rows", "knows"),
    [
        ([{"index": i} for i in range(9)], True),
        ([{"index": np.int64(i)} for i in range(9)], True),
        ([{"index": 0} for _ in range(9)], False),
        ([{"index": 2 * i} for i in range(9)], False),
        ([{"index": str(i)} for i in range(9)], False),
        ([{"question": "?"} for _ in range(9)], False),
        ([{"index": 0}], False),
        ([], False),
    ],
    ids=["positions", "numpy", "zeros", "filtered", "text", "none", "one row", "empty"],
)
def test_positions_are_used_only_where_the_index_column_holds_them(rows: list[dict[str, Any]], knows: bool) -> None:
    """agent-lightning's dataset fills the column with 0 where a row tells no index."""
    assert knows_positions(rows) is knows


def test_real_trainer_hands_on_the_very_objects_that_it_has_pulled(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through VERL's batches, with rows that wait in the buffer: every row of the run is digested once."""
    digested: list[str] = []
    plain = row_names.digest_of_text
    monkeypatch.setattr(row_names, "digest_of_text", lambda text: digested.append(text) or plain(text))
    run_life(settings("14/4/6", payload="rich", epochs=2), tmp_path, server.url)
    steps = [entry for entry in read_ledger(tmp_path).entries if isinstance(entry, Step)]
    assert len(steps) > 2
    assert len(digested) == sum(count for step in steps for _, count in step.drawn)


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0.0, -0.0), (True, 1.0), (0, False)])
@pytest.mark.parametrize("of_type", [objects, np.array])
def test_equal_values_of_other_types_are_told_apart_at_the_enqueue(pair: tuple[Any, Any], of_type: Any) -> None:
    """A trainer may filter what it has pulled: each row keeps the name that it was pulled with."""
    columns = [of_type(*pair)] if of_type is objects else [np.array([value]) for value in pair]
    batches = [{"q": objects(*["a"] * len(column)), "x": column} for column in columns]
    names = RowNames(with_position=False)
    pulled = [name for batch in batches for name in names.of_pulled(batch)]
    assert len(set(pulled)) == 2
    assert [name for batch in batches for name in names.of_enqueued(batch)] == pulled
