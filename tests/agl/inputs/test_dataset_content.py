"""What a data set holds, on the real kinds of data sets: read without touching anything."""

from __future__ import annotations

import copy
import random
import re
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from agentlightning.verl.dataset import LoadedDataset
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs import dataset_content
from agl_async_ckpt.agl.inputs.dataset_content import DatasetContent, read_content
from agl_async_ckpt.codec.content import MAX_ROWS, sample

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {row}"}],
        "extra_info": {"index": row, "note": None if row % 2 else "odd"},
        "token_ids": list(range(row)),
        "blob": bytes([row]),
        "score": row / 7,
    }
    for row in range(9)
]


def changed_at(row: int, **values: Any) -> list[dict[str, Any]]:
    """`ROWS` with one row changed."""
    rows = copy.deepcopy(ROWS)
    rows[row].update(values)
    return rows


def digest_of(rows: list[dict[str, Any]]) -> str:
    """Of agent-lightning's data set of these rows."""
    digest = read_content(LoadedDataset(rows)).digest
    assert digest is not None
    return digest


FIRST_OF_100_000 = [0, 99999, 35453, 2622, 85661, 85436, 42348, 99239]
FIRST_OF_5 = [0, 4, 2, 1, 3]


class InMemory(torch.utils.data.Dataset[Any]):
    """A data set of one's own."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return self.rows[index]


class Augmented(InMemory):
    """Each look at a row is another."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "noise": random.random()}


@dataclass
class Row:
    """A row without columns."""

    number: int


class Own(InMemory):
    """With a generator of its own."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.generator = np.random.default_rng(1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "noise": self.generator.random()}


class NoisyFrame(LoadedDataset):
    """agent-lightning's, with augmentation."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {**super().__getitem__(item), "noise": [random.random(), np.random.random(), torch.rand(())]}


# --- what is found ------------------------------------------------------------------------------------------------


def test_digest_says_how_many_rows_it_covers() -> None:
    """All of a small data set; the columns are those that are stored."""
    found = read_content(LoadedDataset(ROWS))
    assert found.digest is not None
    assert found.digest.endswith(" (all 9 rows)")
    assert found.columns == sorted(ROWS[0])
    assert found.problem == ""


def test_same_rows_have_the_same_digest() -> None:
    """Read again, with keys in another order, and kept in other types of Arrow."""
    backwards = [dict(reversed(row.items())) for row in ROWS]
    assert digest_of(ROWS) == digest_of(backwards)
    stored = datasets.Dataset.from_list(ROWS)
    wide = stored.cast_column("score", datasets.Value("float64")).cast_column(
        "token_ids", datasets.LargeList(datasets.Value("int32"))
    )
    wide = wide.cast_column("blob", datasets.Value("large_binary"))
    assert read_content(wide).digest == read_content(stored).digest == digest_of(ROWS)


def test_selected_and_joined_rows_are_those_of_a_plain_data_set() -> None:
    """`select` and `concatenate_datasets` keep rows elsewhere than they stand."""
    stored = datasets.Dataset.from_list([*ROWS, *ROWS])
    one = datasets.concatenate_datasets([stored.select(range(4)), stored.select([4, 14, 15, 16, 17])])
    assert read_content(one).digest == read_content(datasets.Dataset.from_list(ROWS)).digest


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": [{"role": "user", "content": "question 4?"}]},
        {"prompt": []},
        {"extra_info": {"index": 4, "note": None}},
        {"extra_info": {"index": 5, "note": "odd"}},
        {"extra_info": None},
        {"token_ids": [0, 1, 3, 2]},
        {"token_ids": []},
        {"token_ids": None},
        {"blob": b""},
        {"blob": None},
        {"score": 0.5},
        {"score": float("nan")},
    ],
    ids=str,
)
def test_any_changed_value_changes_the_digest(values: dict[str, Any]) -> None:
    """In any kind of column, nested or not, at the same number of rows."""
    assert digest_of(changed_at(4, **values)) != digest_of(ROWS)


