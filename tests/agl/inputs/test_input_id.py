"""The name of an input: the same in every process and with every numpy, and for the posted request as well."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from agl_async_ckpt.agl.inputs.input_id import batch_names, knows_positions, request_name, row_digest
from agl_async_ckpt.ledger.entry import position_of

ROW = {"question": "Wie viel? ☕", "index": 3, "extra_info": {"index": 3, "b": [1, 2.5, None, True], "a": {"x": ""}}}
GOLDEN = "ea11af28e0a553b1"


def objects(*values: Any) -> Any:
    """A column of any values."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_digest_is_pinned() -> None:
    """A ledger goes on over upgrades: another digest of the same row would break its account."""
    assert row_digest(ROW) == GOLDEN


def test_digest_is_the_same_in_another_process() -> None:
    """Whatever the seed of hashes."""
    code = f"from agl_async_ckpt.agl.inputs.input_id import row_digest; print(row_digest({ROW!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == row_digest(ROW)


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
        ({1: "x"}, {"1": "x"}),
        ({(1, 2): "x"}, {"(1, 2)": "x"}),
    ],
)
def test_digest_looks_at_the_value_and_not_at_its_container(value: Any, same: Any) -> None:
    """agent-lightning posts numpy values as plain ones; the order of keys says nothing."""
    assert row_digest({"column": value}) == row_digest({"column": same})


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
    ],
    ids=["bytes", "bytearray", "datetime", "decimal", "set", "nan", "object", "datetime64", "surrogate", "keys"],
)
def test_every_value_has_a_digest(value: Any) -> None:
    """Also what no request could carry; the training must not end over it."""
    assert row_digest({"column": value}) == row_digest({"column": value})
    assert len(row_digest({"column": value})) == 16


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
    names = batch_names(batch, 0, with_position=True)
    assert names == [request_name(request, with_position=True) for request in posted]
    assert [position_of(name) for name in names] == [4, 5]
    assert batch_names(batch, 1, with_position=False) == [names[1].partition("@")[0]]


def test_batch_of_nothing_has_no_names() -> None:
    """None, no columns, and all rows known already."""
    assert batch_names(None, 0, with_position=True) == batch_names({}, 0, with_position=True) == []
    assert batch_names({"a": objects("x")}, 1, with_position=True) == []
    assert len(batch_names({"ids": torch.ones(2, 3)}, 0, with_position=True)) == 2


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
