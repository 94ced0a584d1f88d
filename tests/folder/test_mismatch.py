"""Whether a checkpoint fits a run: what is compared, and what a refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.folder.mismatch import Difference, differences, mismatch
from agl_async_ckpt.state import Fingerprint

MUST = {
    "dataset length": 10,
    "dataset columns": ["a", "b"],
    "dataset content": "68f9",
    "data.seed": 7,
    "data.shuffle": True,
    "sampler class": "torchdata.RandomSampler",
    "drop_last": True,
}
RECORDED = {"loader batch size": 4, "data.dataloader_num_workers": 2, "rollout.n": 3}
CHECKPOINT = Path("ckpt/global_step_40")


def test_equal_fingerprints_do_not_differ() -> None:
    """Sizes may change: they are handled exactly."""
    changed = {**RECORDED, "loader batch size": 8, "rollout.n": 1}
    assert differences(Fingerprint(MUST, RECORDED), Fingerprint(MUST, changed)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset length", 11),
        ("dataset columns", ["a", "b", "z"]),
        ("dataset content", "a31c"),
        ("data.seed", None),
        ("data.shuffle", False),
        ("sampler class", "mine.Sampler"),
        ("drop_last", False),
    ],
)
def test_each_compared_value_counts(name: str, value: Any) -> None:
    """Any of them moves the stream."""
    found = differences(Fingerprint(MUST, RECORDED), Fingerprint({**MUST, name: value}, RECORDED))
    assert found == [Difference(name, MUST[name], value)]


@pytest.mark.parametrize("name", ["dataset length", "dataset columns"])
def test_content_is_not_named_beside_length_or_columns(name: str) -> None:
    """Other rows are what one expects then."""
    changed = {**MUST, name: 9, "dataset content": "a31c", "data.seed": 8}
    found = differences(Fingerprint(MUST, RECORDED), Fingerprint(changed, RECORDED))
    assert [difference.name for difference in found] == [name, "data.seed"]


def test_number_of_workers_and_loader_batch_are_not_compared_here() -> None:
    """Whether they may change depends on the loader's state: `loader_position` says."""
    changed = {**RECORDED, "data.dataloader_num_workers": 0, "loader batch size": 6}
    assert differences(Fingerprint(MUST, RECORDED), Fingerprint(MUST, changed)) == []


def test_value_that_one_version_does_not_know_is_not_compared() -> None:
    """In both directions."""
    more = Fingerprint({**MUST, "another": "abc"}, {})
    assert differences(more, Fingerprint(MUST, RECORDED)) == []
    assert differences(Fingerprint(MUST, RECORDED), more) == []


def test_refusal_holds_both_values_and_what_to_do() -> None:
    """The example of the design, word by word."""
    error = mismatch([Difference("data.seed", 7, 1)], CHECKPOINT, "do otherwise.")
    assert error.fact == "Input state does not fit this run: data.seed differs."
    assert error.rows == (("in checkpoint ckpt/global_step_40", "7"), ("in this run", "1"))
    assert error.act == "Resume with 7, or do otherwise."


def test_refusal_of_several_values_names_each() -> None:
    """All are said at once: nobody wants to find them one start after another."""
    found = [Difference("data.seed", 7, None), Difference("dataset columns", ["a"], ["a", "z"])]
    error = mismatch(found, CHECKPOINT, "do otherwise.")
    assert error.fact == "Input state does not fit this run: data.seed, dataset columns differ."
    assert error.rows == (
        ("data.seed in checkpoint ckpt/global_step_40", "7"),
        ("data.seed in this run", "None"),
        ("dataset columns in checkpoint ckpt/global_step_40", "['a']"),
        ("dataset columns in this run", "['a', 'z']"),
        ("only in this run", "z"),
    )
    assert error.act == "Resume with the saved settings, or do otherwise."


@pytest.mark.parametrize(
    ("difference", "wanted"),
    [
        (Difference("dataset length", 10, 9), "the data set of the saved run"),
        (Difference("dataset content", "68f9", "a31c"), "the data set of the saved run"),
        (Difference("data.shuffle", True, False), "True"),
        (Difference("data.seed", None, 1), "the saved settings"),
        (Difference("data.dataloader_num_workers", 8, 0, "the reason"), "8"),
    ],
)
def test_refusal_ends_with_the_next_safe_act(difference: Difference, wanted: str) -> None:
    """A value to go back to, or the data set; and why, where it need not matter."""
    error = mismatch([difference], CHECKPOINT, "do otherwise.")
    assert error.act == f"Resume with {wanted}, or do otherwise."
    assert error.rows[2:] == ((("because", "the reason"),) if difference.reason else ())
