"""The name of an input: a digest of what its agents get, the same in every process and with every numpy.

Digested is the row as agent-lightning turns it into a request: its columns without tensors, as JSON. So the name that
a pulled row gets and the one computed from a posted request agree, unless a hook has changed the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from agl_async_ckpt.agl import internals
from agl_async_ckpt.ledger.entry import InputName

NUM_DIGITS = 16
"""64 bit: two of a million different inputs share a name with probability 3e-8."""

INDEX_COLUMN = "index"
"""Where agent-lightning's and VERL's datasets put the number of a row, if the row tells it."""


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into what it does; called by the encoder."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        item = value.item()
        return str(value) if isinstance(item, np.generic) else item
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    tolist = getattr(value, "tolist", None)  # a tensor inside a row
    if callable(tolist):
        return tolist()
    tobytes: Any = getattr(value, "tobytes", None)  # a decoded image
    if callable(tobytes):
        content: Any = tobytes()
        return {"$bytes": hashlib.sha256(content).hexdigest()}
    if type(value).__repr__ is object.__repr__:  # would name an address
        return type(value).__qualname__
    return str(value)  # dates, decimals and the like


def _with_text_keys(value: Any) -> Any:
    """Replace mapping keys that JSON cannot take, or cannot sort, by their text."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, np.ndarray):
        return _with_text_keys(value.tolist())
    return value


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain, check_circular=False).encode
_quote = json.encoder.encode_basestring_ascii


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of one row: column name -> value."""
    items = sorted((str(name), value) for name, value in row.items())
    return _digest(f"{_quote(name)}:{_text(value)}" for name, value in items)


def _text(value: Any) -> str:
    """JSON text; the frequent kinds without an encoder of their own."""
    kind: type[Any] = type(value)
    if kind is str:
        return _quote(value)
    if kind is int:
        return repr(value)
    try:
        return _encode(value)
    except TypeError:
        return _encode(_with_text_keys(value))


def _digest(columns: Iterable[str]) -> str:
    return hashlib.sha256(f"{{{','.join(columns)}}}".encode()).hexdigest()[:NUM_DIGITS]


def request_name(request_input: Any, *, with_position: bool) -> InputName:
    """Return the name of an input from the `input` of its request.

    Args:
        request_input: As it was posted.
        with_position: The dataset's index column holds positions.
    """
    row = request_input if isinstance(request_input, Mapping) else {"": request_input}
    return _named(row_digest(row), row.get(INDEX_COLUMN) if with_position else None)


def batch_names(batch: Mapping[str, Any] | None, start: int, *, with_position: bool) -> list[InputName]:
    """Return the names of the rows of a loader batch, from row `start` on.

    Args:
        batch: Column name -> tensor, array or list, all of one leading length.
        start: First row to name.
        with_position: The dataset's index column holds positions.
    """
    if not batch:
        return []
    columns = {name: _values(column[start:]) for name, column in batch.items() if not _is_tensor(column)}
    if not columns:
        columns = {name: _values(column[start:]) for name, column in batch.items()}
    # Column by column: a row on its own costs twice as much.
    texts = [[f"{_quote(name)}:{_text(value)}" for value in columns[name]] for name in sorted(columns)]
    digests = [_digest(row) for row in zip(*texts, strict=True)]
    if not with_position or INDEX_COLUMN not in columns:
        return digests
    return [_named(digest, position) for digest, position in zip(digests, columns[INDEX_COLUMN], strict=True)]


def _values(column: Any) -> Any:
    """The rows of a column; numbers as plain ones, all at once."""
    is_plain = isinstance(column, np.ndarray) and column.dtype.kind in "biufU"
    return column.tolist() if is_plain else column


def knows_positions(dataset: Any) -> bool:
    """Whether the index column of a dataset holds the positions of its rows, as four of them show.

    agent-lightning's dataset fills it with 0 where a row tells no index, and a filtered one keeps the old numbers. What
    a dataset of one's own has there is not asked: its code may draw from the trainer's generators.
    """
    num_rows = len(dataset)
    if num_rows < 2:
        return False
    positions = sorted({0, 1, num_rows // 2, num_rows - 1})
    found = internals.index_values(dataset, positions) or []
    is_number = [isinstance(index, int | np.integer) and not isinstance(index, bool) for index in found]
    return all(is_number) and found == positions


def _named(digest: str, position: Any) -> InputName:
    if isinstance(position, int | np.integer) and not isinstance(position, bool):
        return f"{digest}@{int(position)}"
    return digest


def _is_tensor(column: Any) -> bool:
    import torch

    return torch.is_tensor(column)
