"""A reader of `agentlightning_input.pt` written from docs/format.md alone: no module of the package, no `torch.load`.

It takes the tables of that page for what they say, so that a page that says something else reads something else.
"""

from __future__ import annotations

import builtins
import codecs
import collections
import datetime as dt
import hashlib
import io
import json
import pathlib
import pickle
import re
import uuid
import zipfile
import zlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tests.docs.pages import DOCS, names, sections, table

PAGE = (DOCS / "format.md").read_text()
PARTS = sections("format.md")
STORAGES = {names([row[0]])[0]: names([row[1]])[0] for row in table(PARTS["Pickle"], "storage", "elements")}
FACTORIES = names([PARTS["Encoded values"].partition("A `factory` is")[2].partition("\n- ")[0]])
END_RECORD = [(int(row[0]), int(row[1]), row[2]) for row in table(PAGE, "offset", "bytes", "value")]


def end_record(data: bytes, at: int) -> dict[str, int | bytes]:
    """Fields of the end record by what the page calls them; those that the page fixes are checked."""
    found: dict[str, int | bytes] = {}
    for offset, size, value in END_RECORD:
        field = data[at + offset : at + offset + size]
        if re.fullmatch(r"(?:[0-9a-f]{2} ?)+", value) and value != "0":
            assert field == bytes.fromhex(value)
        elif value == "0":
            assert not any(field)
        else:
            found[value] = int.from_bytes(field, "little")
    return found


