"""A save, and the load of what was saved, at several sizes of the tail, beside raw file calls and plain torch.

The tail is the end of a longer batch, as in training: a tensor whose storage is twice as large.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import Figure, told
from bench.timing import alternate, median, peak_memory

NAME = "saving"
TITLE = "save and load"

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """One size of the tail, and what is asked of it.

    Attributes:
        num_bytes: Of the tail.
        save_at_most: Against writing and syncing the same number of bytes.
        load_at_most: Against reading and hashing them; None if not judged.
        repeats: Rounds.
    """

    num_bytes: int
    save_at_most: float | None
    load_at_most: float | None
    repeats: int


SIZES = (
    Size(10_000, 2.0, None, 31),
    Size(1_000_000, 2.0, None, 31),
    Size(100_000_000, None, None, 7),
    Size(2**30, 1.15, 1.3, 5),
)
QUICK = (Size(10_000, 2.0, None, 2), Size(6_000_000, 1.15, 1.3, 2))


class Subject:
    """The same tail written and read in each way."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        import torch

        from agl_async_ckpt.state import Fingerprint, InputState

        num_rows = max(1, num_bytes // 8 // 1000)
        batch = torch.randint(0, 2**31, (2 * num_rows, num_bytes // 8 // num_rows), dtype=torch.int64)
        self.tail = batch[num_rows:]
        self.memory = memoryview(self.tail.numpy()).cast("B")
        self.step_dir = folder / "global_step_1"
        self.raw, self.plain = folder / "raw", folder / "plain.pt"
        self.state = InputState(1, 1, False, {"position": 1}, {"ids": self.tail}, (), None, Fingerprint(), "bench")

    def save(self) -> None:
        """Our save."""
        from agl_async_ckpt.storage.commit import commit_state

        commit_state(self.state, self.step_dir)

    def save_raw(self) -> None:
        """One write loop and one fsync."""
        fd = os.open(self.raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = self.memory
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def publish_raw(self) -> None:
        """The bytes published durably: temp file, fsync, rename, fsync of the folder."""
        from agl_async_ckpt.storage.files import publish, write_all

        publish(self.raw, lambda fd: write_all(fd, self.memory))

    def save_plain(self) -> None:
        """`torch.save` and fsync."""
        import torch

        with self.plain.open("wb") as file:
            torch.save({"ids": self.tail.clone()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> Any:
        """Our load: verified, then decoded."""
        from agl_async_ckpt.storage.commit import load_state

        return load_state(self.step_dir)

    def load_raw(self) -> Any:
        """Read into memory and hash."""
        with self.raw.open("rb", buffering=0) as file:
            parts = [file.read(min(len(self.memory), 2**30)) for _ in range(-(-len(self.memory) // 2**30))]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return parts, digest.digest()

    def load_plain(self) -> Any:
        """`torch.load`, which verifies nothing."""
        import torch

        return torch.load(self.plain, weights_only=True)

    def clean(self) -> None:
        """Forget earlier writes: every side writes a new file, and none pays for another's."""
        for path in (self.raw, self.plain, *self.step_dir.glob("*")):
            path.unlink(missing_ok=True)
        self.step_dir.mkdir(exist_ok=True)
        os.sync()


def measure(folder: Path, *, quick: bool = False) -> list[Figure]:
    """Measure; `quick` with tiny sizes, for the figures' form and not for their values."""
    figures: list[Figure] = []
    for size in QUICK if quick else SIZES:
        room = folder / str(size.num_bytes)
        room.mkdir(parents=True)
        subject = Subject(room, size.num_bytes)
        figures += _save_figures(subject, size)
        figures += _load_figures(subject, size)
        shutil.rmtree(room)
    return figures


def _save_figures(subject: Subject, size: Size) -> list[Figure]:
    sides: dict[str, Callable[[], Any]] = {
        "raw": subject.save_raw,
        "durable": subject.publish_raw,
        "plain": subject.save_plain,
        "ours": subject.save,
    }
    subject.clean()
    subject.save()
    seconds = {name: median(times) for name, times in _in_turns(sides, size.repeats, subject.clean).items()}
    cpu = {name: median(times) for name, times in _in_turns(sides, 3, subject.clean, cpu=True).items()}
    peak = peak_memory(subject.save)
    name = told(size.num_bytes, "bytes")
    return [
        Figure(
            NAME, f"save {name}", seconds["ours"] / seconds["raw"], "x", size.save_at_most, "raw write and one fsync"
        ),
        Figure(
            NAME,
            f"save {name} against a durable write",
            seconds["ours"] / seconds["durable"],
            "x",
            None,
            "temp file, fsync, rename, fsync of the folder",
        ),
        Figure(NAME, f"save {name} against torch.save", seconds["ours"] / seconds["plain"], "x", None, "and one fsync"),
        Figure(NAME, f"save {name}, time", seconds["ours"], "s", None, f"of that CPU {told(cpu['ours'], 's')}"),
        Figure(NAME, f"save {name}, memory beside the tail", float(peak), "bytes", 64.0 * MIB, "peak"),
    ]


def _load_figures(subject: Subject, size: Size) -> list[Figure]:
    subject.save_raw()
    subject.save_plain()
    sides: dict[str, Callable[[], Any]] = {
        "raw": subject.load_raw,
        "plain": subject.load_plain,
        "ours": subject.load,
    }
    seconds = {name: median(times) for name, times in _in_turns(sides, size.repeats).items()}
    name = told(size.num_bytes, "bytes")
    peak = peak_memory(subject.load)
    return [
        Figure(
            NAME,
            f"verify and load {name}",
            seconds["ours"] / seconds["raw"],
            "x",
            size.load_at_most,
            "raw read and SHA-256",
        ),
        Figure(
            NAME,
            f"verify and load {name} against torch.load",
            seconds["ours"] / seconds["plain"],
            "x",
            None,
            "which verifies nothing",
        ),
        Figure(NAME, f"verify and load {name}, time", seconds["ours"], "s", None, "from the page cache"),
        Figure(
            NAME,
            f"verify and load {name}, memory beside the result",
            float(peak - size.num_bytes),
            "bytes",
            64.0 * MIB,
            "peak",
        ),
    ]


def _in_turns(
    sides: dict[str, Callable[[], Any]], repeats: int, before: Callable[[], None] = lambda: None, *, cpu: bool = False
) -> dict[str, list[float]]:
    import time

    clock = time.process_time if cpu else time.perf_counter
    return alternate(sides, repeats=repeats, before=before, clock=clock)
