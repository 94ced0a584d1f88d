"""Plain values -> the values that `codec` encoded. docs/format.md lists the tags."""

from __future__ import annotations

import datetime as dt
import pathlib
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, cast

import numpy as np
import torch

from agl_async_ckpt.codec.arrays import (
    LARGE,
    Array,
    check_tensor,
    unpack_array,
    unpack_bytes,
    unpack_dtype,
    unpack_numbers,
    unpack_shape,
    unpack_tensor,
)

Plain = Any
"""A tensor, str, int, float, bool, None, bytes, list or dict of these; a dict with the key `TAG` is an encoding."""

TAG = "$type"

FACTORIES: dict[str, type] = {
    factory.__name__: factory
    for factory in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, Counter, OrderedDict, deque)
}
"""What a `defaultdict` may be made with: a file names no code."""

PATHS: dict[str, type[pathlib.PurePath]] = {
    path.__name__: path for path in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
"""The kinds of paths that this system knows."""


def decode_value(plain: Plain, shared: Mapping[str, Plain] | None = None) -> Any:
    """Rebuild what `encode_value` encoded, in memory of its own.

    Args:
        plain: Encoded value.
        shared: digest -> encoded value, for the values that are stored once.

    Raises:
        ValueError, TypeError, KeyError: `plain` is not an encoding.
    """
    kind = cast("type[Any]", type(plain))
    if kind is dict:
        if TAG in plain:
            return _DECODERS[plain[TAG]](plain, shared)
        return {key: decode_value(item, shared) for key, item in plain.items()}
    if kind is list:
        return [decode_value(item, shared) for item in plain]
    return _own_if_small(check_tensor(plain)) if kind is torch.Tensor else plain


def require_tree(plain: Plain) -> None:
    """Refuse plain values in which a list, dict or tensor memory is met twice, as the encoder never writes them.

    Decoding copies, so a few hundred bytes of lists that hold each other would take any amount of memory.

    Raises:
        ValueError: Something is met twice.
    """
    met: set[int] = set()
    waiting: list[Any] = [plain]
    while waiting:
        value = waiting.pop()
        kind = cast("type[Any]", type(value))
        if kind is dict or kind is list:
            mark = id(value)
            waiting.extend(value.values() if kind is dict else value)
        elif kind is torch.Tensor and value.untyped_storage().nbytes():
            mark = value.untyped_storage().data_ptr()
        else:
            continue
        if mark in met:
            raise ValueError(f"the same {kind.__name__} stands in two places")
        met.add(mark)


def _own_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a small tensor out of the mapped file: the state of a generator must not keep all of that in memory."""
    return tensor.clone() if tensor.numel() * tensor.itemsize < LARGE else tensor


def _unzone(plain: Any) -> dt.tzinfo | None:
    if plain is None or isinstance(plain, str):
        return None if plain is None else zoneinfo.ZoneInfo(plain)
    offset, name = dt.timedelta(*plain["offset"]), plain["name"]
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _object_array(plain: dict[str, Plain], shared: Mapping[str, Plain] | None) -> Array:
    items, shape = decode_value(plain["items"], shared), unpack_shape(plain["shape"])
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):  # one by one: numpy must not look into an item
        array[index] = item
    return array.reshape(shape, order=plain["order"])


def _scalar(plain: dict[str, Plain]) -> Any:
    return np.frombuffer(unpack_bytes(plain["data"]), dtype=unpack_dtype(plain["dtype"])).copy()[0]


def _defaultdict(plain: dict[str, Plain], shared: Mapping[str, Plain] | None) -> defaultdict[Any, Any]:
    name = plain["factory"]
    return defaultdict(None if name is None else FACTORIES[name], decode_value(plain["items"], shared))


def _pandas_time(plain: dict[str, Plain]) -> Any:
    try:
        import pandas  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ValueError(f"a {plain[TAG]} needs pandas") from error
    if plain[TAG] == "pandas.NaT":
        return pandas.NaT
    value, unit = int(plain["value"]), str(plain["unit"])
    if unit not in ("s", "ms", "us", "ns"):
        raise ValueError(f"not a unit of a time: {unit!r}")
    if plain[TAG] == "pandas.Timedelta":
        return pandas.Timedelta(np.timedelta64(value, unit))
    time, zone = pandas.Timestamp(np.datetime64(value, unit)), _unzone(plain["zone"])
    return time.replace(fold=plain["fold"]) if zone is None else time.tz_localize("UTC").tz_convert(zone)


def _from_shared(plain: dict[str, Plain], shared: Mapping[str, Plain] | None) -> Any:
    # Decoded afresh for each reference: siblings must not share a dict that a hook may change in place.
    return decode_value((shared or {})[plain["digest"]], _REFERENCED)


_REFERENCED: Mapping[str, Plain] = {}
"""In place of the shared values while one of them is decoded: others refer to the same memory."""


_DECODERS: dict[str, Callable[[dict[str, Plain], Mapping[str, Plain] | None], Any]] = {
    "int": lambda plain, _: int(plain["hex"], 16),
    "bytes": lambda plain, _: unpack_bytes(plain["data"]),
    "bytearray": lambda plain, _: bytearray(unpack_bytes(plain["data"])),
    "tuple": lambda plain, shared: tuple(decode_value(plain["items"], shared)),
    "set": lambda plain, shared: set(decode_value(plain["items"], shared)),
    "frozenset": lambda plain, shared: frozenset(decode_value(plain["items"], shared)),
    "dict": lambda plain, shared: dict(decode_value(plain["items"], shared)),
    "OrderedDict": lambda plain, shared: OrderedDict(decode_value(plain["items"], shared)),
    "Counter": lambda plain, shared: Counter(dict(decode_value(plain["items"], shared))),
    "defaultdict": _defaultdict,
    "deque": lambda plain, shared: deque(decode_value(plain["items"], shared), plain["maxlen"]),
    "range": lambda plain, _: range(*plain["parts"]),
    "complex": lambda plain, _: complex(*plain["parts"]),
    "Decimal": lambda plain, _: Decimal(plain["text"]),
    "datetime": lambda plain, _: dt.datetime(
        *plain["parts"][:7], tzinfo=_unzone(plain["zone"]), fold=plain["parts"][7]
    ),
    "date": lambda plain, _: dt.date(*plain["parts"]),
    "time": lambda plain, _: dt.time(*plain["parts"][:4], tzinfo=_unzone(plain["zone"]), fold=plain["parts"][4]),
    "timedelta": lambda plain, _: dt.timedelta(*plain["parts"]),
    "UUID": lambda plain, _: uuid.UUID(plain["hex"], is_safe=uuid.SafeUUID(plain["is_safe"])),
    "path": lambda plain, _: PATHS[plain["kind"]](plain["text"]),
    "pandas.Timestamp": lambda plain, _: _pandas_time(plain),
    "pandas.Timedelta": lambda plain, _: _pandas_time(plain),
    "pandas.NaT": lambda plain, _: _pandas_time(plain),
    "numbers": lambda plain, _: unpack_numbers(plain),
    "array": lambda plain, shared: unpack_array(plain, copy=shared is _REFERENCED),
    "object_array": _object_array,
    "scalar": lambda plain, _: _scalar(plain),
    "numpy.str_": lambda plain, _: np.str_(plain["text"]),
    "numpy.bytes_": lambda plain, _: np.bytes_(unpack_bytes(plain["data"])),
    "tensor": lambda plain, _: unpack_tensor(plain),
    "shared": _from_shared,
}
