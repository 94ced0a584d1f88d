"""Data sets, collate functions and samplers of a user's: what the trainer alone trains of them is trained."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from agentlightning.verl.dataset import LoadedDataset
from verl.utils.dataset.rl_dataset import collate_fn

from agl_async_ckpt.agl import internals
from agl_async_ckpt.exceptions import StateMismatchError, UnencodableValueError
from tests.rig.life import Parts, build_trainer, close_trainer, run_life
from tests.rig.runs import settings
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings, dataset_rows
from tests.yardstick.scene import (
    Interruption,
    Scene,
    alone,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)


def assert_trains(scene: Scene, server: AglServer, folder: Path, *ends: Interruption) -> None:
    """With the extension, and killed after its first saves, the scene is that of the trainer alone."""
    truth = alone(scene, server, folder)
    assert_same(truth, extended(scene, server, folder))
    assert_resumed(truth, interrupted(scene, server, folder, *(ends or (Interruption("saved", 1),))))


class Rows(torch.utils.data.Dataset[Any]):
    """A data set of one's own around the rig's."""

    def __init__(self, dataset: Any, of: Callable[[dict[str, Any]], Any] = dict) -> None:
        self.dataset = dataset
        self.of = of

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.of(self.dataset[index])


def with_column(value: Callable[[int], Any]) -> Parts:
    """A data set with one more column, by the number of the row."""
    return Parts(dataset=lambda dataset: Rows(dataset, lambda row: {**row, "extra": value(row["index"])}))


# --- samplers -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Note:
    """What the format cannot carry."""

    text: str = ""


class Backwards(torch.utils.data.Sampler[int]):
    """Goes from the end to the beginning; its state holds more than its place."""

    def __init__(self, num_rows: int, extra: Callable[[int], Any]) -> None:
        self.num_rows = num_rows
        self.extra = extra
        self.done = 0

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        while self.done < self.num_rows:
            self.done += 1
            yield self.num_rows - self.done
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "extra": self.extra(self.done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        assert state["extra"] == self.extra(self.done)


def with_state(extra: Callable[[int], Any]) -> Parts:
    """A sampler with this in its state, by the rows that it has given."""
    return Parts(sampler=lambda _, dataset: Backwards(len(dataset), extra))


def test_sampler_state_of_the_standard_library_is_carried(server: AglServer, tmp_path: Path) -> None:
    """Counts, a window of the last rows, rows by kind."""

    def extra(done: int) -> Any:
        kinds = defaultdict(list, {kind: list(range(kind, done, 3)) for kind in range(3)})
        return [Counter(done=done), deque(range(done), maxlen=4), kinds, uuid.UUID(int=done)]

    assert_trains(Scene(settings("14/4/6", epochs=2), parts=with_state(extra)), server, tmp_path)


def test_sampler_state_that_cannot_be_carried_is_refused_at_the_start(server: AglServer, tmp_path: Path) -> None:
    """With its key, and before anything is created on the server."""
    parts = with_state(lambda _: {"notes": [Note()]})
    with pytest.raises(UnencodableValueError) as caught:
        run_life(settings("14/4/6"), tmp_path, server.url, parts=parts)
    text = str(caught.value)
    assert text.startswith("No checkpoint can hold what the sampler has: its state, at ['extra']['notes'][0]: ")
    assert "tests.yardstick.test_data.Note cannot be saved exactly" in text
    assert "agentlightning.async_checkpoint.enabled=false" in text
    assert not server.rollouts()


def test_sampler_state_that_changes_its_kind_is_refused_when_it_does(server: AglServer, tmp_path: Path) -> None:
    """At the pull, not at a save much later."""
    parts = with_state(lambda done: Note() if done > 8 else None)
    with pytest.raises(UnencodableValueError, match=r"what the loader has: its state, at .*\['extra'\]: .*Note"):
        run_life(settings("16/4/6", save_freq=4), tmp_path, server.url, parts=parts)


class Restless(Backwards):
    """Draws from every generator of the process whenever it is asked for its state."""

    def state_dict(self) -> dict[str, Any]:
        random.random()
        np.random.random()
        torch.rand(())
        if not self.done:
            raise RuntimeError("not begun")
        return super().state_dict()


def test_sampler_that_is_asked_at_the_start_leaves_the_generators_alone(server: AglServer, tmp_path: Path) -> None:
    """Also where its state ends in an error before the first pass; nothing is said of that."""
    before = internals.rng_state()
    parts = Parts(sampler=lambda _, dataset: Restless(len(dataset), lambda _: None))
    quiet_trainer = build_trainer(settings("14/4/6"), tmp_path, server.url, parts=parts)
    close_trainer(quiet_trainer)
    after = internals.rng_state()
    assert after.python == before.python
    assert all(np.array_equal(one, other) for one, other in zip(after.numpy, before.numpy, strict=True))
    assert torch.equal(after.torch, before.torch)


# --- values -------------------------------------------------------------------------------------------------------

VALUES: dict[str, Callable[[int], Any]] = {
    "uuid": lambda row: None if row < 6 else uuid.UUID(int=row),
    "path": lambda row: Path(f"data/{row}"),
    "nanoseconds": lambda row: pd.Timestamp(row + 10**18, unit="ns"),
    "zone": lambda row: pd.Timestamp("2024-01-01", tz="UTC") + pd.Timedelta(row, "ns"),
    "span": lambda row: pd.Timedelta(row, "ns"),
    "window": lambda row: deque(range(row), maxlen=3),
    "counts": lambda row: Counter(a=row),
}


@pytest.mark.parametrize("kind", VALUES)
def test_value_of_the_standard_library_or_pandas_is_carried(server: AglServer, tmp_path: Path, kind: str) -> None:
    """Buffered and in flight."""
    ends = (Interruption("saved", 1), Interruption("updated", 3))
    assert_trains(Scene(settings("16/4/6"), parts=with_column(VALUES[kind])), server, tmp_path, *ends)


def test_timestamp_column_of_a_stored_data_set_is_carried(server: AglServer, tmp_path: Path) -> None:
    """Arrow's nanoseconds arrive as times of pandas."""
    stored = LoadedDataset(dataset_rows(settings("16/4/6")))
    times = [None if number == 7 else 10**18 + number for number in range(16)]
    table = stored.dataframe.with_format("arrow")[:].append_column("at", pa.array(times, pa.timestamp("ns", "UTC")))
    stored.dataframe = datasets.Dataset(table)
    assert isinstance(stored[6]["at"], pd.Timestamp)
    assert_trains(Scene(settings("16/4/6"), parts=Parts(dataset=lambda _: stored)), server, tmp_path)