def read_trailer(data: bytes) -> dict[str, Any]:
    """Check the digest, and return the trailer."""
    size = sum(size for _, size, _ in END_RECORD)
    at = data.rfind(b"PK\x05\x06")
    assert end_record(data, at)["bytes of the trailer"] == len(data) - at - size
    assert data.endswith(b'"}')
    blanked = data[:-66] + b"0" * 64 + b'"}'
    trailer = json.loads(data[at + size :].decode("ascii"))
    assert trailer["sha256"] == hashlib.sha256(blanked).hexdigest() == data[-66:-2].decode()
    assert trailer["num_zip_bytes"] == at + size
    return trailer


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        (first, *_) = archive.namelist()
        self._folder = first.removesuffix("data.pkl")
        assert archive.read(f"{self._folder}byteorder") == b"little"
        super().__init__(io.BytesIO(archive.read(first)))

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "torch._utils._rebuild_tensor_v2": _tensor,
            "collections.OrderedDict": OrderedDict,
            "_codecs.encode": codecs.encode,
        }
        return STORAGES[name] if module == "torch" else known[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        word, elements, key, location, count = pid
        assert (word, location) == ("storage", "cpu")
        data = self._archive.read(f"{self._folder}data/{key}")
        dtype = getattr(torch, elements)
        assert len(data) == count * dtype.itemsize
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _tensor(storage: Any, offset: int, shape: Any, strides: Any, _grad: bool, hooks: Any) -> torch.Tensor:
    assert hooks == OrderedDict()
    return torch.as_strided(storage, shape, strides, offset)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trailer and the payload, decoded."""
    data = path.read_bytes()
    trailer = read_trailer(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        payload = _Reader(archive).load()
    shared = payload["shared"]
    for key in ("loader_state", "rng_state"):
        payload[key] = decode(payload[key], shared)
    payload["fingerprint"] = {name: decode(facts, shared) for name, facts in payload["fingerprint"].items()}
    batch = payload["buffered_batch"]
    payload["buffered_batch"] = batch and {name: decode(column, shared) for name, column in batch.items()}
    payload["carry_over"] = _tree(payload["carry_over"])
    for group in payload["carry_over"]:
        for rollout in group["rollouts"]:
            for part in ("enqueued", "request"):
                rollout[part] = rollout[part] and _fields(rollout[part], shared)
            if (finished := rollout["finished"]) is not None:
                events = {name: _events(finished[name]) for name in ("raw_events", "triplet_events")}
                rollout["finished"] = {"record": _fields(finished["record"], shared), **events}
    return trailer, payload


def _fields(plain: Any, shared: Any) -> dict[str, Any]:
    return {name: decode(value, shared) for name, value in plain.items()}


def _tree(packed: Any) -> Any:
    """Text in which bytes and tensors are put back."""
    text = zlib.decompress(_blob(packed["zlib"]))
    assert len(text) == packed["size"]
    left = list(range(len(packed["blobs"])))

    def put_back(found: Any) -> Any:
        if found.get("$type") != "blob":
            return found
        left.remove(found["index"])
        return packed["blobs"][found["index"]]

    tree = json.loads(text.decode("utf-8", "surrogatepass"), object_hook=put_back)
    assert not left
    return tree


def _events(plain: Any) -> Any:
    text = zlib.decompress(_blob(plain["zlib"]))
    assert len(text) == plain["size"]
    return tuple(json.loads(text)) if plain["tuple"] else json.loads(text)


def _blob(blob: Any) -> bytes:
    return b"" if blob is None else blob if isinstance(blob, bytes) else blob.numpy().tobytes()


def decode(plain: Any, shared: Any) -> Any:
    """One encoded value."""
    if isinstance(plain, list):
        return [decode(item, shared) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$type" not in plain:
        return {key: decode(item, shared) for key, item in plain.items()}
    return DECODERS[plain["$type"]](plain, shared)


def _items(plain: Any, shared: Any) -> Any:
    return decode(plain["items"], shared)


def _dtype(plain: Any) -> Any:
    if isinstance(plain, str):
        return np.dtype(plain)
    fields = [(tuple(n) if isinstance(n, list) else n, _dtype(kind), *map(tuple, shape)) for n, kind, *shape in plain]
    return np.dtype(fields)


def _array(plain: Any, _shared: Any) -> Any:
    flat = np.frombuffer(bytearray(_blob(plain["data"])), _dtype(plain["dtype"]))
    return flat.reshape(plain["shape"], order=plain["order"])


def _object_array(plain: Any, shared: Any) -> Any:
    items = _items(plain, shared)
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array.reshape(plain["shape"], order=plain["order"])


def _other_tensor(plain: Any, _shared: Any) -> torch.Tensor:
    data = torch.frombuffer(bytearray(_blob(plain["data"])), dtype=torch.uint8)
    return data.view(getattr(torch, plain["dtype"])).reshape(plain["shape"])


def _zone(plain: Any) -> dt.tzinfo | None:
    if plain is None or isinstance(plain, str):
        return plain and zoneinfo.ZoneInfo(plain)
    offset = dt.timedelta(*plain["offset"])
    return dt.timezone(offset) if plain["name"] is None else dt.timezone(offset, plain["name"])


def _datetime(plain: Any, _shared: Any) -> dt.datetime:
    *parts, fold = plain["parts"]
    return dt.datetime(*parts, fold=fold, tzinfo=_zone(plain["zone"]))


def _time(plain: Any, _shared: Any) -> dt.time:
    *parts, fold = plain["parts"]
    return dt.time(*parts, fold=fold, tzinfo=_zone(plain["zone"]))


def _timestamp(plain: Any, _shared: Any) -> Any:
    found = pd.Timestamp(np.datetime64(plain["value"], plain["unit"]))
    if plain["zone"] is None:
        return found.replace(fold=plain["fold"])
    return found.tz_localize("UTC").tz_convert(_zone(plain["zone"]))


_FACTORIES = {None: None, **{name: getattr(builtins, name, None) or getattr(collections, name) for name in FACTORIES}}


DECODERS: dict[str, Any] = {
    "int": lambda plain, _: int(plain["hex"], 16),
    "bytes": lambda plain, _: _blob(plain["data"]),
    "bytearray": lambda plain, _: bytearray(_blob(plain["data"])),
    "tuple": lambda plain, shared: tuple(_items(plain, shared)),
    "set": lambda plain, shared: set(_items(plain, shared)),
    "frozenset": lambda plain, shared: frozenset(_items(plain, shared)),
    "dict": lambda plain, shared: dict(_items(plain, shared)),
    "OrderedDict": lambda plain, shared: OrderedDict(_items(plain, shared)),
    "Counter": lambda plain, shared: Counter(dict(_items(plain, shared))),
    "defaultdict": lambda plain, shared: defaultdict(_FACTORIES[plain["factory"]], _items(plain, shared)),
    "deque": lambda plain, shared: deque(_items(plain, shared), plain["maxlen"]),
    "range": lambda plain, _: range(*plain["parts"]),
    "numbers": lambda plain, _: np.frombuffer(_blob(plain["data"]), plain["dtype"]).tolist(),
    "complex": lambda plain, _: complex(*plain["parts"]),
    "Decimal": lambda plain, _: Decimal(plain["text"]),
    "date": lambda plain, _: dt.date(*plain["parts"]),
    "datetime": _datetime,
    "time": _time,
    "timedelta": lambda plain, _: dt.timedelta(*plain["parts"]),
    "pandas.Timestamp": _timestamp,
    "pandas.Timedelta": lambda plain, _: pd.Timedelta(np.timedelta64(plain["value"], plain["unit"])),
    "pandas.NaT": lambda *_: pd.NaT,
    "UUID": lambda plain, _: uuid.UUID(plain["hex"], is_safe=uuid.SafeUUID(plain["is_safe"])),
    "path": lambda plain, _: getattr(pathlib, plain["kind"])(plain["text"]),
    "array": _array,
    "object_array": _object_array,
    "scalar": lambda plain, _: np.frombuffer(_blob(plain["data"]), _dtype(plain["dtype"]))[0],
    "numpy.str_": lambda plain, _: np.str_(plain["text"]),
    "numpy.bytes_": lambda plain, _: np.bytes_(_blob(plain["data"])),
    "tensor": _other_tensor,
    "shared": lambda plain, shared: decode(shared[plain["digest"]], shared),
}
