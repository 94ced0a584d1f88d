"""Files that would run code, read elsewhere or take memory when they are loaded: all refused, and nothing happens."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_async_ckpt.codec.input_state import encode_state
from agl_async_ckpt.codec.packed_json import pack_tree, unpack_tree
from agl_async_ckpt.exceptions import AsyncCheckpointError, StateFormatError
from agl_async_ckpt.folder.seal import write_seal
from agl_async_ckpt.folder.steps import inspect_step, list_steps
from agl_async_ckpt.storage import commit, writer
from agl_async_ckpt.storage.commit import load_state
from agl_async_ckpt.storage.container import verify
from agl_async_ckpt.storage.layout import FILE_NAME, LOCK_FILE_NAME
from tests.faults.figures import Count
from tests.golden.sample import sample_state, small_state
from tests.rig.life import run_life
from tests.rig.runs import settings
from tests.rig.server import AglServer

BOOKKEEPING = {LOCK_FILE_NAME}
"""Files of the output folder that a refused start may write."""

CANARY = "AGL_CANARY"
"""Environment variable with the path that a hostile file would create."""
HUGE = 2**33
MEMORY_BYTES = 2 * 2**30
"""More than any load of these small files may take at a time."""


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


# --- pickles by hand, protocol 2 --------------------------------------------------------------------------------------


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def several(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + several(*arguments) + b"R"


def storage(num_elements: int, *, key: str = "0", kind: str = "ByteStorage", device: str = "cpu") -> bytes:
    return several(text("storage"), name("torch", kind), text(key), text(device), number(num_elements)) + b"Q"


def tensor(memory: bytes, offset: int, size: list[int], stride: list[int]) -> bytes:
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        *(memory, number(offset), several(*map(number, size)), several(*map(number, stride)), b"\x89"),
        call(name("collections", "OrderedDict")),
    )


def whole(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def python_calls() -> dict[str, Any]:
    """Objects whose pickles call something."""
    make = f"open(__import__('os').environ['{CANARY}'], 'w').close()"
    shell = f"touch ${CANARY}"
    import importlib
    import runpy
    import shutil
    import subprocess

    return {
        "os.system": Call(os.system, shell),
        "os.popen": Call(os.popen, shell),
        "os.mkdir": Call(os.mkdir, os.environ.get(CANARY, "")),
        "subprocess.run": Call(subprocess.run, ["touch", os.environ.get(CANARY, "")]),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", os.environ.get(CANARY, "")]),
        "eval": Call(eval, make),
        "exec": Call(exec, make),
        "open": Call(open, os.environ.get(CANARY, ""), "w"),
        "__import__": Call(__import__, "antigravity"),
        "import_module": Call(importlib.import_module, "this"),
        "getattr": Call(getattr, "x", "upper"),
        "compile": Call(compile, make, "x", "exec"),
        "exit": Call(sys.exit, 3),
        "os._exit": Call(os._exit, 3),
        "abort": Call(os.abort),
        "rmtree": Call(shutil.rmtree, "/nonexistent"),
        "run_path": Call(runpy.run_path, "/dev/null"),
        "nested": Call(eval, Call(str.format, "{}", Call(str, make))),
        "torch.load": Call(torch.load, "/dev/null"),
        "torch.hub": Call(torch.hub.load, "x/y", "z"),
        "pickle.loads": Call(pickle.loads, pickle.dumps(Call(eval, make), 2)),
        "in a list": [1, {"a": Call(os.system, shell)}],
        "as a key": {Call(os.system, shell): 1},
        "in our payload": {**encode_state(small_state()), "novelty": Call(os.system, shell)},
    }


def raw_pickles() -> dict[str, bytes]:
    """Pickles that no honest pickler writes, most of names that torch itself allows."""
    make = f"open(__import__('os').environ['{CANARY}'], 'w').close()"
    bomb = b"]" + b"".join(b"q" + bytes([i]) + b"]" + b"(" + (b"h" + bytes([i])) * 20 + b"e" for i in range(30))
    return {
        "bytearray": whole(call(name("builtins", "bytearray"), number(HUGE))),
        "Tensor of a size": whole(call(name("torch", "Tensor"), number(HUGE))),
        "UntypedStorage": whole(call(name("torch.storage", "UntypedStorage"), number(HUGE))),
        "codec": whole(call(name("_codecs", "encode"), text("x"), text("no_such_codec"))),
        "Counter": whole(call(name("collections", "Counter"), text("x" * 100))),
        "set": whole(call(name("builtins", "set"), text("ab"))),
        "parameter": whole(call(name("torch.nn.parameter", "Parameter"), tensor(storage(8), 0, [8], [1]))),
        "sparse": whole(call(name("torch._utils", "_rebuild_sparse_tensor"), b"N", b"N")),
        "wrapper": whole(
            call(name("torch._tensor", "_rebuild_from_type_v2"), name("torch", "Tensor"), b"N", b"N", b"N")
        ),
        "meta": whole(
            call(name("torch._utils", "_rebuild_meta_tensor_no_storage"), name("torch", "int8"), several(number(HUGE)))
        ),
        "storage larger than its record": whole(tensor(storage(HUGE), 0, [HUGE], [1])),
        "tensor behind its storage": whole(tensor(storage(8), 2**20, [8], [1])),
        "tensor larger than its storage": whole(tensor(storage(8), 0, [HUGE], [1])),
        "tensor of stride 0": whole(tensor(storage(8), 0, [HUGE], [0])),
        "negative offset": whole(tensor(storage(8), -8, [8], [1])),
        "negative stride": whole(tensor(storage(8), 0, [8], [-1])),
        "negative size": whole(tensor(storage(8), 0, [-8], [1])),
        "other element size": whole(tensor(storage(8, kind="DoubleStorage"), 0, [8], [1])),
        "record that is not there": whole(tensor(storage(8, key="1"), 0, [8], [1])),
        "record elsewhere": whole(tensor(storage(8, key="../../../../etc/passwd"), 0, [8], [1])),
        "record of an absolute path": whole(tensor(storage(8, key="/etc/passwd"), 0, [8], [1])),
        "other device": whole(tensor(storage(8, device="cuda:0"), 0, [8], [1])),
        "persistent id of another kind": whole(several(text("module"), text("os"), text("system")) + b"Q"),
        "one memory twice": whole(b"](" + tensor(storage(8), 0, [8], [1]) * 2 + b"e"),
        "lists of lists of one list": whole(bomb),
        "list in itself": whole(b"]q\0h\0a"),
        "global by protocol 4": b"\x80\x04" + text("os") + text("system") + b"\x93" + text("true") + b"\x85R.",
        "instance": whole(b"(" + text(make) + b"i__builtin__\neval\n"),
        "object": whole(b"(" + name("builtins", "eval") + text(make) + b"o"),
        "extension registry": whole(b"\x82\x01"),
        "new object": whole(name("builtins", "bytearray") + several(number(HUGE)) + b"\x81"),
        "build": whole(call(name("collections", "OrderedDict")) + b"}" + text("x") + b"Nsb"),
        "decimal int": whole(b"I" + b"9" * 50 + b"\n"),
        "string by repr": whole(b"S'x'\n"),
        "persistent id by text": whole(b"Pos\n"),
        "two pickles": whole(b"N") + whole(call(name("os", "system"), text("true"))),
        "no end": b"\x80\x02N",
        "text beyond the end": whole(b"X\xff\xff\xff\x7fx"),
        "deep": whole(b"]" * 100_000 + b"a" * 99_999),
        "marks": whole(b"(" * 100_000),
        "empty": b"",
        "noise": random.Random(1).randbytes(2000),
    }


def torch_zip(data: bytes, *, deflate: bool = False, **records: bytes) -> bytes:
    """A zip as torch writes it, around any pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", b"\1" * 8)
        for key, value in records.items():
            archive.writestr(key, value)
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


