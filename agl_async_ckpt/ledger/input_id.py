"""The name of an input: a digest of what its agents get, the same in every process and with every numpy.

Digested is the row as agent-lightning turns it into a request: its columns without tensors, as JSON. So the name that
a pulled row gets and the one computed from a posted request agree, unless a hook has changed the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
        return {"$bytes": hashlib.sha256(bytes(tobytes())).hexdigest()}
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


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of one row: column name -> value."""
    try:
        text = _encode(row)
    except TypeError:
        text = _encode(_with_text_keys(row))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:NUM_DIGITS]


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
    columns = {name: column[start:] for name, column in batch.items() if not _is_tensor(column)}
    num_rows = len(next(iter(batch.values()))) - start
    if num_rows <= 0:
        return []
    if not columns:
        columns = {name: column[start:] for name, column in batch.items()}
    names = list(columns)
    digests = [row_digest(dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    positions: Sequence[Any] = columns[INDEX_COLUMN] if with_position and INDEX_COLUMN in columns else ()
    if not len(positions):
        return digests
    return [_named(digest, position) for digest, position in zip(digests, positions, strict=True)]


def knows_positions(dataset: Any) -> bool:
    """Whether the index column of a dataset holds the positions of its rows, as four of them show.

    agent-lightning's dataset fills it with 0 where a row tells no index, and a filtered one keeps the old numbers.
    """
    num_rows = len(dataset)
    probes = sorted({0, 1, num_rows // 2, num_rows - 1} & set(range(num_rows)))
    for position in probes:
        row = dataset[position]
        index = row.get(INDEX_COLUMN) if isinstance(row, Mapping) else None
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or int(index) != position:
            return False
    return num_rows > 1


def _named(digest: str, position: Any) -> InputName:
    if isinstance(position, int | np.integer) and not isinstance(position, bool):
        return f"{digest}@{int(position)}"
    return digest


def _is_tensor(column: Any) -> bool:
    import torch

    return torch.is_tensor(column)
