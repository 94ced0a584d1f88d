"""Arrays, tensors and lists of numbers <-> plain values; the leaves of the codec.

The bytes of an array travel as a *blob*: None if empty, `bytes` up to `SMALL` bytes, else a uint8 tensor. A tensor
is a record of its own in the file, which is dear for a few bytes; long `bytes` cost more than that.
Data types are written as numpy's array interface strings (`<f4`: byte order, kind, item size), which numpy 1 and 2
read alike, unlike their pickles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

Array: TypeAlias = "np.ndarray[Any, Any]"

SMALL = 1024
"""Up to this size, bytes, a blob is no tensor."""

LARGE = 64 * 1024
"""From this size on, bytes, the memory of a value is used where it is, and smaller ones are copied."""

_PLAIN_KINDS = "biufcmMSUV"
# Every supported torch writes these itself; the others travel as bytes and a name, so that no version has to know
# how another one pickles them.
_NATIVE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)


class Lender:
    """Hands out memory of the values that are packed, instead of copies of it.

    Only for values that nobody changes until the payload is written. What is small is copied all the same. No address
    is handed out twice: `torch.save` refuses one that it meets under two types.
    """

    def __init__(self) -> None:
        self._lent: set[int] = set()

    def lend(self, memory: Array) -> torch.Tensor | None:
        """Return `memory`, (num_bytes,) uint8, as a tensor whose storage is exactly that; None if it is to be copied.

        torch is shown the address only: it warns of memory that may not be written, and nobody writes here.
        """
        address: int = memory.__array_interface__["data"][0]
        if memory.nbytes < LARGE or address in self._lent:
            return None
        self._lent.add(address)
        return torch.from_numpy(np.asarray(_Shown(memory, address)))


class _Shown:
    """An array's memory as numpy takes it from any object; keeps the array alive."""

    def __init__(self, memory: Array, address: int) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (address, False),
        }


def pack_bytes(data: bytes | bytearray, lender: Lender | None = None) -> Any:
    """Turn bytes into a blob."""
    if not data:
        return None  # weights_only refuses an empty bytes object
    if len(data) <= SMALL:
        return bytes(data)
    lent = lender.lend(np.frombuffer(data, dtype=np.uint8)) if lender else None
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)) if lent is None else lent


def unpack_bytes(blob: Any) -> bytes:
    """Turn a blob back into bytes.

    Raises:
        ValueError: Not a blob.
    """
    if blob is None:
        return b""
    if type(blob) is bytes:
        return blob
    if type(blob) is torch.Tensor and blob.dtype is torch.uint8 and blob.dim() == 1:
        return check_tensor(blob).numpy().tobytes()
    raise ValueError(f"expected bytes, got {type(blob).__name__}")


def pack_dtype(dtype: np.dtype[Any]) -> Any:
    """Describe a numpy dtype with plain values, or None if that would not bring back the same one."""
    if not _is_plain(dtype):
        return None
    plain = dtype.str if dtype.fields is None else _listed(dtype.descr)
    try:
        return plain if unpack_dtype(plain) == dtype else None
    except (TypeError, ValueError):
        return None


def unpack_dtype(plain: Any) -> np.dtype[Any]:
    """Read what `pack_dtype` wrote.

    Raises:
        ValueError: Not the description of a plain dtype.
    """
    descr = plain if isinstance(plain, str) else _tupled(plain)
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(descr)
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a numpy dtype: {plain!r}") from error
    if not _is_plain(dtype):
        raise ValueError(f"not a plain numpy dtype: {plain!r}")
    return dtype


def pack_array(array: Array, dtype: Any, lender: Lender | None = None) -> dict[str, Any]:
    """Copy or lend a non-object array; `dtype` is its description. Keeps Fortran order, and drops any other strides."""
    order, data = order_of(array), None
    if lender and array.flags.forc:
        data = lender.lend(array.ravel(order).view(np.uint8))
    if data is None:
        data = pack_bytes(array.tobytes(order))
    return {"dtype": dtype, "shape": list(array.shape), "order": order, "data": data}


def order_of(array: Array) -> Literal["C", "F"]:
    """Return the order in which the elements of an array are written."""
    return "F" if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def unpack_array(plain: dict[str, Any], *, copy: bool = True) -> Array:
    """Rebuild a writable array.

    Args:
        plain: What `pack_array` made.
        copy: Give it memory of its own; else a large one takes over that of `plain`, which is to be used once.

    Raises:
        ValueError: The sizes disagree, checked before memory is taken.
    """
    dtype, shape, order = unpack_dtype(plain["dtype"]), unpack_shape(plain["shape"]), plain["order"]
    data = _memory_of(plain["data"])
    if math.prod(shape) * dtype.itemsize != data.nbytes:
        raise ValueError(f"an array of shape {shape} and type {dtype} does not fit into {data.nbytes} bytes")
    array: Array = np.ndarray(shape, dtype, data.data, order=order)
    return array.copy(order="K") if copy or array.nbytes < LARGE or not array.flags.writeable else array


