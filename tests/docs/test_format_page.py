"""docs/format.md is normative: it says what is in the golden files, what the code writes, and what it refuses."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import struct
import uuid
import zipfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from agl_async_ckpt import exceptions
from agl_async_ckpt.codec import arrays, decode
from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.codec.input_state import encode_state
from agl_async_ckpt.codec.packed_json import unpack_tree
from agl_async_ckpt.codec.values import encode_value
from agl_async_ckpt.folder.run_identity import RunIdentity
from agl_async_ckpt.folder.seal import Seal
from agl_async_ckpt.folder.stop_request import StopRequest
from agl_async_ckpt.ledger.entry import End, Gap, Start, Step
from agl_async_ckpt.state import Fingerprint, FinishedRollout, InFlightRollout, InputState, PromptGroup, RngState
from agl_async_ckpt.storage import layout, pickle_check, trailer
from agl_async_ckpt.storage.commit import commit_state, load_state
from tests.docs.format_reader import DECODERS, FACTORIES, STORAGES, read
from tests.docs.format_reader import decode as decode_by_page
from tests.docs.pages import DOCS, blocks, names, sections, table
from tests.golden.sample import NUMPY_1, NUMPY_2, assert_same, sample_state, small_state

PAGE = (DOCS / "format.md").read_text()
PARTS = sections("format.md")
REFUSALS = {int(row[0]): row[2] for row in table(PAGE, "step", "check", "otherwise")}
NEXT = FORMAT_VERSION + 1
ERRORS = {row[0]: names([row[1]])[0] for row in table(PAGE, "word", "error")}


def listed(text: str, *header: str) -> list[str]:
    """Names in the first column of a table."""
    return [name for row in table(text, *header) for name in names(row[:1])]


# --- what is in a file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [NUMPY_1, NUMPY_2], ids=lambda path: path.stem)
def test_reader_written_from_the_page_finds_the_values_of_a_golden_file(path: Path) -> None:
    """Every value, with its type, dtype, shape and order."""
    said, found = read(path)
    groups = [
        PromptGroup(
            group["data_id"],
            tuple(
                InFlightRollout(
                    part["enqueued"], part["request"], part["finished"] and FinishedRollout(**part["finished"])
                )
                for part in group["rollouts"]
            ),
        )
        for group in found["carry_over"]
    ]
    state = InputState(
        **{name: found[name] for name in ("global_step", "epoch", "exhausted", "loader_state", "buffered_batch")},
        **{name: found[name] for name in ("run_id", "parent_run_id", "written_by")},
        num_dropped_groups=found.get("num_dropped_groups", 0),
        carry_over=tuple(groups),
        rng_state=RngState(**found["rng_state"]),
        fingerprint=Fingerprint(**found["fingerprint"]),
    )
    assert_same(state, sample_state())
    assert said["counts"] == sample_state().counts
    assert {name: said[name] for name in ("global_step", "run_id")} == {"global_step": 3, "run_id": "run-1"}


def test_example_on_the_page_is_the_end_of_the_golden_file() -> None:
    """Byte by byte."""
    (shown,) = [block for block in blocks(DOCS / "format.md", "text") if block.code.startswith("50 4b")]
    record, text = shown.code.splitlines()
    data = NUMPY_1.read_bytes()
    assert data.endswith(bytes.fromhex(record) + text.encode())
    assert f"{NUMPY_1.name}`, {len(data)} bytes" in PAGE
    assert f"trailer of {len(text)} bytes (0x{len(text):04x})" in PAGE


def test_trailer_table_lists_the_fields_that_are_written() -> None:
    """In their order; the four counts too."""
    written = json.loads(trailer.Trailer(1, 0, 1, False, "run", None, {}, 0.0, {}, 22).to_bytes())
    assert listed(PARTS["Container"], "field", "value") == list(written)
    (counts,) = [row for row in table(PARTS["Container"], "field", "value") if row[0] == "`counts`"]
    assert set(names(counts[1:])) == trailer._COUNTS


def test_payload_table_lists_the_keys_that_are_written() -> None:
    """And those of a rollout."""
    payload = encode_state(sample_state())
    assert set(listed(PARTS["Payload"], "key", "value")) == set(payload)
    assert all(f'"{key}"' in PARTS["Payload"] for key in payload["carry_over"])
    rollout = unpack_tree(payload["carry_over"])[0]["rollouts"][1]
    for key in (*rollout, *rollout["finished"], *rollout["finished"]["raw_events"]):
        assert f'"{key}"' in PARTS["Payload"]


def test_encodings_of_the_page_are_those_of_the_code_and_of_the_reader() -> None:
    """Each tag, and no other."""
    tags = set(listed(PARTS["Encoded values"], "`$type`", "other keys", "comes back as"))
    assert tags == set(decode._DECODERS) == set(DECODERS)


@pytest.mark.parametrize(
    "value",
    [
        *(Counter("aab"), defaultdict(list, {1: [2]}), defaultdict(None, {}), deque([1], maxlen=2), range(9, 1, -2)),
        *(uuid.UUID(int=7), Path("a/b"), pd.NaT, pd.Timedelta(5, "ns")),
        *(pd.Timestamp(10**18 + 1), pd.Timestamp(year=2024, month=1, day=1, fold=1), pd.Timestamp("2024", tz="UTC")),
    ],
    ids=repr,
)
def test_reader_written_from_the_page_decodes(value: Any) -> None:
    """Encodings that no golden file holds."""
    found = decode_by_page(encode_value(value, "value"), {})
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_page_lists_the_factories_and_paths() -> None:
    """Those that the code makes; a system knows paths of its own kind alone."""
    assert set(FACTORIES) == set(decode.FACTORIES)
    (row,) = [
        row for row in table(PARTS["Encoded values"], "`$type`", "other keys", "comes back as") if row[0] == "`path`"
    ]
    assert set(decode.PATHS) <= set(names(row[1:2]))


def test_table_of_storages_lists_the_tensor_types_that_stand_for_themselves() -> None:
    """By the names that torch gives both."""
    assert {getattr(torch, name) for name in STORAGES.values()} == arrays._NATIVE_DTYPES
    for storage, dtype in STORAGES.items():
        content = io.BytesIO()
        torch.save(torch.zeros(1, dtype=getattr(torch, dtype)), content)
        assert f"ctorch\n{storage}\n".encode() in zipfile.ZipFile(content).read("archive/data.pkl")


def test_pickle_section_names_what_a_file_may_hold() -> None:
    """Instructions and names, as the check before the loader has them."""
    text = PARTS["Pickle"].partition("What `GLOBAL` names")[0]
    said = {name for name in names([text]) if name.isupper() or name[:-1].isupper()}
    assert said == pickle_check._INSTRUCTIONS
    globals_ = set(listed(PARTS["Pickle"], "name", "stands for")) - {"torch.<Type>Storage"}
    assert globals_ == {name.replace(" ", ".") for name in pickle_check._NAMES}


@pytest.mark.parametrize(
    ("part", "cls"),
    [("Seal", Seal), ("Run file", RunIdentity), ("Request to stop", StopRequest)],
    ids=["seal", "run_file", "stop"],
)
def test_table_of_another_file_lists_its_fields(part: str, cls: type) -> None:
    """The seal has its format and version beside them."""
    extra = {"format", "format_version"} if cls is Seal else set()
    assert set(listed(PARTS[part], "field", "value")) == set(cls.__annotations__) | extra


def test_ledger_table_lists_events_and_keys() -> None:
    """Every key of every event; the common ones stand before the table."""
    rows = table(PARTS["Ledger"], "`event`", "other keys")
    common = {"run_id", "life", "time"}
    assert [names(row[:1])[0] for row in rows] == ["start", "step", "gap", "end"]
    for row, cls in zip(rows, (Start, Step, Gap, End), strict=True):
        missing = set(cls.__annotations__) - common - {*names(row[:1]), *names(row[1:])}
        assert not missing, f"{cls.__name__}: {missing}"
    assert all(f"`{name}`" in PARTS["Ledger"].partition("| `event`")[0] for name in common)


def test_page_names_every_file_that_the_extension_writes() -> None:
    """As layout.py has them."""
    own = {name for name in vars(layout).values() if str(name).startswith("agentlightning_")}
    found = set(re.findall(r"agentlightning_\w+\.\w+", PAGE))
    assert found == own


# --- what is refused ------------------------------------------------------------------------------------------------


def sealed(zip_bytes: bytes, fields: dict[str, Any] | bytes) -> bytes:
    """Put a trailer behind a zip, with the digest that the page asks for."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields, separators=(",", ":")).encode()
    data = zip_bytes[:-2] + struct.pack("<H", len(text)) + text
    blanked = data[:-66] + b"0" * 64 + b'"}'
    return data[:-66] + hashlib.sha256(blanked).hexdigest().encode() + b'"}'


