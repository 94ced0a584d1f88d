"""The loader at a saved position, with another batch size or another number of workers: on torchdata's real loader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs.loader_position import (
    joined,
    loader_differences,
    open_loader,
    order_differences,
    rows_to_read_ahead,
    with_next_rows,
)
from agl_async_ckpt.codec.loader_state import rows_yielded, state_for_workers
from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.folder.mismatch import Difference
from agl_async_ckpt.state import Batch, Fingerprint, InputState
from tests.contract import broken
from tests.rig.bare import bare_trainer

N = 14
ORDER_SEED = 5


def collate(rows: list[int]) -> dict[str, Any]:
    """A batch of one column."""
    return {"row": np.array(rows)}


def loader(num_workers: int = 0, batch: int = 4, *, shuffle: bool = True, **kwargs: Any) -> Any:
    """As VERL builds it, over 14 rows."""
    rows = list(range(N))
    sampler: Any = SequentialSampler(rows)
    if shuffle:
        generator = torch.Generator()
        generator.manual_seed(ORDER_SEED)
        sampler = RandomSampler(rows, generator=generator)
    kwargs = {"drop_last": True, "collate_fn": collate, "sampler": sampler, **kwargs}
    return StatefulDataLoader(rows, batch_size=batch, num_workers=num_workers, **kwargs)


def holder(stateful_loader: Any) -> Any:
    """A trainer as far as the loader goes."""
    return bare_trainer(train_dataloader=stateful_loader, _train_dataloader_iter=None)


def state_of(source: Any, tail: Batch | None = None, torchdata: str = "0.11.0") -> InputState:
    """What a checkpoint of `source` holds."""
    recorded = {"loader batch size": source.batch_size, "data.dataloader_num_workers": source.num_workers}
    return InputState(
        1,
        1,
        False,
        source.state_dict(),
        tail,
        (),
        None,
        Fingerprint(recorded=recorded),
        "run",
        written_by={"torchdata": torchdata},
    )


def rows_of(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch["row"]]


def torchdata_broken(what: str) -> str:
    return broken("torchdata", what, used_in="agl/internals/loader.py")


EVERY_PLACE = (0, 1, 2, 3, 4)
"""Batches handed out: at the start, twice in the middle, at the exact end, and when the end was seen."""

PAIRS = [
    *((before, now, shuffle, EVERY_PLACE) for before, now in ((0, 2), (2, 0), (2, 3)) for shuffle in (True, False)),
    *((before, now, True, (1, 3, 4)) for before, now in ((8, 2), (2, 8))),  # starting eight processes takes a second
]


@pytest.mark.parametrize(("before", "now", "shuffle", "positions"), PAIRS, ids=str)
def test_pass_continues_under_another_number_of_workers(
    before: int, now: int, shuffle: bool, positions: tuple[int, ...]
) -> None:
    """At any place of a pass the rest of it is the same, and then comes the next.

    The order of a later pass is what a loader with the new number of workers draws from the generator where this pass
    has left it.
    """
    order = rows_of(loader(before, shuffle=shuffle))
    for position in positions:
        source = loader(before, shuffle=shuffle)
        iterator: Any = iter(source)
        for _ in range(position):
            next(iterator, None)
        state = state_of(source)
        trainer = holder(loader(now, shuffle=shuffle))
        assert loader_differences(trainer, state) == []
        open_loader(trainer, state)
        found = [rows_of(trainer._train_dataloader_iter), rows_of(trainer.train_dataloader)]

        later: Any = loader(now, shuffle=shuffle)
        if shuffle:
            later.sampler.generator.set_state(source.sampler.generator.get_state())
        if position < 4:
            wanted = [order[4 * position :], rows_of(later)]
            assert rows_yielded(state.loader_state) == 4 * position
        else:
            wanted = [rows_of(later), rows_of(later)]
        assert found == wanted, torchdata_broken(f"a state is the sampler's, whoever draws; position {position}")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_has_the_keys_that_a_conversion_reads_and_writes(num_workers: int) -> None:
    """Nothing more and nothing less: a key that is new may hold what a conversion has to carry over."""
    source = loader(num_workers)
    next(iter(source))
    state = source.state_dict()
    for other in (0, 3):
        target = loader(other)
        next(iter(target))
        wanted = target.state_dict()
        converted = state_for_workers(state, other)
        assert converted.keys() == wanted.keys(), torchdata_broken("the keys of a loader state")
        if other:
            assert converted["_snapshot"].keys() == wanted["_snapshot"].keys(), torchdata_broken(
                "a worker state's keys"
            )
            main, wanted_main = (one["_snapshot"]["_main_snapshot"] for one in (converted, wanted))
            assert main.keys() == wanted_main.keys(), torchdata_broken("the keys of the main process's state")
            worker = wanted["_snapshot"]["_worker_snapshots"]["worker_0"]
            assert worker == {"worker_id": 0, "fetcher_state": None, "dataset_state": None}, torchdata_broken(
                "a worker's state is nothing but the data set's own"
            )


def test_seed_of_workers_is_kept_between_numbers_of_workers() -> None:
    """Augmentation in a worker is seeded by it."""
    state = loader(2).state_dict()
    seed = state["_snapshot"]["_main_snapshot"]["_base_seed"]
    assert state_for_workers(state, 3)["_snapshot"]["_main_snapshot"]["_base_seed"] == seed


@pytest.mark.parametrize("now", [1, 2, 3, 4, 5, 6, 9, 14])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_rest_of_a_pass_is_what_the_old_batch_would_have_taken(position: int, now: int) -> None:
    """At any place under any batch size; behind that the new batch cuts."""
    source = loader(batch=4)
    iterator: Any = iter(source)
    for _ in range(position):
        next(iterator)
    state = state_of(source, tail={"row": np.array([98, 99])})
    trainer = holder(loader(batch=now))
    buffered = open_loader(trainer, state)
    assert buffered is not None
    order = rows_of([*loader(batch=1)])
    taken = [*buffered["row"].tolist(), *rows_of(trainer._train_dataloader_iter)]
    assert taken[:2] == [98, 99]
    to_come = order[4 * position : 12]
    assert taken[2 : 2 + len(to_come)] == to_come
    behind = taken[2 + len(to_come) :]
    assert behind == order[12 : 12 + 2 // now * now]
    second = rows_of(trainer.train_dataloader)
    again = loader(batch=now)
    rows_of(again)
    assert second == rows_of(again), "the next pass is the new loader's own"


def test_aligned_place_reads_nothing_ahead() -> None:
    """Nor the same batch, nor a pass that has ended, nor a loader that keeps its last rows."""
    source = loader(batch=4)
    iterator: Any = iter(source)
    next(iterator)
    assert rows_to_read_ahead(holder(loader(batch=4)), state_of(source)) == 0
    assert rows_to_read_ahead(holder(loader(batch=2)), state_of(source)) == 0
    assert rows_to_read_ahead(holder(loader(batch=3)), state_of(source)) == 2
    assert rows_to_read_ahead(holder(loader(batch=3, drop_last=False)), state_of(source)) == 0
    list(iterator)
    assert rows_to_read_ahead(holder(loader(batch=3)), state_of(source)) == 0


def test_exhaustion_is_counted_in_rows() -> None:
    """After a change from 2 to 4 the batches handed out say nothing about what is left."""
    source = loader(batch=2)
    iterator: Any = iter(source)
    for _ in range(4):
        next(iterator)
    trainer = holder(loader(batch=4))
    open_loader(trainer, state_of(source))
    assert not internals.is_exhausted(trainer, internals.loader_state(trainer))
    next(trainer._train_dataloader_iter)
    assert internals.is_exhausted(trainer, internals.loader_state(trainer))


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "sequential"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_next_rows_are_those_that_the_loader_hands_out(num_workers: int, shuffle: bool) -> None:
    """Worked out from a state at each place of a pass; none behind its end, which belongs to another pass."""
    order = rows_of(loader(num_workers, shuffle=shuffle))
    source = loader(num_workers, shuffle=shuffle)
    iterator: Any = iter(source)
    for position in range(4):
        found = internals.next_rows(holder(source), source.state_dict(), 5)
        assert found is not None
        assert found[: 12 - 4 * position] == order[4 * position :][:5], torchdata_broken("the order is randperm's")
        assert len(found) == min(5, N - 4 * position)
        next(iterator, None)
    assert internals.next_rows(holder(source), source.state_dict(), 5) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_save_draws_no_order_that_the_loader_has_drawn(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw takes time that grows with the data set; the open iterator has the order of its generator."""
    order = rows_of(loader(num_workers))
    source = loader(num_workers)
    trainer = holder(source)
    trainer._train_dataloader_iter = iter(source)
    next(trainer._train_dataloader_iter)
    state = source.state_dict()
    monkeypatch.setattr(torch, "randperm", None)
    assert internals.next_rows(trainer, state, 5) == order[4:9], torchdata_broken(
        "the sampler's iterator has the order"
    )


