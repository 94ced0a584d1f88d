"""The content of a value has one digest: in every process, whatever the order of keys, the hash seed and the types."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from collections import Counter, OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from agl_async_ckpt.codec.content import NoDigestError, digest, digests
from tests.golden.sample import sample_batch

ROOT = Path(__file__).parents[2]

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = 1


class Word(str, Enum):
    YES = "y"


@dataclass
class Sample:
    a: int
    b: list[int]


def image(colour: int = 0, fmt: str = "RGB") -> Any:
    """A decoded image of two by two pixels."""
    return pytest.importorskip("PIL.Image").new(fmt, (2, 2), colour)


KINDS: dict[str, list[Any]] = {
    "none": [None, 0, False, "", "None", [], {}],
    "bool": [True, False, 1, 0, "true"],
    "int": [1, 2, 2**80, -(2**80), "1"],
    "float": [1.0, 1.5, float("inf"), 1, "1.0"],
    "nan": [float("nan"), 0.0, None],
    "text": ["a", "b", "ä", "\ud800", "a\0", "\u2028"],
    "bytes": [b"", b"a", "a", bytearray(b"b")],
    "list": [[1, 2], [2, 1], [[1], 2], [1, [2]], "[1,2]"],
    "ragged": [[[1], []], [[], [1]], [[1]]],
    "dict": [{"a": 1}, {"a": 2}, {"b": 1}, {1: "a"}, {"1": "a"}, {"a": {"b": None}}, {"a": {}}],
    "set": [{1, 2}, {1, 3}, [1, 2]],
    "dates": [
        dt.date(2020, 1, 1),
        dt.datetime(2020, 1, 1),
        dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc),
        dt.time(1),
    ],
    "span": [dt.timedelta(1), dt.timedelta(0, 1), dt.timedelta(0, 0, 1)],
    "pandas": [
        pd.Timestamp("2020-01-01"),
        pd.Timestamp("2020-01-01 00:00:00.000000001"),
        pd.Timestamp("2020-01-01", tz="UTC"),
        pd.NaT,
        pd.Timedelta(1, "ns"),
        pd.Timedelta(2, "ns"),
    ],
    "deque": [deque([1, 2]), deque([2, 1]), Counter("ab"), Counter("aab")],
    "numbers": [Decimal("1.0"), Decimal("1.00"), 1j, 2j],
    "array": [np.arange(4), np.arange(4, dtype=np.int32), np.arange(4).reshape(2, 2), [0, 1, 2, 3]],
    "array of objects": [np.array([{"a": 1}, None], dtype=object), np.array([{"a": 2}, None], dtype=object)],
    "array of records": [np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")]), np.zeros(2, [("a", "i8")])],
    "array of dates": [np.array(["2020-01-01"], "M8[s]"), np.array(["2020-01-02"], "M8[s]")],
    "scalar": [np.int64(1), np.int32(1), np.float32(1), np.float64(1), np.datetime64("2020-01-01"), np.bool_(True)],
    "tensor": [
        torch.arange(4),
        torch.arange(4).float(),
        torch.arange(4).reshape(2, 2),
        torch.zeros(()),
        torch.zeros(0),
    ],
    "small tensor": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16)],
    "image": [image(), image(1), image(0, "L")],
    "enum": [Colour.RED, Word.YES, 1],
    "dataclass": [Sample(1, [2]), Sample(1, [3])],
    "file": [{"bytes": b"x", "path": "a"}, {"bytes": b"y", "path": "a"}, {"bytes": None, "path": "a.png"}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_content_has_another_digest(kind: str) -> None:
    """Within each kind, and beside what it could be taken for."""
    digests = [digest(value) for value in KINDS[kind]]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
        ({1: "a", "b": 2}, {"b": 2, 1: "a"}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, UserDict(a=1)),
        ([1, 2], (1, 2)),
        ([1, 2], range(1, 3)),
        ([1, 2], Point(1, 2)),
        ("a", np.str_("a")),
        (b"a", bytearray(b"a")),
        ({3, 1, 2}, frozenset([2, 3, 1])),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        (torch.arange(6).reshape(2, 3).t().contiguous(), torch.arange(6).reshape(2, 3).t()),
        (torch.arange(2), torch.arange(4)[:2]),
        ({"bytes": b"x", "path": "/one/a.png"}, {"bytes": b"x", "path": "/other/b.png"}),
        ({"bytes": None, "path": "/one/a.png"}, {"bytes": None, "path": "/other/a.png"}),
        ({"bytes": None, "path": "c:\\one\\a.png"}, {"bytes": None, "path": "/other/a.png"}),
    ],
    ids=str,
)
def test_same_content_has_the_same_digest(one: Any, other: Any) -> None:
    """Order of keys, kind of sequence, layout in memory, and where a file lies say nothing about the input."""
    assert digest(one) == digest(other)


def test_value_of_unknown_content_has_no_digest() -> None:
    """Its `repr` would hold an address."""
    with pytest.raises(NoDigestError, match=r"the content of a builtins\.object cannot be told"):
        digest({"a": [object()]})


def test_value_that_contains_itself_has_no_digest() -> None:
    """No crash, no endless loop."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NoDigestError, match="nested too deeply"):
        digest(value)


def test_values_of_a_column_have_digests() -> None:
    """Tensors, arrays and lists alike, row by row."""
    batch = {"a": torch.arange(2), "b": np.array([{"x": 1}, None], dtype=object), "c": ["p", "q"]}
    assert {name: digests(column)[1] for name, column in batch.items()} == {
        "a": digest(torch.tensor(1)),
        "b": digest(None),
        "c": digest("q"),
    }


SHOW = """
from agl_async_ckpt.codec.content import digest, digests
from tests.golden.sample import sample_batch
columns = {name: digests(column) for name, column in sample_batch().items()}
print(digest([dict(zip(columns, row)) for row in zip(*columns.values())]), digest({"one", "two", "three", ("four", 5)}))
"""

SAMPLE_DIGEST = "30dae72566efbcd2"
"""Of a batch with every kind of column, found alike under numpy 1.26 and 2.3. A change of it refuses every resume."""


def test_digests_are_those_of_earlier_versions() -> None:
    """A checkpoint holds the digest that another version of this package, of numpy and of Python has found."""
    columns = {name: digests(column) for name, column in sample_batch().items()}
    assert (
        digest([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]) == SAMPLE_DIGEST
    )


def test_digests_are_those_of_another_process() -> None:
    """Whatever its hash seed, which orders sets anew."""
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [SAMPLE_DIGEST, digest({"one", "two", "three", ("four", 5)})]
