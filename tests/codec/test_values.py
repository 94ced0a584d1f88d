"""Values come back exactly, or are refused by name."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import io
import math
import pathlib
import uuid
import warnings
import zoneinfo
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agl_async_ckpt.codec import arrays as codec_arrays
from agl_async_ckpt.codec import values as codec
from agl_async_ckpt.codec.decode import TAG, decode_value, require_tree
from agl_async_ckpt.codec.format import MAX_DEPTH
from agl_async_ckpt.codec.values import (
    check_batch_encodable,
    encode_batch,
    encode_value,
)
from agl_async_ckpt.exceptions import UnencodableValueError
from tests.golden.sample import assert_same, objects, sample_batch

PLAIN = (torch.Tensor, str, int, float, bool, type(None), bytes, list, dict)


def through_file(plain: Any) -> Any:
    """Write and read as the file does."""
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu", mmap=False)


def assert_plain(value: Any) -> None:
    """Only exact plain types, tensors that own no more than they show, text keys."""
    assert type(value) in PLAIN
    if type(value) is dict:
        assert all(type(key) is str for key in value)
        for item in value.values():
            assert_plain(item)
    elif type(value) is list:
        for item in value:
            assert_plain(item)
    elif type(value) is torch.Tensor:
        assert value.untyped_storage().nbytes() == value.numel() * value.itemsize
        assert (value.requires_grad, value.is_conj(), value.is_neg()) == (False, False, False)
    elif type(value) is bytes:
        assert value
    elif type(value) is int:
        assert -(2**63) <= value < 2**63


def round_trip(value: Any) -> Any:
    plain = encode_value(value, "value")
    assert_plain(plain)
    return decode_value(through_file(plain))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**700),
        *(0.0, -0.0, 1.5, math.nan, math.inf, 5e-324, complex(-0.0, math.nan)),
        *("", "text", "\x00", "日本\U0001f600", "a\ud800b", "\udfff"),
        *(b"", b"x", bytes(1024), bytes(range(256)) * 9, bytearray(), bytearray(b"abc")),
        *([], [[]], [1, True, 1.0, "1", None], (), (1, (2, [3])), [()], set(), {1, "a", (2,)}, frozenset({b"", None})),
        *({}, {"": {}}, {"a": None, "b": []}, {1: 2, False: 3, "x": 4}, {None: 0, 2.5: 1, b"": 2, (1, "a"): 3}),
        *({"$type": 1}, {"$type": "tuple", "items": [1]}, {"a": {"$type": {"$type": "set"}}}, {1: {"$type": "int"}}),
        collections.OrderedDict([("b", 1), ("a", 2), (3, 4)]),
        *(list(range(32)), list(range(500)), [0.5] * 32, [math.nan, -0.0] * 40, tuple(range(100))),
        *([1] * 40 + [True], [1] * 40 + [1.0], [2**70] * 40, [False] * 50, list("abc" * 20)),
        *(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, fold=1)),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, seconds=7))),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(0), "Z")),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        *(dt.date(2024, 2, 29), dt.time(1, 2, 3, 4, fold=1), dt.time(5, tzinfo=dt.timezone.utc)),
        *(dt.timedelta(), dt.timedelta(-999999999, 1, 2), dt.timedelta.max),
        *(Decimal("0"), Decimal("-0.00"), Decimal("1E+999999"), Decimal("sNaN123"), Decimal("-Infinity")),
    ],
    # The order of a set differs between the worker processes of a parallel run.
    ids=lambda v: None if isinstance(v, set | frozenset) else repr(v)[:40].encode("ascii", "backslashreplace").decode(),
)
def test_python_value_comes_back_exactly(value: Any) -> None:
    """Value, type, order, sign of zero and NaN survive the file."""
    assert_same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        *(collections.Counter("aab"), collections.Counter({"b": -1, "a": 2.5}), collections.Counter()),
        *(collections.deque(), collections.deque([1, (2,)], maxlen=3), collections.deque(range(100))),
        *(collections.defaultdict(list, {1: [2], "a": []}), collections.defaultdict(None, {}), range(7, -3, -2)),
        {"$type": collections.Counter(a=collections.deque([collections.defaultdict(int, x=1)]))},
        *(
            uuid.UUID(int=5),
            uuid.uuid5(uuid.NAMESPACE_DNS, "a"),
            pathlib.Path("a/b"),
            pathlib.PurePosixPath("/"),
            pathlib.PureWindowsPath("c:\\x"),
        ),
    ],
    ids=repr,
)
def test_value_of_the_standard_library_comes_back_exactly(value: Any) -> None:
    """With what belongs to it: a factory, a bound, an order."""
    found = round_trip(value)
    assert (type(found), repr(found), found) == (type(value), repr(value), value)


@pytest.mark.parametrize(
    "value",
    [
        pd.Timestamp("2024-01-01 00:00:00.123456789"),
        pd.Timestamp(year=2024, month=1, day=1, fold=1),
        pd.Timestamp("2024-01-01", tz="UTC"),
        pd.Timestamp("2024-01-01 00:00:00.000000007", tz=zoneinfo.ZoneInfo("UTC")),
        pd.Timestamp("2024-01-01", tz=dt.timezone(dt.timedelta(hours=-5), "X")),
        *(pd.Timestamp("0001-01-01").as_unit("s"), pd.Timestamp.min, pd.Timestamp.max, pd.NaT),
        *(pd.Timedelta(-7, "ns"), pd.Timedelta(5, "s"), pd.Timedelta.max),
    ],
    ids=str,
)
def test_time_of_pandas_comes_back_exactly(value: Any) -> None:
    """To the nanosecond, in its unit and its zone: so a parquet column `timestamp[ns]` arrives."""
    found = round_trip(value)
    assert type(found) is type(value)
    if value is pd.NaT:
        assert found is value
        return
    assert (found, found.unit, found.asm8) == (value, value.unit, value.asm8)
    if isinstance(value, pd.Timestamp):
        assert (found.fold, repr(found.tzinfo)) == (value.fold, repr(value.tzinfo))


def test_zone_that_comes_twice_in_a_year_is_told_apart() -> None:
    """Half past two in Berlin, before and after the clocks are put back."""
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    for fold in (0, 1):
        value = pd.Timestamp(year=2024, month=10, day=27, hour=2, minute=30, fold=fold, tz=berlin)
        found = round_trip(value)
        assert (found.asm8, found.fold, found.tzinfo) == (value.asm8, fold, berlin)


@pytest.mark.parametrize(
    "plain",
    [
        {TAG: "defaultdict", "factory": "print", "items": []},
        {TAG: "path", "kind": "Popen", "text": "x"},
        {TAG: "pandas.Timestamp", "value": 1, "unit": "D", "fold": 0, "zone": None},
        {TAG: "UUID", "hex": "x", "is_safe": 0},
    ],
    ids=lambda plain: plain[TAG],
)
def test_file_names_no_code(plain: dict[str, Any]) -> None:
    """What is made is one of a few types that are listed here, or the file is refused."""
    with pytest.raises((ValueError, KeyError)):
        decode_value(plain)


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.array("text"),
        np.zeros((0, 3), dtype=np.int8),
        np.zeros((2, 0), order="F"),
        np.arange(24).reshape(2, 3, 4)[:, ::-1, 1:3],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(6).reshape(2, 3).T,
        np.array([1, 2], dtype=">i8"),
        np.array([1.5, math.nan], dtype=np.float16),
        np.array([True, False]),
        np.array([1 + 2j], dtype=np.complex64),
        np.array(["2024-01-01", "NaT"], dtype="datetime64[ns]"),
        np.array([3, "NaT"], dtype="timedelta64[15m]"),
        np.array(["NaT"], dtype="datetime64"),
        np.array(["a", "日本\U0001f600"]),
        np.array([b"a\x00b", b"\xff"]),
        np.array([b"abc"], dtype="V3"),
        np.array([(1, [2.5, 3.5], ("x",))], dtype=[("a", "<i4"), ("b", ">f8", (2,)), ("c", [("d", "U3")])]),
        np.zeros(3, dtype=np.dtype([("a", "i1"), ("b", "i8")], align=True)),
        np.arange(5000, dtype=np.int32),
        np.broadcast_to(np.float32(1), (3, 4)),
        np.empty((0,), dtype=object),
        objects([1, 2], [3, 4]),
        objects(*[[1, 2]] * 3).reshape(3, 1),
        np.asfortranarray(np.array([[1, "a", None], [b"", 2.5, (1,)]], dtype=object)),
        np.array({"a": np.float32(1)}, dtype=object),
        objects(*range(100)),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_array_comes_back_exactly(array: Any) -> None:
    """Type, byte order, shape, memory order and every byte survive, in writable memory."""
    assert_same(round_trip(array), array.copy(order="K") if not array.flags.writeable else array)


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.float64(0.1), np.float32(math.nan), np.float16(1), np.int64(1), np.uint8(255), np.bool_(True)),
        *(np.complex128(1j), np.datetime64("2024-01-01T00", "h"), np.datetime64("NaT"), np.timedelta64(5, "s")),
        *(np.str_(""), np.str_("x\x00"), np.bytes_(b""), np.bytes_(b"a\x00"), np.void(b"ab")),
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")])[0],
    ],
    ids=lambda scalar: f"{type(scalar).__name__}-{scalar}",
)
def test_numpy_scalar_does_not_become_a_python_number(scalar: Any) -> None:
    """A numpy scalar is a subclass of a Python type in places; its type survives all the same."""
    assert_same(round_trip(scalar), scalar)


@pytest.mark.parametrize(
    "name",
    [
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (40, 40)], ids=str)
def test_tensor_comes_back_exactly(name: str, shape: tuple[int, ...]) -> None:
    """Every data type and shape, in the same bytes."""
    tensor = (torch.arange(math.prod(shape)).reshape(shape) % 7).to(getattr(torch, name))
    assert_same(round_trip(tensor), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).t(),
        torch.ones(1, 3).expand(4, 3),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).imag,
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["transposed", "expanded", "leaf", "graph", "conjugate", "imaginary", "negative"],
)
def test_tensor_view_comes_back_as_the_values_it_shows(tensor: Any) -> None:
    """Lazy views, graphs and strides do not reach the file; what they show does."""
    found = round_trip(tensor)
    assert torch.equal(found, tensor.detach())
    assert not found.requires_grad
    assert found.is_contiguous()


def test_tensor_slice_does_not_drag_its_storage() -> None:
    """One row of 512 x 4096 costs one row."""
    batch = torch.zeros(512, 4096, dtype=torch.int64)
    assert encode_value(batch[:1], "x").untyped_storage().nbytes() == 4096 * 8
    column = np.zeros((512, 4096), dtype=np.int64)[:1]
    assert encode_value(column, "x")["data"].untyped_storage().nbytes() == 4096 * 8


def test_encoded_value_does_not_change_with_its_source() -> None:
    """Training may write into a tensor or an array after it was captured."""
    value = {"tensor": torch.zeros(3), "array": np.zeros(300), "list": [1], "bytes": bytearray(b"a")}
    plain = encode_value(value, "x")
    value["tensor"][0] = 1
    value["array"][0] = 1
    value["list"].append(2)
    value["bytes"][0] = 0
    wanted = {"tensor": torch.zeros(3), "array": np.zeros(300), "list": [1], "bytes": bytearray(b"a")}
    assert_same(decode_value(plain), wanted)


def memory_of(plain: Any) -> int:
    data = plain if isinstance(plain, torch.Tensor) else plain["data"]
    return data.untyped_storage().data_ptr()


def large_batch() -> dict[str, Any]:
    """Every kind of large column, all of them the end of something longer, as the tail of a batch is."""
    read_only = np.arange(40_000.0)
    read_only.flags.writeable = False
    images = [bytes([i]) * 70_000 for i in range(4)]
    return {
        "ids": torch.arange(80_000).reshape(8, 10_000)[4:],
        "half": torch.arange(160_000, dtype=torch.bfloat16).reshape(8, -1)[4:],
        "times": np.arange(40_000).astype("<M8[s]").reshape(8, -1)[4:],
        "fortran": np.asfortranarray(np.arange(80_000.0).reshape(4, -1)),
        "read_only": read_only.reshape(8, -1)[4:],
        "images": objects(*images),
    }


def test_lent_batch_is_not_copied_and_comes_back_the_same() -> None:
    """A tail of a gigabyte is saved from where it lies, and without the rows before it."""
    batch = large_batch()
    plain = encode_batch(batch, lend=True)
    for name in ("ids", "half"):
        assert memory_of(plain[name]) == batch[name].data_ptr()
        assert plain[name].untyped_storage().nbytes() == batch[name].numel() * batch[name].itemsize
    for name in ("times", "fortran", "read_only"):
        assert memory_of(plain[name]) == batch[name].ctypes.data
        assert plain[name]["data"].untyped_storage().nbytes() == batch[name].nbytes
    for item, image in zip(plain["images"]["items"], batch["images"], strict=True):
        assert memory_of(item) == np.frombuffer(image, np.uint8).ctypes.data
    restored = {name: decode_value(column) for name, column in through_file(plain).items()}
    assert_same(restored, {name: torch.clone(v) if torch.is_tensor(v) else v for name, v in batch.items()})


def test_memory_in_two_columns_is_lent_once() -> None:
    """`torch.save` refuses one address under two types, and a reader refuses one storage in two places."""
    ids = torch.arange(20_000)
    plain = encode_batch({"ids": ids, "again": ids, "floats": ids.view(torch.float64), "array": ids.numpy()}, lend=True)
    restored = through_file(plain)
    require_tree(restored)
    assert_same(decode_value(restored["array"]), ids.numpy())


@pytest.mark.parametrize("make", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t.to(torch.complex64).conj()])
def test_memory_that_is_not_the_value_is_not_lent(make: Any) -> None:
    """Other strides, and conjugates that torch computes when asked."""
    tensor = make(torch.arange(90_000.0).reshape(300, 300))
    assert_same(through_file(encode_batch({"x": tensor}, lend=True))["x"], tensor.resolve_conj().contiguous())


def test_small_tensor_does_not_keep_the_loaded_file_in_memory() -> None:
    """torch maps the file, and the state of a generator lives as long as the run."""
    file = torch.arange(100_000)
    assert decode_value(file[:100]).untyped_storage().nbytes() == 100 * 8
    assert decode_value(file).data_ptr() == file.data_ptr()


def test_large_array_takes_over_the_loaded_memory() -> None:
    """The tail of a resume is in memory once."""
    plain = encode_batch({"x": np.arange(40_000)})["x"]
    assert decode_value(plain).ctypes.data == plain["data"].data_ptr()


def test_shared_array_is_copied_for_each_reference() -> None:
    """Siblings must not share what a hook may change in place."""
    plain = encode_value(np.arange(40_000), "x")
    reference = {TAG: "shared", "digest": "d"}
    first, second = (decode_value(reference, {"d": plain}) for _ in range(2))
    first[0] = 7
    assert second[0] == 0


def test_decoded_value_does_not_change_with_the_payload() -> None:
    """Decoding twice gives two independent values."""
    plain = encode_value([np.zeros(300), np.zeros(2)], "x")
    first, second = decode_value(plain), decode_value(plain)
    first[0][0] = first[1][0] = 1
    assert second[0][0] == second[1][0] == 0


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Number(float):
    pass


class Rows(list[int]):
    pass


class Special(np.float64):
    pass


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch announces their end
        return torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)


class Zone(dt.tzinfo):
    def utcoffset(self, _: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=1)


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        (Colour.RED, "Colour"),
        (Level.LOW, "Level"),
        (Text("a"), "Text"),
        (Number(1), "Number"),
        (Special(1), "Special"),
        (Rows([1]), "Rows"),
        (Point(1, 2), "Point"),
        (torch.Size([1]), "torch.Size"),
        (collections.defaultdict(lambda: 0), "collections.defaultdict with the factory"),
        (collections.defaultdict(collections.defaultdict), "collections.defaultdict with the factory"),
        (collections.ChainMap(), "ChainMap"),
        (len, "builtin_function_or_method"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]), "numpy.ndarray"),
        (np.zeros(1, dtype=np.longdouble), "numpy.ndarray"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.zeros(1, dtype=[("a", np.longdouble)]), "numpy.ndarray"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.ones(2, 2).to_sparse(), "torch.Tensor"),
        (torch.ones(2, device="meta"), "torch.Tensor"),
        (quantized(), "torch.Tensor"),
        (dt.datetime(2024, 1, 1, tzinfo=Zone()), "Zone"),
        ({Text("a"): 1}, "Text"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_value_that_would_not_come_back_is_refused_by_name(value: Any, name: str) -> None:
    """Subclasses and foreign types are named, at any depth, and never turn into something similar."""
    with pytest.raises(UnencodableValueError, match=name):
        encode_value(value, "value")
    with pytest.raises(UnencodableValueError, match=name):
        check_batch_encodable({"column": [[{"key": (value,)}]]})


def test_refusal_names_column_row_and_place() -> None:
    """The user learns where in the dataset the value stands."""
    column = objects("a", "b", "c", {"frames": [None, Point(1, 2)]})
    for act in (encode_batch, check_batch_encodable):
        with pytest.raises(UnencodableValueError) as caught:
            act({"prompt": objects("p"), "image": column})
        assert str(caught.value).startswith("column 'image', row 3, at ['frames'][1]: ")
        assert "Point cannot be saved exactly" in str(caught.value)


def test_refusal_names_an_image_as_its_library_does() -> None:
    """The usual case: a dataset of decoded images."""
    image_module = pytest.importorskip("PIL.Image")
    column = objects("a", image_module.new("RGB", (2, 2)))
    with pytest.raises(UnencodableValueError, match=r"column 'image', row 1: PIL\.Image\.Image cannot be saved"):
        check_batch_encodable({"image": column})
    with pytest.raises(UnencodableValueError, match=r"column 'image', row 1: PIL\.Image\.Image cannot be saved"):
        check_batch_encodable({"image": list(column)})


def test_refusal_names_a_whole_column_without_rows() -> None:
    """A tensor or a plain array is refused as a column."""
    with pytest.raises(UnencodableValueError, match=r"column 'x': torch\.Tensor \(torch\.sparse_coo"):
        check_batch_encodable({"x": torch.ones(2, 2).to_sparse()})
    with pytest.raises(UnencodableValueError, match="column 1: int"):
        check_batch_encodable({1: []})


def test_check_copies_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check on the first batch costs no memory for what it only looks at."""

    def forbidden(*_: Any) -> Any:
        raise AssertionError("copied")

    for name in ("pack_tensor", "pack_array"):
        monkeypatch.setattr(codec, name, forbidden)
    check_batch_encodable(sample_batch())
    with pytest.raises(AssertionError, match="copied"):
        encode_batch({"x": torch.ones(1)})


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "tuple": lambda value: (value,),
    "keys": lambda value: {0: value},
    "array": lambda value: objects(value),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_depth_is_bounded(wrap: Any) -> None:
    """The allowed depth comes back through the file; one more, and thousands more, are refused."""
    allowed = nested(MAX_DEPTH, wrap)
    assert_same(round_trip(allowed), allowed)
    for depth in (MAX_DEPTH + 1, 900):
        with pytest.raises(UnencodableValueError, match="deep"):
            encode_value(nested(depth, wrap), "value")


