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
    if is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"<{dtype} {list(value.shape)}>"
    if isinstance(value, _tensors()):
        item = value.item()
        return str(item) if type(item) is type(value) else plain(item, depth + 1)  # a long double has no plain value
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
    return isinstance(value, _tensors()) and value.ndim > 0


def _tensors() -> tuple[type[Any], ...]:
    """Import what a file's values may be; the command starts without."""
    import numpy as np
    import torch

    return np.ndarray, np.generic, torch.Tensor