def test_value_that_cannot_be_carried_is_refused_when_it_is_pulled(server: AglServer, tmp_path: Path) -> None:
    """The first time that it stays buffered: by column, row and type, and with the way out."""
    parts = with_column(lambda row: None if row < 10 else Note(f"row {row}"))
    truth = alone(Scene(settings("16/4/6"), parts=parts), server, tmp_path)
    with pytest.raises(UnencodableValueError) as caught:
        run_life(settings("16/4/6", save_freq=4), tmp_path / "out", server.url, parts=parts)
    assert str(caught.value).startswith("No checkpoint can hold what step 2 leaves buffered: column 'extra', row 0: ")
    assert "Or train without exact checkpoints: agentlightning.async_checkpoint.enabled=false." in str(caught.value)
    assert max(truth.steps) > 2


def test_value_that_only_agents_see_is_carried_as_it_is_posted(server: AglServer, tmp_path: Path) -> None:
    """With A a multiple of B no row is ever buffered: what is in flight is JSON, whatever it was made from."""
    parts = with_column(lambda row: Note(f"row {row}"))
    ends = (Interruption("saved", 1), Interruption("saved", 3, server="restarted"))
    assert_trains(Scene(settings("16/4/8"), parts=parts), server, tmp_path, *ends)


# --- collate functions --------------------------------------------------------------------------------------------


def numbers(dtype: Any) -> Callable[[list[int]], Any]:
    return lambda rows: np.array(rows, dtype=dtype)


def days(unit: str) -> Callable[[list[int]], Any]:
    return lambda rows: np.array([f"2024-01-{row + 1:02}" for row in rows], dtype=f"M8[{unit}]")


def tensors(dtype: Any) -> Callable[[list[int]], Any]:
    return lambda rows: torch.tensor([[row + 0.1] for row in rows]).to(dtype)


def objects(rows: list[int]) -> Any:
    return np.array([dt.date(2024, 1, row + 1) for row in rows], dtype=object)