def with_trailer(zipped: bytes) -> bytes:
    """The zip under a trailer and a checksum that fit it."""
    path = Path(os.environ[CANARY]).with_name("with-trailer")
    with path.open("wb") as file, writer.TrailerWriter(file.fileno()) as sink:
        sink.write(zipped)
        sink.finish(lambda size: commit._make_trailer(small_state(), size))
    return path.read_bytes()


def payloads() -> dict[str, dict[str, Any]]:
    """Plain values, no code, that would take memory or time when they are decoded."""
    base = encode_state(sample_state())
    packed = zlib.compress(b"[" + b"0," * 30_000_000 + b"0]", 9)
    blob = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def events(size: Any) -> dict[str, Any]:
        changed = encode_state(sample_state())
        tree = unpack_tree(changed["carry_over"])
        rollouts = [rollout for group in tree for rollout in group["rollouts"]]
        finished = next(rollout["finished"] for rollout in rollouts if rollout["finished"])
        finished["raw_events"] = {"tuple": False, "size": size, "zlib": blob}
        return {**changed, "carry_over": pack_tree(tree)}

    def groups(text: bytes, *, size: Any = None, blobs: Any = ()) -> dict[str, Any]:
        content = torch.frombuffer(bytearray(zlib.compress(text, 9)), dtype=torch.uint8)
        packed = {"zlib": content, "size": len(text) if size is None else size, "blobs": blobs}
        return {**base, "carry_over": packed}

    return {
        "events of size -1": events(-1),
        "events of size 0": events(0),
        "events of a small size": events(1000),
        "events of a text size": events("1"),
        "groups of size -1": groups(b"[]", size=-1),
        "groups of a small size": groups(b"[" + b"0," * 30_000_000 + b"0]", size=1000),
        "groups nested without end": groups(b"[" * 1_000_000),
        "groups that are no list": groups(b"{}"),
        "groups that are no text": groups(b"[\xff]"),
        "blob in two places": groups(b'[{"$type":"blob","index":0},{"$type":"blob","index":0}]', blobs=[b"x"]),
        "blob in no place": groups(b"[]", blobs=[b"x"]),
        "blob that is not there": groups(b'[{"$type":"blob","index":1}]', blobs=[b"x"]),
        "blobs that are no list": groups(b"[]", blobs={"0": b"x"}),
        "array of any size": {**base, "loader_state": {"$type": "array", **array(shape=[HUGE], dtype="<f8")}},
        "array of large items": {**base, "loader_state": {"$type": "array", **array(shape=[1], dtype="|V2000000000")}},
        "array of objects": {**base, "loader_state": {"$type": "array", **array(shape=[1], dtype="|O")}},
        "zone elsewhere": {**base, "loader_state": time_in("../../../etc/passwd")},
        "zone of an absolute path": {**base, "loader_state": time_in("/etc/passwd")},
        "type that is none": {**base, "loader_state": {"$type": "os.system"}},
        "type that is a list": {**base, "loader_state": {"$type": ["tuple"]}},
        "shared value that is not there": {**base, "loader_state": {"$type": "shared", "digest": "x"}},
    }


