"""One reader of small JSON files: what a dataclass declares is what a file may hold."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from agl_async_ckpt.exceptions import DamagedStateError, UnsupportedVersionError
from agl_async_ckpt.storage.small_json import Bounds, Count, Format, build, parse_object, read_json


@dataclass(frozen=True)
class Sample:
    """A field of each kind."""

    flag: bool
    number: float
    text: Annotated[str, Bounds(1, 5)]
    colour: Literal["red", "blue"]
    names: tuple[str, ...]
    pairs: tuple[tuple[Count, float], ...]
    sizes: Mapping[str, Count]
    maybe: tuple[str, ...] | None = None


GOOD = {
    **{"flag": True, "number": 1, "text": "abc", "colour": "red", "names": ["a", "b"]},
    **{"pairs": [[1, 2], [3, 0.5]], "sizes": {"a": 0}, "maybe": ["x"]},
}
SAMPLE = Sample(True, 1.0, "abc", "red", ("a", "b"), ((1, 2.0), (3, 0.5)), {"a": 0}, ("x",))
KIND = Format("a sample", 2)


def test_object_comes_back_as_declared() -> None:
    """Lists as tuples, whole numbers as float where that is declared; what is not declared is ignored."""
    found = build(Sample, {**GOOD, "novelty": [1]})
    assert found == SAMPLE
    assert type(found.number) is float
    assert build(Sample, {**GOOD, "maybe": None}).maybe is None
    assert build(Sample, {name: value for name, value in GOOD.items() if name != "maybe"}).maybe is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("flag", 1, "bool"), ("number", True, "float"), ("number", "1", "float"), ("number", 1e999, "float")),
        *(("text", "", "str from 1 to 5"), ("text", "abcdef", "str from 1 to 5"), ("text", None, "str from 1 to 5")),
        *(("colour", "green", "red or blue"), ("colour", ["red"], "red or blue"), ("names", "ab", "a list of str")),
        *(("names", ["a", 1], "a list of str"), ("names", {"a": 1}, "a list of str"), ("pairs", [[1]], "a list of a")),
        *(("pairs", [[-1, 2]], "a list of a list"), ("pairs", [[1.0, 2]], "a list of"), ("pairs", [1, 2], "a list of")),
        *(
            ("sizes", {"a": -1}, "an object of str, int"),
            ("sizes", [], "an object"),
            ("sizes", {"a": True}, "an object"),
        ),
        *(("maybe", "x", "a list of str or null"), ("maybe", [1], "a list of str or null")),
    ],
    ids=str,
)
def test_field_that_is_not_as_declared_is_named(name: str, value: Any, said: str) -> None:
    """Types are exact, down into lists and objects."""
    with pytest.raises(ValueError, match=f"^{name} must be {said}.*, got "):
        build(Sample, {**GOOD, name: value})


@pytest.mark.parametrize("name", [name for name in GOOD if name != "maybe"])
def test_field_that_is_missing_is_named(name: str) -> None:
    """Only one with a default may be."""
    with pytest.raises(ValueError, match=f"^{name} is missing$"):
        build(Sample, {key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '"a"', "[" * 100_000, '{"a": NaN}', '{"a": -Infinity}', '{"a": 1, "a": 1}'),
        *('{"a": 1' + "0" * 30 + "}", '{"a": {"b": 1, "b": 2}}', b"\xff"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_text_that_is_no_plain_object_is_refused(text: str | bytes) -> None:
    """With a ValueError and nothing else."""
    with pytest.raises(ValueError, match=r".+"):
        parse_object(text)


def test_file_is_named_with_its_field(tmp_path: Path) -> None:
    """A missing one is None; a longer one, a FIFO and a folder are damage."""
    path = tmp_path / "sample.json"
    assert read_json(path, Sample, 1000) is None
    assert read_json(path / "below", Sample, 1000) is None
    path.write_text(json.dumps(GOOD))
    assert read_json(path, Sample, 1000) == SAMPLE
    with pytest.raises(DamagedStateError, match="longer than 20 bytes"):
        read_json(path, Sample, 20)
    path.write_text(json.dumps({**GOOD, "flag": 1}))
    with pytest.raises(DamagedStateError) as caught:
        read_json(path, Sample, 1000, act="Restore it.")
    assert (caught.value.fact, caught.value.act) == (
        f"{path} cannot be read: flag must be bool, got '1'.",
        "Restore it.",
    )
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedStateError, match="not a regular file"):
        read_json(path, Sample, 1000)


def test_file_of_another_format_or_version_is_refused(tmp_path: Path) -> None:
    """Before its fields are looked at: another version may have others."""
    path = tmp_path / "sample.json"
    named = {"format": "a sample", "format_version": 2}
    path.write_text(json.dumps({**named, **GOOD}))
    assert read_json(path, Sample, 1000, kind=KIND) == SAMPLE
    for version in (1, 3):
        path.write_text(json.dumps({**named, "format_version": version}))
        with pytest.raises(UnsupportedVersionError, match=f"{path} is of format version {version};.* version 2"):
            read_json(path, Sample, 1000, kind=KIND)
    for changes in ({"format": "another"}, {"format_version": 0}, {"format_version": True}, {"format_version": "2"}):
        path.write_text(json.dumps({**named, **GOOD, **changes}))
        with pytest.raises(DamagedStateError, match="format"):
            read_json(path, Sample, 1000, kind=KIND)