def _memory_of(blob: Any) -> Array:
    """Return the bytes of a blob where they are, (num_bytes,) uint8."""
    if type(blob) is torch.Tensor and blob.dtype is torch.uint8 and blob.dim() == 1:
        return check_tensor(blob).numpy()
    return np.frombuffer(unpack_bytes(blob), dtype=np.uint8)


def unpack_shape(plain: Any) -> tuple[int, ...]:
    """Check a list of dimensions.

    Raises:
        ValueError: Not up to 64 non-negative integers.
    """
    if type(plain) is not list or len(plain) > 64 or any(type(size) is not int or size < 0 for size in plain):
        raise ValueError("not an array shape")
    return tuple(plain)


def pack_tensor(tensor: torch.Tensor, lender: Lender | None = None) -> Any:
    """Copy a tensor to the CPU, or lend it, without its graph and without the rest of its storage."""
    lent = _lent_tensor(tensor.detach(), lender) if lender else None
    if lent is not None:
        return lent
    copy = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if copy.dtype in _NATIVE_DTYPES:
        return copy
    name = str(copy.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(copy.shape), "data": pack_bytes(bytes_of(copy))}


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has a value for each of its elements."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy the elements of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _lent_tensor(tensor: torch.Tensor, lender: Lender) -> torch.Tensor | None:
    is_lazy = tensor.is_conj() or tensor.is_neg()  # its memory does not hold its values
    if not tensor.is_cpu or tensor.dtype not in _NATIVE_DTYPES or not tensor.is_contiguous() or is_lazy:
        return None
    if not tensor.numel():
        return None
    lent = lender.lend(tensor.reshape(-1).view(torch.uint8).numpy())
    return None if lent is None else lent.view(tensor.dtype).reshape(tensor.shape)


def unpack_tensor(plain: dict[str, Any]) -> torch.Tensor:
    """Rebuild a tensor whose type travels by name.

    Raises:
        ValueError: This torch lacks the type, or the sizes disagree.
    """
    name, shape, data = plain["dtype"], unpack_shape(plain["shape"]), unpack_bytes(plain["data"])
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no type {name!r}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a tensor of shape {shape} and type {name} does not fit into {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)).view(dtype).reshape(shape)


def check_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its storage really holds it: strides of 0 could declare any size.

    Raises:
        ValueError: The tensor declares more than the file holds.
    """
    if not tensor.is_contiguous() or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ValueError("a tensor declares more than its storage holds")
    return tensor


def pack_numbers(items: Sequence[Any]) -> dict[str, Any] | None:
    """Pack a list of only `int` (64 bit) or only `float`; None for any other list.

    The loader handles every element of a list by itself: a list of token ids is slow to read and large.
    """
    kinds = set(map(type, items))
    if kinds == {int}:
        if not -(2**63) <= min(items) <= max(items) < 2**63:
            return None
        dtype = "<i8"
    elif kinds == {float}:
        dtype = "<f8"
    else:
        return None
    return {"dtype": dtype, "data": pack_bytes(np.array(items, dtype=dtype).tobytes())}


def unpack_numbers(plain: dict[str, Any]) -> list[Any]:
    """Rebuild a list of `int` or `float`.

    Raises:
        ValueError: Another type.
    """
    if plain["dtype"] not in ("<i8", "<f8"):
        raise ValueError(f"not a list of numbers: {plain['dtype']!r}")
    return np.frombuffer(unpack_bytes(plain["data"]), dtype=plain["dtype"]).tolist()


def _is_plain(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        return _is_plain(dtype.subdtype[0])
    if dtype.fields is not None:
        return all(_is_plain(field[0]) for field in dtype.fields.values())
    # Extended precision means another format on another machine under the same name.
    return dtype.kind in _PLAIN_KINDS and dtype.itemsize > 0 and dtype.char not in "gG"


def _listed(descr: Any) -> Any:
    return [_listed(item) for item in descr] if isinstance(descr, (list, tuple)) else descr


def _tupled(plain: Any) -> Any:
    """Give a structured description its shape back: a list of (name, type, shape) tuples, type again a list or text."""
    if isinstance(plain, str):
        return plain
    fields: list[tuple[Any, ...]] = []
    for name, kind, *shape in plain:
        fields.append((tuple(name) if isinstance(name, list) else name, _tupled(kind), *map(tuple, shape)))
    return fields