def test_value_that_contains_itself_is_refused() -> None:
    """A cycle is an error with a name, not a RecursionError."""
    items: list[Any] = []
    items.append(items)
    mapping: dict[str, Any] = {}
    mapping["self"] = (mapping,)
    array = objects(None)
    array[0] = array
    for value in (items, mapping, array):
        with pytest.raises(UnencodableValueError, match="contains itself"):
            encode_value(value, "value")
        with pytest.raises(UnencodableValueError, match=r"column 'x', row 0.*contains itself"):
            check_batch_encodable({"x": [value]})
    array[0] = None


def test_dtype_is_written_alike_by_numpy_1_and_2() -> None:
    """Array interface strings with explicit byte order; names such as `bool_` or `str0` differ by version."""
    written = {
        np.dtype(bool): "|b1",
        np.dtype(np.int64): "<i8",
        np.dtype(">u2"): ">u2",
        np.dtype(np.float16): "<f2",
        np.dtype("datetime64[ns]"): "<M8[ns]",
        np.dtype("timedelta64[15m]"): "<m8[15m]",
        np.dtype("U5"): "<U5",
        np.dtype("S3"): "|S3",
        np.dtype("V3"): "|V3",
        np.dtype([("a", "<i4"), ("b", "<f8", (2,))]): [["a", "<i4"], ["b", "<f8", [2]]],
    }
    for dtype, plain in written.items():
        assert codec_arrays.pack_dtype(dtype) == plain
        assert codec_arrays.unpack_dtype(plain) == dtype


