"""Whatever bytes stand in the files that a start reads first, the readers answer or raise an error of the tree."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.folder.liveness import read_lives
from agl_async_ckpt.folder.run_identity import RUN_FILE_NAME, begin_life, read_run
from agl_async_ckpt.folder.seal import read_seal, write_seal
from agl_async_ckpt.folder.steps import TrackerProblem, read_tracker
from agl_async_ckpt.storage.container import read_trailer, verify
from agl_async_ckpt.storage.layout import ALIVE_FILE_NAME, FILE_NAME, SEAL_NAME, TRACKER_NAME
from tests.faults.figures import Count
from tests.folder.made import make_step
from tests.storage.made import write

SEED = 8
NUM_INPUTS = {
    FILE_NAME: 90_000,
    SEAL_NAME: 45_000,
    RUN_FILE_NAME: 35_000,
    TRACKER_NAME: 20_000,
    ALIVE_FILE_NAME: 10_000,
}
assert sum(NUM_INPUTS.values()) >= 200_000

MEMORY_FACTOR = 40
"""A JSON list of empty objects, 3 bytes each, becomes 72 bytes each; the decoder grows its list by an eighth."""
MEMORY_BASE_BYTES = 1024 * 1024

WORDS = (
    *(b"PK\x05\x06", b"PK\x03\x04", b"PK\x01\x02", b"\0" * 22, b'"sha256":"', b"agl-async-ckpt input state", b'"}'),
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 30, b"9" * 5000),
    *(b"\\ud800", b"\xff\xfe", b"\0", b"\n", b"global_step", b"../", b"/etc/passwd", b"[" * 3000, b'{"a":' * 3000),
)

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1.5, "", "x" * 3000, "\ud800"),
    *([], [1], {}, {"a": 1}, {"../x": 1}, {"/x": 1}, {"a\0b": 2}),
)
"""Values of the wrong type, range or content for most fields."""


def fuzzed(draw: random.Random, seeds: list[bytes], number: int) -> Iterator[bytes]:
    """Mutations of good files, mixtures of them, and noise."""
    for _ in range(number):
        kind = draw.random()
        if kind < 0.05:
            yield draw.randbytes(draw.choice((0, 1, 21, 22, 23, 100, 1000)))
            continue
        if kind < 0.1:
            yield b"".join(draw.choices(WORDS, k=draw.randrange(1, 12)))
            continue
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(len(data) + 1)
            # The ends matter most: that is where a trailer, a brace or a digit stands.
            if draw.random() < 0.3:
                at = max(0, len(data) - draw.randrange(600))
            size = draw.choice((0, 1, 1, 4, 30))
            data[at : at + size] = draw.choice((draw.choice(WORDS), draw.randbytes(size), bytes(size)))
        yield bytes(data)


def json_mutations(draw: random.Random, values: dict[str, Any]) -> bytes:
    """A good JSON object with a field of another type, gone, or twice as large."""
    changed = dict(values)
    key = draw.choice([*changed])
    if draw.random() < 0.2:
        del changed[key]
    else:
        changed[key] = draw.choice(WRONG)
    return json.dumps(changed).encode()


def error_of(reader: Callable[[], Any]) -> AsyncCheckpointError | None:
    """The error of the tree that a reader raises, if any; any other goes through."""
    try:
        reader()
    except AsyncCheckpointError as error:
        return error
    return None


class Target:
    """A file, good contents of it, and what reads it."""

    def __init__(self, path: Path, seeds: list[bytes], readers: list[Callable[[], Any]]) -> None:
        self.path, self.seeds, self.readers = path, seeds, readers

    def feed(self, data: bytes) -> None:
        """Write it and read it; anything but an answer or an error of the tree goes through."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, data)
        os.close(fd)
        for reader in self.readers:
            error = error_of(reader)
            assert error is None or str(self.path.parent) in str(error)


