"""Any value of a dataset row or loader state <-> plain values that `torch.load(weights_only=True)` opens.

Plain are tensors, str, int, float, bool, None, bytes, list and dict. Everything else becomes a dict with the key
`$type`, comes back with its exact type, or is refused by name: an input that returns as something else (a named tuple
as a tuple, a numpy scalar as a float) would change what is trained. docs/format.md lists the tags.
"""

from __future__ import annotations

import datetime as dt
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import PurePath
from types import NoneType
from typing import Any, cast

import numpy as np
import torch

from agl_async_ckpt.codec.arrays import (
    SMALL,
    Array,
    Lender,
    is_dense,
    order_of,
    pack_array,
    pack_bytes,
    pack_dtype,
    pack_numbers,
    pack_tensor,
)
from agl_async_ckpt.codec.decode import FACTORIES, PATHS, TAG, Plain
from agl_async_ckpt.codec.format import MAX_DEPTH
from agl_async_ckpt.exceptions import UnencodableValueError

_PACK_NUMBERS_FROM = 32
_MAX_TEXT = 2**30
_AS_IS = frozenset({float, bool, NoneType})
_NUMBERS = frozenset({int, *_AS_IS})
_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


class _Refused(Exception):  # noqa: N818 - control flow, always turned into UnencodableValueError
    """A value that cannot be encoded; collects its place on the way out."""

    def __init__(self, value: object, reason: str) -> None:
        super().__init__(reason)
        kind = type(value)
        self.kind = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        self.reason = reason
        self.place = ""

    def inside(self, part: str) -> _Refused:
        """Note the place one level further out."""
        self.place = part + self.place
        return self

    def error(self, where: str) -> UnencodableValueError:
        """Compose the error for users."""
        place = self.place if len(self.place) <= 200 else f"{self.place[:200]}..."
        return UnencodableValueError(
            f"{where}{', at ' + place if place else ''}: {self.kind} {self.reason}.",
            act="Keep plain values there: text, numbers, bytes, dates, paths, lists, dicts, numpy arrays, tensors "
            "(an image as its encoded bytes or its path).",
        )


def encode_value(value: Any, where: str) -> Plain:
    """Encode one value, copying every tensor and array.

    Args:
        value: Anything.
        where: Its place for the error text, such as "column 'image', row 3".

    Returns:
        Plain values that share no memory with `value`.

    Raises:
        UnencodableValueError: `value` holds something that would not come back exactly.
    """
    return _run(_COPYING, value, where)


def encode_batch(batch: Mapping[str, Any], *, lend: bool = False) -> dict[str, Plain]:
    """Encode a loader batch: column name -> tensor, numpy array or list, each of one leading length.

    Args:
        batch: Of any size.
        lend: What is large is not copied: the result shows the memory of `batch`, which must not change until the
            result is written.

    Raises:
        UnencodableValueError: Names column and row.
    """
    return _batch(_Encoder(copy=True, lender=Lender() if lend else None), batch)


def check_batch_encodable(batch: Mapping[str, Any]) -> None:
    """Raise what `encode_batch` would, without copying arrays and tensors.

    Raises:
        UnencodableValueError: Names column and row.
    """
    _batch(_CHECKING, batch)


def check_encodable(value: Any, where: str) -> None:
    """Raise what `encode_value` would, and encode nothing.

    Raises:
        UnencodableValueError: `value` holds something that would not come back exactly.
    """
    _run(_CHECKING, value, where)


def _run(encoder: _Encoder, value: Any, where: str) -> Plain:
    try:
        return encoder.encode(value, 0)
    except _Refused as refused:
        raise refused.error(where) from None
    except RecursionError:
        raise _Refused(value, "is nested too deeply").error(where) from None


def _batch(encoder: _Encoder, batch: Mapping[str, Any]) -> dict[str, Plain]:
    encoded: dict[str, Plain] = {}
    for name, column in batch.items():
        if type(name) is not str:
            raise _Refused(name, "is no column name").error(f"column {name!r}")
        where = f"column {name!r}"
        rows: Iterable[Any] = ()
        if type(column) is list or (type(column) is np.ndarray and column.dtype == object and column.ndim > 0):  # pyright: ignore[reportUnknownMemberType]
            rows = cast("Iterable[Any]", column)
        try:
            encoded[name] = encoder.encode(column, 0)
        except (_Refused, RecursionError):
            # Only now, when it failed, look for the row: the good case pays nothing for the message.
            for index, row in enumerate(rows):
                _run(encoder, row, f"{where}, row {index}")
            encoded[name] = _run(encoder, column, where)
    return encoded