@pytest.mark.parametrize(
    "plain",
    [
        {TAG: "unheard of"},
        {TAG: ["list"]},
        {TAG: "tuple"},
        {TAG: "array", "dtype": "|O", "shape": [1], "order": "C", "data": b"12345678"},
        {TAG: "array", "dtype": "<f4", "shape": [2**40], "order": "C", "data": b"1234"},
        {TAG: "array", "dtype": "<f4", "shape": [1], "order": "C", "data": b"12345678"},
        {TAG: "array", "dtype": "<f4", "shape": [-1], "order": "C", "data": b"1234"},
        {TAG: "array", "dtype": "<f4", "shape": [1.0], "order": "C", "data": b"1234"},
        {TAG: "array", "dtype": "<f4", "shape": [1], "order": "X", "data": b"1234"},
        {TAG: "array", "dtype": "nonsense", "shape": [1], "order": "C", "data": b"1234"},
        {TAG: "array", "dtype": [["a"]], "shape": [1], "order": "C", "data": b"1234"},
        {TAG: "array", "dtype": "<f4", "shape": [1], "order": "C", "data": "1234"},
        {TAG: "object_array", "shape": [3], "order": "C", "items": [1]},
        {TAG: "object_array", "shape": [2**40, 2**40], "order": "C", "items": [1]},
        {TAG: "numbers", "dtype": "|O", "data": b"12345678"},
        {TAG: "numbers", "dtype": "<i8", "data": b"123"},
        {TAG: "tensor", "dtype": "nn", "shape": [1], "data": b"1"},
        {TAG: "tensor", "dtype": "float8_e5m2", "shape": [2**50], "data": b"1"},
        {TAG: "int", "hex": "zz"},
        {TAG: "datetime", "parts": [2024, 13, 1, 0, 0, 0, 0, 0], "zone": None},
        {TAG: "Decimal", "text": "one"},
        {TAG: "scalar", "dtype": "<f4", "data": None},
        {TAG: "shared", "digest": "missing"},
        {TAG: "set", "items": [[]]},
        {"a": [{TAG: "dict", "items": [[1]]}]},
        torch.ones(1).expand(2**40),
    ],
    ids=lambda plain: repr(plain)[:60] if isinstance(plain, dict) else "expanded tensor",
)
def test_encoding_that_makes_no_sense_is_an_error(plain: Any) -> None:
    """A made-up payload ends in a plain error, and takes no memory for sizes it only declares."""
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, ArithmeticError)):
        decode_value(plain)


