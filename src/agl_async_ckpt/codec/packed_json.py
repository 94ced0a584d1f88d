"""Plain values <-> compressed JSON text, where there are many small ones: `torch.load` takes each by itself, in Python.

In memory and in a file the text takes a small part of what the objects take. Text comes back as it was, half surrogate
pairs too, and so do NaN, the infinities and the sign of zero.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, cast

import torch

from agl_async_ckpt.codec.arrays import pack_bytes, unpack_bytes
from agl_async_ckpt.codec.decode import TAG, Plain

BLOB = "blob"
_LEVEL = 1
"""Of zlib: level 6 makes 7 % less of the events of a rollout, in five times the time."""


def compress(text: bytes) -> tuple[bytes, int]:
    """Return compressed text, and its length in bytes before."""
    return zlib.compress(text, _LEVEL), len(text)


def decompress(data: bytes, size: Any) -> str:
    """Return the text of `size` bytes; never takes more memory than that.

    Raises:
        ValueError, zlib.error: `data` is no compressed text of this size.
    """
    if type(size) is not int or size < 0:
        raise ValueError("a compressed text has no size")  # zlib takes a limit of 0 for none
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data, size + 1)
    if len(text) != size or not unpacker.eof:
        raise ValueError("a compressed text does not have its declared size")
    return text.decode("utf-8", "surrogatepass")


def pack_tree(tree: Plain) -> dict[str, Plain]:
    """Pack a tree of plain values; bytes and tensors in it stay beside the text, as they are.

    Args:
        tree: Without a dict in which the key `$type` is the text "blob".

    Raises:
        TypeError: Something else than a plain value.
    """
    blobs: list[Plain] = []

    def aside(leaf: Any) -> dict[str, Plain]:
        if not isinstance(leaf, bytes | torch.Tensor):
            raise TypeError(f"{type(leaf).__name__} is no plain value")
        blobs.append(leaf)
        return {TAG: BLOB, "index": len(blobs) - 1}

    text = json.dumps(tree, default=aside, separators=(",", ":"), ensure_ascii=False)
    data, size = compress(text.encode("utf-8", "surrogatepass"))
    return {"zlib": pack_bytes(data), "size": size, "blobs": blobs}


def unpack_tree(packed: dict[str, Plain]) -> Plain:
    """Rebuild the tree.

    Raises:
        ValueError, TypeError, KeyError, RecursionError, zlib.error: Not what `pack_tree` returns.
    """
    blobs = packed["blobs"]
    if type(blobs) is not list:
        raise TypeError("blobs are no list")
    left = dict(enumerate(cast("list[Plain]", blobs)))

    def put_back(found: dict[str, Plain]) -> Plain:
        return left.pop(found["index"]) if found.get(TAG) == BLOB else found  # each stands in one place

    text = decompress(unpack_bytes(packed["zlib"]), packed["size"])
    tree = json.loads(text, object_hook=put_back if left else None)
    if left:
        raise ValueError(f"{len(left)} blobs stand nowhere")
    return tree