def test_order_of_another_pass_is_not_taken_for_that_of_a_state() -> None:
    """A state that is loaded into a loader that has begun elsewhere."""
    source = loader()
    iterator = iter(source)
    next(iterator)
    state, order = source.state_dict(), rows_of(loader())
    trainer = holder(loader(sampler=RandomSampler(list(range(N)), generator=torch.Generator().manual_seed(99))))
    trainer._train_dataloader_iter = iter(trainer.train_dataloader)
    assert internals.next_rows(trainer, state, 5) == order[4:9]


def test_torch_that_draws_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved generator is the same, the permutation is not: the rest of the epoch would be another one."""
    source = loader()
    next(iter(source))
    state = state_of(source)
    fingerprint = with_next_rows(holder(source), state.fingerprint, state.loader_state)
    state = replace(state, fingerprint=fingerprint, written_by={**state.written_by, "torch": "2.9.0"})
    assert order_differences(holder(loader()), state) == []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **kwargs: randperm(*args, **kwargs).flip(0))
    (found,) = order_differences(holder(loader()), state)
    assert found.name == "next rows of the epoch"
    assert len(found.saved) == len(found.current) == 8
    assert found.saved != found.current
    current = internals.written_by()["torch"]
    assert found.reason == f"the saved generator gives another order with torch {current} than with 2.9.0"


def test_order_of_a_sampler_of_ones_own_is_not_compared() -> None:
    """Nobody knows how it draws; a checkpoint that does not say it is not compared either."""

    class Mine(RandomSampler):
        pass

    source = loader(sampler=Mine(list(range(N))))
    state = state_of(source)
    assert with_next_rows(holder(source), state.fingerprint, state.loader_state) == state.fingerprint
    assert order_differences(holder(source), state) == []


# --- what cannot be converted -------------------------------------------------------------------------------------


class StatefulRows(list[int]):
    """A data set with a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (2, 3)], ids=str)