CHANGES: dict[str, tuple[Callable[[list[int]], Any], Callable[[list[int]], Any]]] = {
    "int, float": (numbers("i8"), numbers("f8")),
    "float, int": (numbers("f8"), numbers("i8")),
    "bool, int": (lambda rows: np.array([row % 2 > 0 for row in rows]), numbers("i8")),
    "int, bool": (numbers("i4"), lambda rows: np.array([True] * len(rows))),
    "short, long text": (
        lambda rows: np.array([str(row) for row in rows]),
        lambda rows: np.array(["long"] * len(rows)),
    ),
    "int, text": (numbers("i8"), lambda rows: np.array([f"row {row}" for row in rows])),
    "days, seconds": (days("D"), days("s")),
    "days, objects": (days("D"), objects),
    "large int, float32": (lambda rows: np.array([2**60 + row for row in rows]), numbers("f4")),
    "float32, float64 tensors": (tensors(torch.float32), tensors(torch.float64)),
    "int32, int64 tensors": (tensors(torch.int32), tensors(torch.int64)),
    "int64, float32 tensors": (tensors(torch.int64), tensors(torch.float32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_column_whose_type_depends_on_the_batch_is_joined_as_without_a_resume(
    server: AglServer, tmp_path: Path, change: str
) -> None:
    """Rows 6 and 7 are buffered with one type and joined with rows of another."""
    early, late = CHANGES[change]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        indices = [row["index"] for row in rows]
        return {**collate_fn(rows), "extra": (early if max(indices) < 8 else late)(indices)}

    scene = Scene(settings("16/4/6"), parts=Parts(collate=collate))
    truth = alone(scene, server, tmp_path)
    assert_same(truth, extended(scene, server, tmp_path))
    resumed = interrupted(scene, server, tmp_path, Interruption("saved", 1))
    assert resumed.steps[2].pulled == [6, 7, 8, 9]
    assert_resumed(truth, resumed)


# --- data sets ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Question:
    """A row that is no mapping."""

    fields: dict[str, Any]


class Unreadable(Rows):
    """Rows that raise for whoever is not the loader's collate function."""

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            raise OSError("no connection in a worker")
        return super().__getitem__(index)


class ManyAtOnce:
    """Hands out rows only as many as are asked for at once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.dataset[index] for index in indices]


def rows_of(run: RunSettings) -> list[dict[str, Any]]:
    return [{**row, "index": number, "ids": torch.ones(1)} for number, row in enumerate(dataset_rows(run))]


KINDS: dict[str, Parts] = {
    "dataclass": Parts(
        lambda dataset: Rows(dataset, Question), collate=lambda rows: collate_fn([row.fields for row in rows])
    ),
    "number": Parts(
        lambda dataset: list(range(len(dataset))),
        collate=lambda rows: collate_fn([rows_of(settings("16/4/6"))[row] for row in rows]),
    ),
    "many at once": Parts(ManyAtOnce),
    "unreadable": Parts(Unreadable),
}


@pytest.mark.parametrize("kind", KINDS)
def test_data_set_of_any_kind_trains(server: AglServer, tmp_path: Path, kind: str) -> None:
    """What cannot be compared is not: one line says so, and the run goes on."""
    scene = Scene(settings("16/4/6", epochs=2), parts=KINDS[kind])
    assert_trains(scene, server, tmp_path)


class Augmented(Rows):
    """Each look at a row draws from every generator of the process."""

    def __getitem__(self, index: int) -> Any:
        noise = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return {**super().__getitem__(index), "noise": noise}


def test_augmentation_leaves_the_generators_to_the_trainer(server: AglServer, tmp_path: Path) -> None:
    """The same noise in each row, and the same surplus rows dropped."""
    run = settings("24/4/6", epochs=2, rollout_n=2, mini_batch=3)
    scene = Scene(run, parts=Parts(dataset=Augmented))
    ends = (Interruption("saved", 3), Interruption("updated", 5))
    assert_trains(scene, server, tmp_path, *ends)


def test_every_other_row_replaced_is_another_data_set(server: AglServer, tmp_path: Path) -> None:
    """Two lists that alternate: rows at even distances would all be of one of them."""
    run = settings("4096/4/6", total_steps=2)
    rows = dataset_rows(run)
    first = LoadedDataset(rows)
    second = LoadedDataset(
        [{**row, "question": "other"} if number % 2 and number < 4095 else row for number, row in enumerate(rows)]
    )
    run_life(run, tmp_path, server.url, stop_after_step=1, parts=Parts(dataset=lambda _: first))
    with pytest.raises(StateMismatchError, match="dataset content differs"):
        run_life(run, tmp_path, server.url, parts=Parts(dataset=lambda _: second))
