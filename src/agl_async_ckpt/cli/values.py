"""Values of a dataset row as a person, or a program, can read them. Never their bytes: data may hold anything."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 8


def plain(value: Any, depth: int = 0) -> Any:
    """Turn a value into what JSON holds: tensors and arrays by dtype and shape, bytes by length, texts whole."""
    if value is None or isinstance(value, bool | int | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # of torch or numpy
        return _array(value, depth)
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    return str(value)


def short(value: Any) -> str:
    """Write a value on one line; who prints it cuts it."""
    found = plain(value)
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def is_array(value: Any) -> bool:
    """Tell whether a value is a tensor or an array with elements of its own, and no single number or text."""
    return hasattr(value, "dtype") and getattr(value, "ndim", 0) > 0


def _array(value: Any, depth: int) -> Any:
    if not is_array(value) and hasattr(value, "item"):
        item = value.item()
        return str(item) if hasattr(item, "dtype") else plain(item, depth + 1)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"<{dtype} {list(value.shape)}>"
