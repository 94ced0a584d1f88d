"""However an input state file is altered, it is one named error before anything is unpickled, or the very same file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_async_ckpt.exceptions import DamagedStateError, ForeignFormatError
from agl_async_ckpt.folder.steps import inspect_step
from agl_async_ckpt.storage.commit import commit_state, load_state
from agl_async_ckpt.storage.layout import FILE_NAME
from tests.faults.figures import Count
from tests.golden.sample import assert_same, sample_state, small_state

NUM_EDITS = 6000
SEED = 6


@pytest.fixture
def step_dir(memory_dir: Path, request: pytest.FixtureRequest) -> Path:
    """A step folder, in memory if there is some."""
    folder = memory_dir / request.node.name / "global_step_3"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever unpickles fails the test, and no error of a reader hides it."""

    def forbidden(*_: Any, **__: Any) -> Any:
        pytest.fail("a damaged file was unpickled")

    monkeypatch.setattr(torch, "load", forbidden)


def bit_flips(whole: bytes) -> Iterator[bytes]:
    """Each bit of the file, alone."""
    for at in range(len(whole)):
        for bit in range(8):
            yield whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]


def truncations(whole: bytes) -> Iterator[bytes]:
    """Every length."""
    for length in range(len(whole)):
        yield whole[:length]


def _insert(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.choice((1, 2, 16, 300))) + data[at:]


def _delete(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.choice((1, 2, 16, 300)) :]


def _swap(draw: random.Random, data: bytes) -> bytes:
    size = draw.choice((1, 8, 64, 512))
    first, second = sorted(draw.randrange(len(data)) for _ in range(2))
    a, b = data[first : first + size], data[second : second + size]
    if first + size > second:
        return data
    return data[:first] + b + data[first + size : second] + a + data[second + size :]


def _zero(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    size = min(draw.choice((1, 64, 512, 4096)), len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


def _copy(draw: random.Random, data: bytes) -> bytes:
    """A block where another one belongs: a lost or misdirected write."""
    size = draw.choice((16, 64, 512))
    source, target = (draw.randrange(len(data)) for _ in range(2))
    block = data[source : source + size]
    return data[:target] + block + data[target + len(block) :]


def _append(draw: random.Random, data: bytes) -> bytes:
    return data + draw.choice((draw.randbytes(draw.randrange(1, 100)), data, bytes(4096), b"\n"))


def _overwrite(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    block = draw.randbytes(draw.choice((1, 4, 32)))
    return data[:at] + block + data[at + len(block) :]


EDITS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_insert, _delete, _swap, _zero, _copy, _append, _overwrite),
)


def random_edits(whole: bytes) -> Iterator[bytes]:
    """One to three edits of any kind."""
    draw = random.Random(SEED)
    for _ in range(NUM_EDITS):
        data = whole
        for _ in range(draw.choice((1, 1, 2, 3))):
            data = draw.choice(EDITS)(draw, data) or b"\0"
        yield data


def assert_refused(
    altered: Iterator[bytes], whole: bytes, step_dir: Path, foreign: tuple[type[Exception], ...] = (ForeignFormatError,)
) -> int:
    """Each altered file is damage with its path, to a resume and to a listing; returns how many there were."""
    path = step_dir / FILE_NAME
    number = 0
    for data in altered:
        if data == whole:
            continue
        path.write_bytes(data)
        number += 1
        # With the trailer gone and the zip whole it may be anybody's; cut or flipped it never passes for that.
        with pytest.raises((DamagedStateError, *foreign)) as caught:
            load_state(step_dir)
        assert str(path) in str(caught.value)
        if number % 8 == 0:
            info = inspect_step(step_dir, 3)
            assert info.has_state
            assert not info.complete
            assert str(path) in info.problems[0]
    return number


@pytest.mark.timeout(900)
@pytest.mark.parametrize("alter", [bit_flips, truncations, random_edits])
def test_altered_file_is_one_named_error_before_anything_is_unpickled(
    step_dir: Path, no_unpickling: None, count: Count, alter: Callable[[bytes], Iterator[bytes]]
) -> None:
    """Every single bit of a small file, every length, and thousands of edits by block."""
    whole = commit_state(small_state(), step_dir).read_bytes()
    foreign = (ForeignFormatError,) if alter is random_edits else ()
    count("corruptions", assert_refused(alter(whole), whole, step_dir, foreign))


@pytest.mark.timeout(900)
def test_altered_file_with_every_kind_of_value_is_refused(step_dir: Path, no_unpickling: None, count: Count) -> None:
    """The same edits on a file with tensors, in-flight rollouts and compressed events."""
    whole = commit_state(sample_state(), step_dir).read_bytes()
    count("corruptions", assert_refused(random_edits(whole), whole, step_dir))


def test_edits_that_give_the_same_bytes_give_the_same_state(step_dir: Path) -> None:
    """Written again, moved away and back, or copied: only the bytes count."""
    path = commit_state(sample_state(), step_dir)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    path.unlink()
    path.write_bytes(whole)
    assert_same(load_state(step_dir), sample_state())
