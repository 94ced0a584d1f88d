"""Which pass a row belongs to, also where one pull spans two, and after a change of the batch size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agl_async_ckpt.ledger.entry import Start
from agl_async_ckpt.ledger.passes import PassCounter
from tests.ledger.story import Story, dataset

FIRST = Story(dataset(13), 2, 5).start().entries[0]
assert isinstance(FIRST, Start)


def test_pull_over_the_end_of_a_pass_is_split() -> None:
    """13 rows in batches of 2: a pass has 12."""
    counter = PassCounter(FIRST)
    assert counter.draw(10, epoch=1) == ((1, 10),)
    assert counter.draw(4, epoch=2) == ((1, 2), (2, 2))
    assert counter.rows == 2
    assert counter.draw(10, epoch=2) == ((2, 10),)
    assert (counter.draw(0, epoch=2), counter.rows) == ((), 12)
    assert counter.draw(26, epoch=5) == ((3, 12), (4, 12), (5, 2))


def test_rest_of_a_pass_depends_on_the_batch_size_of_this_life() -> None:
    """From row 6 on, batches of 4 fit once in the 7 rows that are left."""
    counter = PassCounter(replace(FIRST, loader_rows=6, loader_batch=4))
    assert counter.draw(8, epoch=2) == ((1, 4), (2, 4))
    counter = PassCounter(replace(FIRST, loader_rows=12))
    assert counter.draw(2, epoch=2) == ((2, 2),)
    counter = PassCounter(replace(FIRST, loader_rows=6, drop_last=False))
    assert counter.draw(9, epoch=2) == ((1, 7), (2, 2))


@pytest.mark.parametrize("start", [replace(FIRST, loader_rows=None), FIRST], ids=["unknown", "other count"])
def test_trainer_that_counts_otherwise_is_believed(start: Start) -> None:
    """Then the place in the pass is unknown, and said to be."""
    counter = PassCounter(start)
    assert counter.draw(4, epoch=7) == ((7, 4),)
    assert counter.rows is None
    assert counter.draw(2, epoch=8) == ((8, 2),)