def test_data_set_with_a_state_of_its_own_is_one_error_that_names_both_numbers(before: int, now: int) -> None:
    """Each worker has its own copy of it: n of them cannot become m."""
    source = StatefulDataLoader(StatefulRows(range(N)), batch_size=4, num_workers=before, drop_last=True)
    next(iter(source))
    reason = "the data set has a state of its own in each loader worker"
    found = loader_differences(holder(loader(now)), state_of(source))
    assert found == [Difference("data.dataloader_num_workers", before, now, reason)]
    assert loader_differences(holder(loader(before)), state_of(source)) == [], "unchanged settings need no conversion"


@pytest.mark.parametrize("version", ["0.10.1", "0.12.0", "1.0"])
def test_state_of_another_torchdata_is_not_converted(version: str) -> None:
    """Its keys may mean something else; both changes are named."""
    state = state_of(loader(2), torchdata=version)
    found = loader_differences(holder(loader(0, batch=5)), state)
    assert [(one.name, one.saved, one.current) for one in found] == [
        ("data.dataloader_num_workers", 2, 0),
        ("loader batch size", 4, 5),
    ]
    assert f"torchdata {version}" in found[0].reason


def test_state_between_two_snapshots_is_not_converted() -> None:
    """Workers that report every third batch: torchdata replays the others, in batches of the new size."""
    source = loader(2, snapshot_every_n_steps=3)
    next(iter(source))
    found = loader_differences(holder(loader(0)), state_of(source))
    assert [one.reason for one in found] == ["the loader state does not tell how many rows were handed out"]


# --- joining ------------------------------------------------------------------------------------------------------


def test_joined_rows_keep_their_types() -> None:
    """As agent-lightning joins what it has pulled."""
    first = {"t": torch.tensor([[1]]), "a": np.array([{"x": 1}], dtype=object), "l": [None]}
    second = {"t": torch.tensor([[2]]), "a": np.array([{"x": 2}], dtype=object), "l": ["b"]}
    batch = joined(first, second)
    assert torch.equal(batch["t"], torch.tensor([[1], [2]]))
    assert (batch["a"].dtype, batch["a"].tolist()) == (np.dtype(object), [{"x": 1}, {"x": 2}])
    assert batch["l"] == [None, "b"]
    assert joined(None, second) is second


def test_rows_that_cannot_be_joined_are_an_error_by_column() -> None:
    """A collate function that has changed since the save."""
    with pytest.raises(StateMismatchError) as caught:
        joined({"a": torch.ones(1), "b": [1]}, {"a": np.array([2]), "b": [2]})
    assert "  a in the checkpoint: Tensor\n  a in this run:       ndarray\n" in str(caught.value)
    with pytest.raises(StateMismatchError, match="the columns differ"):
        joined({"a": [1]}, {"a": [2], "b": [2]})
    with pytest.raises(StateMismatchError, match="cannot be one batch"):
        joined({"a": torch.ones(1, 2)}, {"a": torch.ones(1, 3)})