class _Encoder:
    """One pass over a value. With `copy=False` it only checks: leaves are judged and not copied.

    A `lender` takes the place of large copies.
    """

    def __init__(self, *, copy: bool, lender: Lender | None = None) -> None:
        self._copy = copy
        self._lender = lender
        self._by_type: dict[type, Callable[[Any, int], Plain]] = {
            str: self._text,
            int: self._int,
            list: self._list,
            dict: self._dict,
            bytes: lambda value, _: value if 0 < len(value) <= SMALL else self._blob("bytes", value),
            bytearray: lambda value, _: self._blob("bytearray", value),
            tuple: lambda value, depth: {TAG: "tuple", "items": self._list(value, depth)},
            set: lambda value, depth: {TAG: "set", "items": self._list(list(value), depth)},
            frozenset: lambda value, depth: {TAG: "frozenset", "items": self._list(list(value), depth)},
            OrderedDict: lambda value, depth: {TAG: "OrderedDict", "items": self._pairs(value, depth)},
            Counter: lambda value, depth: {TAG: "Counter", "items": self._pairs(value, depth)},
            defaultdict: self._defaultdict,
            deque: lambda value, depth: {TAG: "deque", "items": self._list(list(value), depth), "maxlen": value.maxlen},
            range: lambda value, _: {TAG: "range", "parts": [value.start, value.stop, value.step]},
            complex: lambda value, _: {TAG: "complex", "parts": [value.real, value.imag]},
            Decimal: lambda value, _: {TAG: "Decimal", "text": str(value)},
            dt.datetime: lambda value, _: {TAG: "datetime", "parts": [*_date(value), *_time(value)], **_zone(value)},
            dt.date: lambda value, _: {TAG: "date", "parts": _date(value)},
            dt.time: lambda value, _: {TAG: "time", "parts": _time(value), **_zone(value)},
            dt.timedelta: lambda value, _: {TAG: "timedelta", "parts": _delta(value)},
            uuid.UUID: lambda value, _: {TAG: "UUID", "hex": value.hex, "is_safe": value.is_safe.value},
            **dict.fromkeys(PATHS.values(), _path),
            np.ndarray: self._array,
            np.str_: lambda value, depth: {TAG: "numpy.str_", "text": self._text(str.__str__(value), depth)},
            np.bytes_: lambda value, _: self._blob("numpy.bytes_", bytes(value)),
            torch.Tensor: self._tensor,
        }

    def encode(self, value: Any, depth: int) -> Plain:
        kind = cast("type[Any]", type(value))
        if kind in _AS_IS:
            return value
        if depth > MAX_DEPTH:
            raise _Refused(value, f"is nested more than {MAX_DEPTH} deep, or contains itself")
        encoder = self._by_type.get(kind)
        if encoder is not None:
            return encoder(value, depth)
        if isinstance(value, np.generic):
            return self._scalar(value)
        pandas = sys.modules.get("pandas")  # whoever hands out its values has imported it
        if pandas is not None and kind in (pandas.Timestamp, pandas.Timedelta, type(pandas.NaT)):
            return _pandas_time(value, pandas)
        raise _Refused(value, "cannot be saved exactly")

    def _blob(self, tag: str, value: bytes | bytearray) -> Plain:
        return {TAG: tag, "data": pack_bytes(value, self._lender) if self._copy else None}

    def _text(self, value: str, _: int) -> Plain:
        if len(value) > _MAX_TEXT:
            raise _Refused(value, f"is longer than {_MAX_TEXT} characters")
        return value

    def _int(self, value: int, _: int) -> Plain:
        # Beyond 64 bit the loader knows one opcode, up to 255 bytes; hexadecimal text has no limit.
        return value if -(2**63) <= value < 2**63 else {TAG: "int", "hex": hex(value)}

    def _list(self, items: list[Any] | tuple[Any, ...], depth: int) -> Plain:
        if not self._copy and _NUMBERS.issuperset(map(type, items)):
            return None
        if len(items) >= _PACK_NUMBERS_FROM:
            packed = pack_numbers(items)
            if packed is not None:
                return {TAG: "numbers", **packed}
        encoded: list[Plain] = []
        for index, item in enumerate(items):
            try:
                encoded.append(self.encode(item, depth + 1))
            except _Refused as refused:
                raise refused.inside(f"[{index}]") from None
        return encoded

    def _dict(self, value: dict[Any, Any], depth: int) -> Plain:
        if TAG in value or any(type(key) is not str for key in value):
            return {TAG: "dict", "items": self._pairs(value, depth)}
        encoded: dict[str, Plain] = {}
        for key, item in value.items():
            try:
                encoded[self._text(key, depth)] = self.encode(item, depth + 1)
            except _Refused as refused:
                raise refused.inside(f"[{key!r}]") from None
        return encoded

    def _pairs(self, value: Mapping[Any, Any], depth: int) -> list[Plain]:
        encoded: list[Plain] = []
        for key, item in value.items():
            try:
                encoded.append([self.encode(key, depth + 1), self.encode(item, depth + 1)])
            except _Refused as refused:
                raise refused.inside(f"[{key!r}]") from None
        return encoded

    def _defaultdict(self, value: defaultdict[Any, Any], depth: int) -> Plain:
        factory: Any = value.default_factory
        if factory is not None and (not isinstance(factory, type) or factory not in _FACTORY_NAMES):
            raise _Refused(value, f"with the factory {factory!r} cannot be saved exactly")
        name = None if factory is None else _FACTORY_NAMES[factory]
        return {TAG: "defaultdict", "factory": name, "items": self._pairs(value, depth)}

    def _array(self, array: Array, depth: int) -> Plain:
        if array.dtype == object:
            order = order_of(array)
            items = self._list(array.ravel(order).tolist(), depth)
            return {TAG: "object_array", "shape": list(array.shape), "order": order, "items": items}
        dtype = pack_dtype(array.dtype)
        if dtype is None:
            raise _Refused(array, f"of type {array.dtype} cannot be saved exactly")
        return {TAG: "array", **pack_array(array, dtype, self._lender)} if self._copy else None

    def _scalar(self, value: Any) -> Plain:
        array = np.asarray(value)
        dtype = pack_dtype(array.dtype)
        if dtype is None or array.dtype.type is not type(value):
            raise _Refused(value, "cannot be saved exactly")
        return {TAG: "scalar", "dtype": dtype, "data": pack_bytes(array.tobytes())}

    def _tensor(self, tensor: torch.Tensor, _: int) -> Plain:
        if not is_dense(tensor):
            raise _Refused(tensor, f"({tensor.layout}, {tensor.dtype}, {tensor.device}) is not a plain dense tensor")
        if not self._copy:
            return None
        packed = pack_tensor(tensor, self._lender)
        return packed if isinstance(packed, torch.Tensor) else {TAG: "tensor", **packed}


