"""What the pickle inside an input state may name, looked at without running any of it.

`torch.load(weights_only=True)` knows many more callables than this format needs, and whatever other libraries have
added to its list: `bytearray(2**40)` alone takes a terabyte. So the loader gets a file only if each instruction and
each name in its pickle is one that `torch.save` writes for tensors, text, numbers, bytes, lists and dicts. Imports no
torch.
"""

from __future__ import annotations

import os
import struct
import zipfile
from typing import BinaryIO

_FIXED: dict[bytes, int] = {
    # protocol; memo put and get
    **{b"\x80": 1, b"q": 1, b"r": 4, b"h": 1, b"j": 4},
    # int of 1, 2 and 4 bytes, float, None, True, False
    **{b"K": 1, b"M": 2, b"J": 4, b"G": 8, b"N": 0, b"\x88": 0, b"\x89": 0},
    # mark; tuples, list, dict, and what fills them
    **{b"(": 0, b")": 0, b"\x85": 0, b"\x86": 0, b"\x87": 0, b"t": 0, b"]": 0, b"a": 0, b"e": 0},
    **{b"}": 0, b"s": 0, b"u": 0},
    # persistent id (a tensor's storage), call, stop
    **{b"Q": 0, b"R": 0, b".": 0},
}
"""Instruction -> number of argument bytes (pickle protocol 2)."""

_SIZES = [_FIXED.get(bytes([code]), -1) for code in range(256)]
_GLOBAL, _TEXT, _LONG, _STOP = b"cX\x8a."

_ZIP64_FROM = 2**32 - 1

_NAMES = frozenset(
    {
        b"torch._utils\n_rebuild_tensor_v2",
        b"collections\nOrderedDict",  # hooks of a tensor: always an empty one
        b"_codecs\nencode",  # how protocol 2 writes bytes
    }
)


def refuse_foreign_pickle(content: BinaryIO) -> None:
    """Judge the pickle of a torch zip file; `content` is left at its start.

    Raises:
        ValueError: It names what no input state holds, or is no pickle that `torch.save` writes; says which.
    """
    with zipfile.ZipFile(content) as archive:
        entries = archive.infolist()
        names = [entry.filename.casefold() for entry in entries]
        if len({*names}) != len(names):
            # The loader could take another one than was looked at.
            raise ValueError("two entries of one name")
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} entries named data.pkl")
        size = content.seek(0, os.SEEK_END)
        content.seek(size - len(archive.comment) - 6)
        (stated,) = struct.unpack("<L", content.read(4))
        moved = stated != archive.start_dir if size < _ZIP64_FROM else stated < _ZIP64_FROM
        if moved or pickles[0].header_offset != 0:
            # zipfile moves offsets that do not fit; the loader believes them.
            raise ValueError("data.pkl is not its first entry, or the zip directory is not where it says")
        data = archive.read(pickles[0])
    content.seek(0)
    _walk(data)


def _walk(data: bytes) -> None:
    at, end = 0, len(data)
    while at < end:
        code = data[at]
        at += 1
        size = _SIZES[code]
        if size > 0:
            at += size
        elif size < 0:
            if code == _TEXT:
                at += 4 + int.from_bytes(data[at : at + 4], "little")
            elif code == _LONG:
                at += 1 + data[at] if at < end else 1
            elif code == _GLOBAL:
                at = _skip_name(data, at)
            else:
                raise ValueError(f"pickle instruction {bytes([code])!r} at {at - 1}")
        elif code == _STOP:
            if at != end:
                raise ValueError(f"{end - at} bytes behind the end of the pickle")
            return
    raise ValueError("the pickle has no end")


def _skip_name(data: bytes, at: int) -> int:
    end = data.find(b"\n", data.find(b"\n", at) + 1)
    name = data[at : max(end, 0)]
    module, _, last = name.partition(b"\n")
    if name not in _NAMES and not (module == b"torch" and last.endswith(b"Storage") and last.isalnum()):
        raise ValueError(f"GLOBAL {name[:200].replace(chr(10).encode(), b'.').decode('ascii', 'replace')}")
    return end + 1