def test_number_that_moves_to_the_next_list_changes_the_digest() -> None:
    """Ragged lists are told apart by their lengths too, not by their numbers alone."""
    one = [{"a": [1, 2]}, {"a": [3]}]
    other = [{"a": [1]}, {"a": [2, 3]}]
    assert digest_of(one) != digest_of(other)


def test_order_of_rows_counts() -> None:
    """Another order of the rows is another order of training."""
    assert digest_of(ROWS[::-1]) != digest_of(ROWS)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, MAX_ROWS, MAX_ROWS + 1, 100_000])
def test_sample_begins_with_both_ends(num_rows: int) -> None:
    """All rows of a small data set, as many of any large one, none twice."""
    chosen = sample(num_rows)
    assert len(chosen) == len(set(chosen)) == min(num_rows, MAX_ROWS)
    assert set(chosen) <= set(range(num_rows))
    assert set(chosen[:2]) == {*range(num_rows)[:1], *range(num_rows)[-1:]}


def test_sample_is_the_same_in_every_life() -> None:
    """A constant: it depends on no generator and on no version."""
    assert sample(100_000)[:8] == FIRST_OF_100_000
    assert sample(5) == FIRST_OF_5


@pytest.mark.parametrize("period", [2, 3, 7, 16, 48, 100])
@pytest.mark.parametrize("num_rows", [4096, 6141, 100_000])
def test_sample_meets_every_part_of_a_data_set_that_repeats(num_rows: int, period: int) -> None:
    """Lists that alternate are all seen, about as often."""
    counts = Counter(row % period for row in sample(num_rows))
    share = MAX_ROWS / period
    assert len(counts) == period
    assert all(share / 3 < count < 3 * share for count in counts.values())


def test_rows_that_were_sampled_are_counted() -> None:
    """What a digest covers stands beside it."""
    found = read_content(LoadedDataset([{"a": row} for row in range(3 * MAX_ROWS)])).digest
    assert found is not None
    assert found.endswith(f" ({MAX_ROWS} of {3 * MAX_ROWS} rows)")


@pytest.mark.parametrize("kind", [str, bytes])
def test_large_rows_are_read_in_part_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """A start takes no gigabytes: as many rows as fit into the bound, and a few of them in memory."""
    monkeypatch.setattr(dataset_content, "MAX_BYTES", 8 * 2**20)
    size = 2**18
    values = [kind(chr(97 + row % 26) * size, *(["ascii"] if kind is bytes else [])) for row in range(100)]
    stored = LoadedDataset([{"a": value} for value in values])
    tracemalloc.start()
    found = read_content(stored).digest
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    num_read = int(re.fullmatch(r"[0-9a-f]{16} \((\d+) of 100 rows\)", found)[1])
    assert 32 <= num_read <= 48
    assert peak < 16 * 2**20
    wide = datasets.Dataset.from_dict({"a": values}).cast_column(
        "a", datasets.Value("large_string" if kind is str else "large_binary")
    )
    assert read_content(wide).digest == found, "the number of rows depends on what is stored, not on how"


def test_images_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    """Not decoded, which takes long, and wherever the files lie."""
    image_module = pytest.importorskip("PIL.Image")

    found: list[str | None] = []
    for folder, colour in (("one", 1), ("other", 1), ("third", 2)):
        (tmp_path / folder).mkdir()
        image_module.new("RGB", (2, 2), colour).save(tmp_path / folder / "a.png")
        stored = datasets.Dataset.from_dict({"image": [str(tmp_path / folder / "a.png")] * 2}).cast_column(
            "image", datasets.Image()
        )
        embedded = [{"image": {"bytes": (tmp_path / folder / "a.png").read_bytes(), "path": str(tmp_path / folder)}}]
        assert read_content(stored).digest is not None
        found.append(read_content(datasets.Dataset.from_list(embedded)).digest)
        assert found[-1] is not None
    assert found[0] == found[1] != found[2]