def _pandas_time(value: Any, pandas: Any) -> Plain:
    """Encode a time of pandas, whose nanoseconds `datetime` does not have."""
    if value is pandas.NaT:
        return {TAG: "pandas.NaT"}
    parts = {"value": int(value.asm8.astype("i8")), "unit": value.unit}
    if type(value) is pandas.Timedelta:
        return {TAG: "pandas.Timedelta", **parts}
    return {TAG: "pandas.Timestamp", **parts, "fold": value.fold, **_zone(value)}


def _path(value: PurePath, _: int) -> Plain:
    return {TAG: "path", "kind": type(value).__name__, "text": str(value)}


def _date(value: dt.date) -> list[int]:
    return [value.year, value.month, value.day]


def _time(value: dt.datetime | dt.time) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


def _delta(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _zone(value: dt.datetime | dt.time) -> dict[str, Plain]:
    zone = value.tzinfo
    if zone is None:
        return {"zone": None}
    if type(zone) is dt.timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        return {"zone": {"offset": _delta(offset), "name": None if dt.timezone(offset).tzname(None) == name else name}}
    if type(zone) is zoneinfo.ZoneInfo and getattr(zone, "key", None):
        return {"zone": zone.key}
    raise _Refused(zone, "is no time zone that can be saved exactly")


_COPYING = _Encoder(copy=True)
_CHECKING = _Encoder(copy=False)