def parts_of(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """The zip of a sound file, with no comment, and its trailer."""
    at = data.rfind(b"PK\x05\x06") + 22
    return data[: at - 2] + b"\0\0", json.loads(data[at:])


def with_fields(**changes: Any) -> Callable[[bytes], bytes]:
    """Change fields of the trailer; None for one to be left out."""

    def change(data: bytes) -> bytes:
        zip_bytes, fields = parts_of(data)
        fields = {name: value for name, value in {**fields, **changes}.items() if value is not ...}
        return sealed(zip_bytes, {**fields, "sha256": fields.pop("sha256")})

    return change


def with_text(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Change the text of the trailer."""

    def change(data: bytes) -> bytes:
        zip_bytes, fields = parts_of(data)
        return sealed(zip_bytes, json.dumps(fields, separators=(",", ":")).encode().replace(old, new))

    return change


def with_zip(change: Callable[[zipfile.ZipFile, dict[str, bytes]], None]) -> Callable[[bytes], bytes]:
    """Write the zip anew."""

    def write(data: bytes) -> bytes:
        _, fields = parts_of(data)
        content = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(content, "w") as new:
            change(new, {name: old.read(name) for name in old.namelist()})
        zip_bytes = content.getvalue()
        return sealed(zip_bytes, {**fields, "num_zip_bytes": len(zip_bytes), "sha256": fields.pop("sha256")})

    return write


def with_pickle(content: bytes) -> Callable[[bytes], bytes]:
    """Put another pickle into the zip."""

    def change(new: zipfile.ZipFile, entries: dict[str, bytes]) -> None:
        for name, data in entries.items():
            new.writestr(name, content if name.endswith("/data.pkl") else data)

    return with_zip(change)


def _compressed(new: zipfile.ZipFile, entries: dict[str, bytes]) -> None:
    for name, data in entries.items():
        new.writestr(name, data, compress_type=zipfile.ZIP_DEFLATED)


def _twice(new: zipfile.ZipFile, entries: dict[str, bytes]) -> None:
    for name, data in entries.items():
        new.writestr(name, data)
    new.writestr("ARCHIVE/DATA.PKL", b"")


def _not_first(new: zipfile.ZipFile, entries: dict[str, bytes]) -> None:
    for name, data in reversed(entries.items()):
        new.writestr(name, data)


def _payload(**changes: Any) -> Callable[[bytes], bytes]:
    content = io.BytesIO()
    torch.save({**encode_state(small_state()), **changes}, content)
    return lambda data: sealed(
        content.getvalue(),
        {**(fields := parts_of(data)[1]), "num_zip_bytes": len(content.getvalue()), "sha256": fields["sha256"]},
    )


SHARED_LIST: list[Any] = []
PROTOCOL = b"\x80\x02"

MALFORMED: list[tuple[int, str, str, Callable[[bytes], bytes | None]]] = [
    (1, "not found", "There is no", lambda _: None),
    (2, "damaged", "it is empty", lambda _: b""),
    (3, "damaged", "no end record", lambda data: data[:-1]),
    (3, "damaged", "no end record", lambda data: data + b"\0"),
    (4, "foreign", "another format", lambda data: parts_of(data)[0]),
    (4, "damaged", "no whole torch file", lambda data: data[:40] + parts_of(data)[0][60:]),
    (5, "damaged", "16384 are allowed", with_fields(more="x" * 16384)),
    (6, "damaged", "does not match its checksum", lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:]),
    (7, "damaged", "names another format", with_fields(format="agl-async-ckpt seal")),
    (7, "damaged", "no JSON", with_text(b'{"format"', b'["format"')),
    (7, "damaged", "a key stands twice", with_text(b'"epoch"', b'"epoch":1,"epoch"')),
    (7, "damaged", "NaN is not allowed", with_fields(saved_at=float("nan"))),
    (7, "damaged", "a number is too long", with_text(b'"epoch":1', b'"epoch":100000000000000000001')),
    (8, "unsupported", f"of format version {NEXT}", with_fields(format_version=NEXT)),
    (8, "unsupported", f"of format version {NEXT}", with_fields(format_version=NEXT, num_zip_bytes=22)),
    (9, "damaged", "epoch must be", with_fields(epoch=0)),
    (9, "damaged", "global_step must be", with_fields(global_step=True)),
    (9, "damaged", "run_id is missing", with_fields(run_id=...)),
    (9, "damaged", "from 0 to 1024", with_fields(run_id="x" * 1025)),
    (9, "damaged", "counts must have", with_fields(counts={"num_buffered_inputs": 1})),
    (9, "damaged", "which says 22", with_fields(num_zip_bytes=22)),
    (9, "damaged", "digest is not its last", with_text(b',"sha256":"', b',"sha256":"0","sha257":"')),
    (10, "damaged", "compressed entry", with_zip(_compressed)),
    (10, "damaged", "two entries of one name", with_zip(_twice)),
    (10, "damaged", "not its first entry", with_zip(_not_first)),
    (11, "damaged", "GLOBAL __builtin__.print", with_pickle(pickle.dumps(print, protocol=2))),
    (11, "damaged", "pickle instruction", with_pickle(PROTOCOL + b"\x8e" + b"\0" * 8 + b".")),
    (11, "damaged", "behind the end of the pickle", with_pickle(PROTOCOL + b"}..")),
    (12, "damaged", "stands in two places", _payload(loader_state={"a": SHARED_LIST, "b": SHARED_LIST})),
    (13, "damaged", "cannot be decoded", _payload(loader_state={"$type": "unknown"})),
    (13, "damaged", "content disagree", _payload(epoch=2)),
    (14, "mismatch", "another step", lambda data: data),
]
"""Step of the page's list, what it calls the outcome, what the error says, how to make it of a sound file of step 3."""


@pytest.mark.parametrize(
    ("step", "outcome", "reason", "spoil"),
    MALFORMED,
    ids=[f"{index}_step{row[0]}" for index, row in enumerate(MALFORMED)],
)
def test_malformed_file_is_refused_as_the_page_says(
    step: int, outcome: str, reason: str, spoil: Callable[[bytes], bytes | None], tmp_path: Path
) -> None:
    """With the error that the page names for the rule, and for that rule's reason."""
    assert outcome in REFUSALS[step]
    path = commit_state(small_state(3), tmp_path / "global_step_3")
    spoilt = spoil(path.read_bytes())
    path.unlink()
    if step == 14:
        path = tmp_path / "global_step_4" / path.name
        path.parent.mkdir()
    if spoilt is not None:
        path.write_bytes(spoilt)
    with pytest.raises(exceptions.AsyncCheckpointError, match=reason) as found:
        load_state(path)
    assert found.type.__name__ == ERRORS[outcome]


def test_every_rule_of_the_page_is_broken_by_a_file() -> None:
    """With each of its outcomes; and the words are those of the table of errors."""
    assert {step for step, *_ in MALFORMED} == set(REFUSALS)
    for step, text in REFUSALS.items():
        assert {word for word in ERRORS if re.search(rf"\b{word}\b", text)} == {
            outcome for number, outcome, *_ in MALFORMED if number == step
        }


def test_unspoilt_file_is_read() -> None:
    """What spoils a file above starts from a sound one: put together anew without a change, it loads."""
    data = NUMPY_1.read_bytes()
    zip_bytes, fields = parts_of(data)
    assert sealed(zip_bytes, fields) == data