def test_deep_payload_is_an_error() -> None:
    """A payload nested deeper than any encoder writes does not crash the process."""
    with pytest.raises(RecursionError):
        decode_value(nested(100_000, lambda value: [value]))


KEYS = st.one_of(st.text(max_size=3), st.integers(-5, 5), st.booleans(), st.none(), st.just(TAG), st.binary(max_size=2))
DTYPES = st.one_of(
    hnp.scalar_dtypes().filter(lambda dtype: dtype.char not in "gG"),
    hnp.byte_string_dtypes(max_len=4),
    hnp.unicode_string_dtypes(max_len=3),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.datetimes(timezones=st.sampled_from([None, dt.timezone.utc])),
    st.timedeltas(),
    st.decimals(),
    ARRAYS,
    DTYPES.flatmap(hnp.from_dtype),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3).map(lambda items: objects(*items)),
        st.lists(inner, min_size=4, max_size=4).map(lambda items: objects(*items).reshape(2, 2)),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_any_nested_value_comes_back_exactly(value: Any) -> None:
    """Property: whatever a dataset row holds survives the file."""
    assert_same(round_trip(value), value)


COLUMNS = st.one_of(
    ARRAYS.filter(lambda array: array.ndim > 0),
    st.lists(VALUES, max_size=3),
    st.lists(VALUES, max_size=3).map(lambda items: objects(*items)),
    st.lists(st.floats(width=32), max_size=4).map(torch.tensor),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), COLUMNS, max_size=4))
def test_any_batch_comes_back_exactly(batch: dict[str, Any]) -> None:
    """Property: each column of a loader batch survives, whatever its name."""
    check_batch_encodable(batch)
    plain = through_file(encode_batch(batch))
    assert_same({name: decode_value(column) for name, column in plain.items()}, batch)


def test_batch_of_every_kind_comes_back_exactly() -> None:
    """Ragged, missing, empty, dated, half precision and nested columns."""
    batch = sample_batch()
    plain = encode_batch(batch)
    assert_plain(plain)
    assert_same({name: decode_value(column) for name, column in through_file(plain).items()}, batch)


def test_joined_rows_equal_the_uninterrupted_ones() -> None:
    """A tail that was restored joins the next batch as the original would have."""
    batch = {name: column for name, column in sample_batch().items() if isinstance(column, np.ndarray)}
    restored = {name: decode_value(column) for name, column in through_file(encode_batch(batch)).items()}
    for name, column in batch.items():
        joined, wanted = (np.concatenate([part, column]) for part in (restored[name], column))
        assert_same(joined, wanted, name)
