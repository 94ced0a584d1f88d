"""The names of inputs in the ledger: digests of what their agents get, alike in every process and with every numpy.

Named is the row as agent-lightning posts it: its columns without tensors, with plain numbers and lists in the place of
numpy's. So the name of a pulled row and that of a posted request agree, unless a hook has changed the request.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch

from agl_async_ckpt.agl import internals
from agl_async_ckpt.codec.content import NoDigestError, canonical, digest_of_text, quoted
from agl_async_ckpt.ledger.entry import InputName

INDEX_COLUMN = "index"
"""Where agent-lightning's and VERL's datasets put the number of a row, if the row tells it."""

_AS_IS = frozenset({str, int, float, bool, NoneType})


class RowNames:
    """Names the rows of one life. A row that is enqueued as it was pulled is digested once.

    It is recognised by its plain values, and by the very objects in its other columns, which are kept as long as it is
    remembered. An object that was changed in place since is that row still.

    Args:
        with_position: The dataset's index column holds positions.
    """

    def __init__(self, *, with_position: bool) -> None:
        self.with_position = with_position
        self._remembered: dict[tuple[Any, ...], tuple[InputName, tuple[Any, ...]]] = {}

    def of_pulled(self, batch: Mapping[str, Any] | None, start: int = 0) -> list[InputName]:
        """Name the rows of a loader batch, from row `start` on, and remember them.

        Args:
            batch: Column name -> tensor, array or list, all of one leading length.
            start: First row to name.
        """
        columns = _columns(batch or {}, start)
        names = self._names({name: values for name, (_, values) in columns.items()})
        for key, row, name in zip(*_transposed(columns), names, strict=True):
            self._remembered[key] = name, row
        return names

    def of_enqueued(self, data: Mapping[str, Any]) -> list[InputName]:
        """Name the rows that are enqueued; columns as they were pulled."""
        columns = _columns(data, 0)
        keys, rows = _transposed(columns)
        known = [self._remembered.get(key) for key in keys]
        new = [row for row, found in zip(rows, known, strict=True) if found is None]
        names = iter(self._names(dict(zip(columns, zip(*new, strict=True), strict=True)) if new else {}))
        return [next(names) if found is None else found[0] for found in known]

    def of_request(self, request_input: Any) -> InputName:
        """Name an input from the `input` of its request, as it was posted."""
        row = request_input if isinstance(request_input, Mapping) else {"": request_input}
        (name,) = self._names({str(name): [row[name]] for name in sorted(row, key=str)})
        return name

    def forget_all_but(self, names: Collection[InputName]) -> None:
        """Remember only rows of these names: the others will not be enqueued any more."""
        kept = set(names)
        self._remembered = {key: value for key, value in self._remembered.items() if value[0] in kept}

    def _names(self, columns: Mapping[str, Sequence[Any]]) -> list[InputName]:
        """Name rows that are given as columns, sorted by name."""
        digests = row_digests(columns)
        if not self.with_position or INDEX_COLUMN not in columns:
            return digests
        places = columns[INDEX_COLUMN]
        return [
            f"{digest}@{int(place)}" if _is_number(place) else digest
            for digest, place in zip(digests, places, strict=True)
        ]


def row_digests(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the digests of rows that are given as columns, sorted by name.

    That of a row is the one of a dict with its columns. What no request could carry counts by its type alone.
    """
    # Column by column: a row on its own costs twice as much.
    texts = [[f"{quoted(name)}:{_text(value)}" for value in values] for name, values in columns.items()]
    return [digest_of_text(f"{{{','.join(row)}}}") for row in zip(*texts, strict=True)]


def _text(value: Any) -> str:
    try:
        return canonical(_posted(value))
    except (NoDigestError, RecursionError):
        return quoted(type(value).__qualname__)


def _posted(value: Any) -> Any:
    """Turn numbers, arrays and tensors into what agent-lightning posts in their place."""
    kind: type[Any] = type(value)
    if kind in _AS_IS:
        return value
    if kind is list and _AS_IS.issuperset(map(type, value)):
        return value
    if kind is dict and {str}.issuperset(map(type, value)) and _AS_IS.issuperset(map(type, value.values())):
        return value
    if isinstance(value, Mapping):
        return {_posted_key(key): _posted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_posted(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        item = value.tolist()
        return value if type(item) is kind else _posted(item)  # a long double has no plain value
    return value


def _posted_key(key: Any) -> Any:
    """Turn a key into the text that JSON makes of it."""
    plain = _posted(key)
    return json.dumps(plain) if type(plain) in _AS_IS and type(plain) is not str else plain


def _columns(batch: Mapping[str, Any], start: int) -> dict[str, tuple[Sequence[Any], Sequence[Any]]]:
    """Return the columns of a request, sorted by name, from row `start` on; each as `_cells` returns it."""
    names = sorted(name for name, column in batch.items() if not torch.is_tensor(column)) or sorted(batch)
    return {name: _cells(batch[name][start:]) for name in names}


def _transposed(
    columns: Mapping[str, tuple[Sequence[Any], Sequence[Any]]],
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return what each row is recognised by, and its values."""
    keys = zip(*(marks for marks, _ in columns.values()), strict=True)
    return list(keys), list(zip(*(values for _, values in columns.values()), strict=True))


def _cells(column: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return what tells the values of a column apart without a digest, and the values; numbers as plain ones."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufU":
        values = column.tolist()
        if column.ndim > 1:
            return [(column.dtype.str, row.tobytes()) for row in column], values
    else:
        values = list(column)
    return list(map(_mark, values)), values


def _mark(value: Any) -> Any:
    """Return what tells a value apart: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    kind: type[Any] = type(value)
    if kind is str or kind is int:
        return value
    return (kind.__name__, repr(value)) if kind in _AS_IS else ("id", id(value))


def knows_positions(dataset: Any) -> bool:
    """Tell whether the index column of a dataset holds the positions of its rows, as four of them show.

    agent-lightning's dataset fills it with 0 where a row tells no index, and a filtered one keeps the old numbers. What
    a dataset of one's own has there is not asked: its code may draw from the trainer's generators.
    """
    num_rows = len(dataset)
    if num_rows < 2:
        return False
    positions = sorted({0, 1, num_rows // 2, num_rows - 1})
    found = internals.index_values(dataset, positions) or []
    return all(map(_is_number, found)) and found == positions


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