def test_verls_own_data_set_is_compared_by_its_rows(tmp_path: Path) -> None:
    """`RLHFDataset` from a parquet file, also behind a subclass that augments what the loader gets."""
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path / "cache")})

    class Noisy(RLHFDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            return {**super().__getitem__(item), "noise": random.random()}

    plain, noisy = (
        read_content(cls(str(tmp_path / "a.parquet"), tokenizer=None, config=config)) for cls in (RLHFDataset, Noisy)
    )
    assert plain.digest == noisy.digest == digest_of(ROWS)
    assert noisy.columns == sorted(ROWS[0])


# --- data sets of one's own ---------------------------------------------------------------------------------------


def test_data_set_of_ones_own_is_compared_by_what_it_hands_out() -> None:
    """A worker reads it; the object in this process is not touched."""
    dataset = InMemory(ROWS)
    found = read_content(dataset)
    assert found.digest is not None
    assert found.columns == sorted(ROWS[0])
    assert dataset.reads == 0
    assert found.digest != read_content(InMemory(changed_at(3, score=9.0))).digest
    assert found.digest == read_content(InMemory(copy.deepcopy(ROWS))).digest


@pytest.mark.parametrize("kind", [Augmented, Own])
def test_random_rows_are_not_compared(kind: type[InMemory]) -> None:
    """They differ at a second look: a comparison would refuse every resume."""
    found = read_content(kind(ROWS))
    assert found == DatasetContent(sorted([*ROWS[0], "noise"]), None, "row 0 differs each time it is read")


def test_rows_of_unknown_content_are_not_compared() -> None:
    """The problem names the type."""
    found = read_content(InMemory([{"a": object()}]))
    assert found == DatasetContent(["a"], None, "the content of a builtins.object cannot be told")


def test_data_set_that_fails_in_a_worker_is_not_compared() -> None:
    """A comparison that cannot be made does not stop the run."""

    class OnlyHere(InMemory):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if torch.utils.data.get_worker_info() is not None:
                raise OSError("no connection in a worker")
            return self.rows[index]

    found = read_content(OnlyHere(ROWS))
    assert found == DatasetContent(None, None, "OSError: no connection in a worker")


@pytest.mark.parametrize("rows", [[1, 2, 3], [Row(1), Row(2)]], ids=["numbers", "dataclasses"])
def test_rows_without_columns_are_compared_by_their_content(rows: list[Any]) -> None:
    """A collate function makes the columns of them."""
    found = read_content(InMemory(rows))
    assert found.columns is None
    assert found.digest is not None
    assert found.digest != read_content(InMemory(rows[::-1])).digest


class Countdown(InMemory):
    """Draws, and then raises."""

    def __getitem__(self, index: int) -> Any:
        random.random()
        np.random.random()
        torch.rand(())
        raise ValueError("not yet")


def test_data_set_that_takes_too_long_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not wait for it."""
    monkeypatch.setattr(dataset_content, "READ_TIMEOUT_S", 0.001)
    found = read_content(InMemory(ROWS * 40))
    assert found.digest is None
    assert "0.001 s" in found.problem or "timed out" in found.problem


@pytest.mark.parametrize(
    "dataset",
    [LoadedDataset(ROWS), InMemory(ROWS), Augmented(ROWS), Own(ROWS), Countdown(ROWS), ROWS, NoisyFrame(ROWS)],
    ids=lambda dataset: type(dataset).__name__,
)
def test_looking_draws_from_no_generator(dataset: Any) -> None:
    """Neither the global ones of the driver nor one that the data set has."""
    before = internals.rng_state()
    read_content(dataset)
    after = internals.rng_state()
    assert before.python == after.python
    assert [np.array_equal(one, other) for one, other in zip(before.numpy, after.numpy, strict=True)] == [True] * 5
    assert torch.equal(before.torch, after.torch)
    if isinstance(dataset, Own):
        assert dataset.generator.random() == np.random.default_rng(1).random()
