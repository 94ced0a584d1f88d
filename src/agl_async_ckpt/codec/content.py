"""A digest of values that says whether two inputs are the same, in any process, on any host.

Equal values have equal digests whatever the order of keys, the hash seed, or the major version of numpy. A value whose
content cannot be told from its type has no digest: guessing (`repr`, pickle) would call the same input another one.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any, cast

import numpy as np
import torch

from agl_async_ckpt.codec.arrays import bytes_of, is_dense

_AS_IS = frozenset({str, int, float, bool, NoneType})
_TEXT = frozenset({str})

NUM_DIGITS = 16
"""64 bit: two of a million different inputs have one digest with probability 3e-8."""

MAX_ROWS = 2048
"""Up to this many rows of a data set all are compared, of more a sample."""

STORED_FILE = {"bytes", "path"}
"""The keys of an image, sound or video as the `datasets` library stores it."""


class NoDigestError(Exception):
    """A value whose content cannot be told; the text names its type."""


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the content of `value`.

    Raises:
        NoDigestError: `value` holds an object of unknown content.
    """
    return digest_of_text(canonical(value))


def digest_of_text(text: str) -> str:
    """Return the digest of what `canonical` has written."""
    return hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]


def canonical(value: Any) -> str:
    """Write `value` as JSON in which equal contents are equal texts; arrays, images and bytes as their digests.

    Raises:
        NoDigestError: `value` holds an object of unknown content.
    """
    kind: type[Any] = type(value)
    if kind is str:
        return quoted(value)
    if kind is int:
        return repr(value)
    try:
        return _text(_plain(value))
    except RecursionError:
        raise NoDigestError("a value is nested too deeply") from None


quoted = json.encoder.encode_basestring_ascii
"""A text as JSON; the frequent kinds need no encoder."""


def digests(column: Iterable[Any]) -> list[str]:
    """Return the digest of every value of a column of a loader batch.

    Raises:
        NoDigestError: A value of unknown content.
    """
    return [digest(value) for value in column]


def sample(num_rows: int) -> list[int]:
    """Return which rows of a data set are compared, in this order: first, last, then others without any regularity.

    Rows at even distances would all be of one list where two alternate. The draw depends on the number of rows alone:
    it is the same in every process and with every version of Python.
    """

    def place(number: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{num_rows}:{number}".encode()).digest()[:8])

    if num_rows <= MAX_ROWS:
        return sorted(range(num_rows), key=lambda row: -1 if row in (0, num_rows - 1) else place(row))
    chosen = {0: None, num_rows - 1: None}
    number = 0
    while len(chosen) < MAX_ROWS:
        chosen[place(number) % num_rows] = None
        number += 1
    return list(chosen)


def share(num_compared: int, num_rows: int) -> str:
    """Say how many rows of a data set a digest is of."""
    return f"all {num_rows}" if num_compared == num_rows else f"{num_compared} of {num_rows}"


_text = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False).encode


def _hashed(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _plain(value: Any) -> Any:
    """Return `value` in terms of JSON, dicts with text keys only; what holds such values alone as it is, for speed."""
    kind = cast("type[Any]", type(value))
    if kind in _AS_IS:
        return value
    if kind is list or kind is tuple:
        return list(value) if _AS_IS.issuperset(map(type, value)) else [_plain(item) for item in value]
    if kind is dict:
        return _mapping(value)
    for base, convert in _CONVERTERS.items():
        if isinstance(value, base):
            return convert(value)
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        return {"$image": [value.mode, list(value.size), _hashed(value.tobytes())]}
    if is_dataclass(value) and not isinstance(value, type):
        return {"$fields": {field.name: _plain(getattr(value, field.name)) for field in fields(value)}}
    raise NoDigestError(f"the content of a {kind.__module__}.{kind.__qualname__} cannot be told")


def _mapping(value: Mapping[Any, Any]) -> Any:
    if value.keys() == STORED_FILE:
        return stored_file(value)
    if _TEXT.issuperset(map(type, value)):
        if type(value) is dict and _AS_IS.issuperset(map(type, value.values())):
            return value
        return {key: _plain(item) for key, item in value.items()}
    return {"$dict": sorted(([_text(_plain(key)), _plain(item)] for key, item in value.items()), key=lambda kv: kv[0])}


def stored_file(value: Mapping[Any, Any]) -> Any:
    """Leave out where a file lies: another host keeps the same data set elsewhere."""
    data, path = value["bytes"], value["path"]
    if data is None and isinstance(path, str):
        return {"$file": path.replace("\\", "/").rpartition("/")[2]}
    return {"$file": _plain(data)}


def _array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject:
        return {"$array": [list(array.shape), _plain(array.ravel().tolist())]}
    return {"$array": [_text(array.dtype.descr), list(array.shape), _hashed(array.tobytes())]}


def _tensor(tensor: torch.Tensor) -> Any:
    if not is_dense(tensor):
        raise NoDigestError(f"a tensor ({tensor.layout}, {tensor.dtype}, {tensor.device}) is not a plain dense one")
    data = bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return {"$tensor": [str(tensor.dtype), list(tensor.shape), _hashed(data)]}


def _delta(value: dt.timedelta) -> list[int]:
    parts = [value.days, value.seconds, value.microseconds]
    pandas: Any = sys.modules.get("pandas")
    return (
        [*parts, cast("Any", value).nanoseconds]
        if pandas is not None and isinstance(value, pandas.Timedelta)
        else parts
    )


def _sorted(items: Iterable[Any]) -> list[str]:
    return sorted(_text(_plain(item)) for item in items)


# In this order: an enum may be a str or an int, numpy's text a str and nothing more, its other scalars int or float.
_CONVERTERS: dict[type | tuple[type, ...], Callable[[Any], Any]] = {
    Enum: lambda value: {"$enum": [type(value).__qualname__, value.name]},
    str: str.__str__,
    Mapping: _mapping,
    (bytes, bytearray, memoryview): lambda value: {"$bytes": _hashed(value)},
    torch.Tensor: _tensor,
    np.ndarray: _array,
    np.generic: lambda value: {"$scalar": _array(np.asarray(value))},
    int: int.__int__,
    float: float.__float__,
    (list, tuple, range, deque): lambda value: [_plain(item) for item in value],
    (set, frozenset): lambda value: {"$set": _sorted(value)},
    (dt.date, dt.time): lambda value: {"$time": value.isoformat()},
    dt.timedelta: lambda value: {"$delta": _delta(value)},
    (Decimal, complex, uuid.UUID): lambda value: {"$text": str(value)},
    PurePath: lambda value: {"$text": value.as_posix()},
}
