"""What the pickle inside an input state may name, looked at without running any of it.

`torch.load(weights_only=True)` knows many more callables than this format needs, and whatever other libraries have
added to its list: `bytearray(2**40)` alone takes a terabyte. So the loader gets a file only if each instruction and
each name in its pickle is one that `torch.save` writes for tensors, text, numbers, bytes, lists and dicts. Imports no
torch.
"""

from __future__ import annotations

import os
import pickletools
import re
import struct
import zipfile
from typing import BinaryIO, cast

_INSTRUCTIONS = frozenset(
    {
        *("PROTO", "STOP", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE"),
        *("MARK", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "BINPERSID"),
    }
)
_NAMES = frozenset(
    {
        "torch._utils _rebuild_tensor_v2",
        "collections OrderedDict",  # hooks of a tensor: always an empty one
        "_codecs encode",  # how protocol 2 writes bytes
    }
)
"""Module and name, as `pickletools` shows them."""

_STORAGE = re.compile(r"torch [A-Za-z0-9]+Storage")
_ZIP64_FROM = 2**32 - 1


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
    _judge(data)


def _judge(data: bytes) -> None:
    at = -1
    for instruction, argument, position in pickletools.genops(data):
        at = cast("int", position)
        if instruction.name not in _INSTRUCTIONS:
            raise ValueError(f"pickle instruction {instruction.name} at {at}")
        if instruction.name == "GLOBAL" and argument not in _NAMES and not _STORAGE.fullmatch(str(argument)):
            raise ValueError(f"GLOBAL {str(argument)[:200].replace(' ', '.')}")
    if at + 1 != len(data):  # the last one was STOP
        raise ValueError(f"{len(data) - at - 1} bytes behind the end of the pickle")