@pytest.fixture
def targets(memory_dir: Path, request: pytest.FixtureRequest) -> dict[str, Target]:
    """Each file of a finished save, in memory if there is some."""
    out_dir = memory_dir / request.node.name
    step_dir = make_step(out_dir, 7)
    write_seal(step_dir, use_critic=True, async_save=False)
    begin_life(out_dir)
    (out_dir / TRACKER_NAME).write_text("7")
    (out_dir / ALIVE_FILE_NAME).write_text(json.dumps({"run_id": "run", "lives": [[1.0, 2.0], [3, 4]]}))
    state = write(out_dir / "small.pt").read_bytes()
    draw = random.Random(SEED)

    def of_json(path: Path) -> list[bytes]:
        good = path.read_bytes()
        return [good, *(json_mutations(draw, json.loads(good)) for _ in range(300))]

    seal, run, alive = step_dir / SEAL_NAME, out_dir / RUN_FILE_NAME, out_dir / ALIVE_FILE_NAME
    state_file = step_dir / FILE_NAME
    return {
        FILE_NAME: Target(
            state_file, [state, state_file.read_bytes()], [lambda: read_trailer(state_file), lambda: verify(state_file)]
        ),
        SEAL_NAME: Target(seal, of_json(seal), [lambda: read_seal(step_dir)]),
        RUN_FILE_NAME: Target(run, of_json(run), [lambda: read_run(out_dir)]),
        TRACKER_NAME: Target(
            out_dir / TRACKER_NAME, [b"7", b"12\n", b"release", b"\0\0"], [lambda: read_tracker(out_dir)]
        ),
        ALIVE_FILE_NAME: Target(alive, of_json(alive), [lambda: read_lives(out_dir, "run")]),
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NUM_INPUTS)
def test_reader_answers_or_raises_an_error_of_the_tree(targets: dict[str, Target], count: Count, name: str) -> None:
    """No crash, no other error, for noise, mixtures and mutations of good files; errors name the folder."""
    target = targets[name]
    for number, data in enumerate(fuzzed(random.Random(SEED), target.seeds, NUM_INPUTS[name])):
        try:
            target.feed(data)
        except BaseException as error:
            error.add_note(f"input {number}: {data[:300]!r}")
            raise
    count("fuzzed inputs", NUM_INPUTS[name])


def greedy(size: int) -> dict[str, bytes]:
    """Files of about `size` bytes that take the most memory for it, or declare more than they hold."""

    def filled(item: bytes, begin: bytes = b"[", end: bytes = b"]") -> bytes:
        return begin + item * (size // len(item)) + item.rstrip(b",") + end

    end_record = b"PK\x05\x06" + bytes(8) + b"\xff" * 8
    return {
        "objects": filled(b"{},"),
        "lists": filled(b"[],"),
        "numbers": filled(b"1e9,"),
        "texts": filled(b'"ab",'),
        "nested lists": b"[" * size,
        "nested objects": b'{"a":' * (size // 5),
        "keys": b"{" + b",".join(b'"%x":{}' % number for number in range(size // 10)) + b"}",
        "long text": b'"' + b"x" * size + b'"',
        "wide text": b'"' + b"x" * size + "\U0001f600".encode() + b'"',
        "end records": b"PK\x05\x06" * (size // 4),
        "end record of a huge directory": bytes(size) + end_record + b"\0\0",
        "end record with the longest comment": bytes(size) + end_record + b"\xff\xff" + b'"sha256":"' * 6554,
        "comment of objects": bytes(size) + end_record + b"\xff\x3f" + (b'"sha256":"' + b"{}," * 5460)[:16383],
        "zeros": bytes(size),
    }


def peak_of(reader: Callable[[], Any]) -> tuple[int, AsyncCheckpointError | None]:
    """Most bytes that a reader has held at a time, and its error."""
    tracemalloc.start()
    try:
        error = error_of(reader)
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [20_000, 2_000_000])
def test_reader_takes_no_more_memory_than_a_small_multiple_of_the_file(
    targets: dict[str, Target], count: Count, size: int
) -> None:
    """Files made to be large in memory, or that say they are."""
    for name, target in targets.items():
        for kind, data in greedy(size).items():
            target.path.write_bytes(data)
            for reader in target.readers:
                peak, _ = peak_of(reader)
                allowed = MEMORY_FACTOR * len(data) + MEMORY_BASE_BYTES
                assert peak <= allowed, f"{name}, {kind}: {peak:,} bytes for a file of {len(data):,}"
        count("fuzzed inputs", len(greedy(size)))


def test_file_far_larger_than_any_is_refused_unread(targets: dict[str, Target]) -> None:
    """A sparse file of a terabyte in the place of each small file; of an input state only the end is read."""
    for name, target in targets.items():
        os.truncate(target.path, 2**40)
        peak, error = peak_of(target.readers[0])
        assert error is None or str(target.path) in str(error)
        assert peak < 64 * 1024 * 1024, f"{name}: {peak:,}"
    assert isinstance(read_tracker(targets[TRACKER_NAME].path.parent), TrackerProblem)


def test_fifo_in_the_place_of_a_file_does_not_block(targets: dict[str, Target]) -> None:
    """Nobody writes into it; a reader that waited would wait for ever."""
    for target in targets.values():
        target.path.unlink()
        os.mkfifo(target.path)
        for reader in target.readers:
            error = error_of(reader)
            assert error is None or str(target.path) in str(error)