def array(*, shape: list[int], dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "order": "C", "data": b"\1" * 8}


def time_in(zone: str) -> dict[str, Any]:
    return {"$type": "datetime", "parts": [2024, 1, 1, 0, 0, 0, 0, 0], "zone": zone}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path that exists as soon as any code of a file has run."""
    path = tmp_path / "canary"
    monkeypatch.setenv(CANARY, str(path))
    monkeypatch.setenv("BROWSER", "true")  # for `import antigravity`
    return path


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What a load may take on top of what the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused_everywhere(step_dir: Path, data: bytes, canary: Path, *, whole_file: bool = False) -> None:
    """By a listing, a full look, verify and a load: an error of ours, or a step that is not called complete."""
    path = step_dir / FILE_NAME
    path.write_bytes(data)
    before = sorted(step_dir.parent.rglob("*"))
    with pytest.raises(StateFormatError) as caught:
        load_state(step_dir)
    assert str(path) in str(caught.value)
    assert "weights_only=False" not in str(caught.value)
    list_steps(step_dir.parent)
    info = inspect_step(step_dir, 3)
    if not whole_file:  # a file that is whole and sound but for its pickle is judged when it is loaded
        assert not info.complete
        with pytest.raises(AsyncCheckpointError):
            verify(path)
    assert not canary.exists()
    assert sorted(step_dir.parent.rglob("*")) == before


@pytest.fixture
def step_dir(tmp_path: Path) -> Path:
    """An empty step folder."""
    folder = tmp_path / "out" / "global_step_3"
    folder.mkdir(parents=True)
    return folder


CHECKSUMMED = ("torch zip with a trailer", "compressed")


def wrappings() -> dict[str, Callable[[bytes], bytes]]:
    """How a pickle comes under our file name."""
    return {
        "raw": lambda data: data,
        "torch zip": torch_zip,
        "torch zip with a trailer": lambda data: with_trailer(torch_zip(data)),
        "compressed": lambda data: with_trailer(torch_zip(data, deflate=True)),
    }


@pytest.mark.parametrize("kind", ["os.system", "eval", "exec", "nested", "in a list", "pickle.loads"])
def test_canary_sings_when_a_hostile_pickle_is_loaded_by_pickle(canary: Path, kind: str) -> None:
    """The cases below are real: plain unpickling runs them."""
    pickle.loads(pickle.dumps(python_calls()[kind], 2))
    assert canary.exists()


@pytest.mark.parametrize("wrapping", wrappings())
@pytest.mark.usefixtures("little_memory")
def test_hostile_pickle_is_refused_without_side_effect(
    step_dir: Path, canary: Path, count: Count, wrapping: str
) -> None:
    """Calls, names that torch allows, storages that lie, endless lists: as a raw pickle, in a zip, under a checksum."""
    wrap = wrappings()[wrapping]
    pickles = {key: pickle.dumps(value, 2) for key, value in python_calls().items()} | raw_pickles()
    assert len(pickles) >= 50
    for key, data in pickles.items():
        try:
            refused_everywhere(
                step_dir, wrap(data), canary, whole_file="trailer" in wrapping or wrapping == "compressed"
            )
        except BaseException as error:
            error.add_note(f"pickle: {key}")
            raise
    count("hostile files", len(pickles))


@pytest.mark.usefixtures("little_memory")
def test_plain_values_that_declare_too_much_are_refused(step_dir: Path, canary: Path, count: Count) -> None:
    """Sizes are checked before memory is taken, names of zones and types before anything is opened."""
    values = payloads()
    for key, payload in values.items():
        content = io.BytesIO()
        torch.save(payload, content)
        path = step_dir / FILE_NAME
        state = sample_state()
        with path.open("wb") as file, writer.TrailerWriter(file.fileno()) as sink:
            sink.write(content.getvalue())
            sink.finish(lambda size, state=state: commit._make_trailer(state, size))
        try:
            refused_everywhere(step_dir, path.read_bytes(), canary, whole_file=True)
        except BaseException as error:
            error.add_note(f"payload: {key}")
            raise
    count("hostile files", len(values))


def _moved(zipped: bytes) -> bytes:
    """A second pickle in front, and a directory whose offsets fit only a reader that moves them."""
    hostile = torch_zip(whole(call(name("builtins", "bytearray"), number(HUGE))))
    return hostile[: hostile.index(b"PK\x01\x02")] + zipped


def archives() -> dict[str, bytes]:
    """Zips in which the loader could find something else than was looked at."""
    good = whole(b"N")
    bad = whole(call(name("builtins", "bytearray"), number(HUGE)))
    zipped = bytearray(torch_zip(good))
    directory = zipped.index(b"PK\x01\x02")
    overlapping = bytearray(zipped)
    struct.pack_into("<L", overlapping, overlapping.index(b"PK\x01\x02", directory + 4) + 42, 0)
    return {
        "second data.pkl": torch_zip(good, **{"archive/DATA.PKL": bad}),
        "data.pkl of another folder": torch_zip(good, **{"other/data.pkl": bad}),
        "data.pkl elsewhere": torch_zip(good, **{"../data.pkl": bad}),
        "moved": _moved(bytes(zipped)),
        "overlapping": bytes(overlapping),
        "bomb": torch_zip(good, deflate=True, **{"archive/data/1": bytes(50_000_000)}),
        "no data.pkl": torch_zip(good).replace(b"data.pkl", b"data.pkx"),
    }


@pytest.mark.usefixtures("little_memory")
def test_archive_that_shows_two_faces_is_refused(step_dir: Path, canary: Path, count: Count) -> None:
    """One data.pkl, in the first entry, nothing compressed, offsets as stated."""
    values = archives()
    for key, zipped in values.items():
        try:
            refused_everywhere(step_dir, with_trailer(zipped), canary, whole_file=True)
        except BaseException as error:
            error.add_note(f"archive: {key}")
            raise
    count("hostile files", len(values))


@pytest.mark.parametrize("wrapping", ["raw", "torch zip", "torch zip with a trailer"])
def test_start_refuses_a_hostile_file_and_changes_nothing(
    server: AglServer, tmp_path: Path, canary: Path, count: Count, wrapping: str
) -> None:
    """`_load_checkpoint` of the real trainer, automatic and by path: one error, no rollout, nothing on disk changed."""
    run = settings("14/4/6", shuffle=True)
    out_dir = tmp_path / "run"
    run_life(run, out_dir, server.url, stop_after_step=3)
    server.reset()
    path = out_dir / "global_step_3" / FILE_NAME
    by_path = replace(run, resume_mode="resume_path", resume_from_path=str(path.parent))
    values = {key: pickle.dumps(value, 2) for key, value in python_calls().items()}
    keys = ("os.system", "eval", "subprocess.run", "in our payload")
    for key in keys:
        path.write_bytes(wrappings()[wrapping](values[key]))
        if wrapping in CHECKSUMMED:
            write_seal(path.parent, use_critic=False, async_save=False)  # whoever forged it has sealed it too
        before = {item: item.read_bytes() for item in out_dir.rglob("*") if item.is_file()}
        for start in (run, by_path):
            with pytest.raises(AsyncCheckpointError, match="global_step_3"):
                run_life(start, out_dir, server.url)
        changed = {item.name for item in out_dir.rglob("*") if item.is_file() and before.get(item) != item.read_bytes()}
        assert changed <= BOOKKEEPING
        assert not canary.exists()
        assert not server.rollouts()
    count("hostile files", len(keys))
