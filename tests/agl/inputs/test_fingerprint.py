"""What the inputs come from: what is to be compared, and what is only recorded."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt.agl.inputs.fingerprint import take_fingerprint
from tests.rig.bare import bare_trainer

MUST = {
    "dataset length": 10,
    "dataset columns": ["a", "b"],
    "dataset content": "68f9",
    "data.seed": 7,
    "data.shuffle": True,
    "sampler class": "torchdata.RandomSampler",
    "drop_last": True,
}


def trainer(**data: Any) -> Any:
    """The part of a trainer that is looked at."""
    loader = SimpleNamespace(sampler=range(10), drop_last=True, batch_size=4, num_workers=2)
    return bare_trainer(
        {
            "data": {"seed": 7, "shuffle": True, "train_batch_size": 2, **data},
            "agentlightning": {"async_rollout": {"async_train_batch_size": 5}},
            "actor_rollout_ref": {"rollout": {"n": 3}},
        },
        train_dataset=[{"b": 1, "a": 2}] * 10,
        train_dataloader=loader,
    )


def test_fingerprint_names_dataset_sampler_and_sizes() -> None:
    """Columns are sorted: their order says nothing about the inputs."""
    taken = take_fingerprint(trainer())
    content = taken.must_match["dataset content"]
    assert content.endswith(" (all 10 rows)")
    assert dict(taken.must_match) == {**MUST, "sampler class": "builtins.range", "dataset content": content}
    assert dict(taken.recorded) == {
        "loader batch size": 4,
        "data.train_batch_size": 2,
        "async_train_batch_size": 5,
        "data.dataloader_num_workers": 2,
        "rollout.n": 3,
    }


def test_absent_seed_is_none() -> None:
    """VERL allows both."""
    assert take_fingerprint(trainer(seed=None)).must_match["data.seed"] is None


def test_rows_that_cannot_be_compared_are_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """What a resume will not notice stands in the log."""
    caplog.set_level(logging.INFO)
    unknown = trainer()
    unknown.train_dataset = [{"a": object(), "b": 1}] * 10
    taken = take_fingerprint(unknown)
    assert "dataset content" not in taken.must_match
    assert taken.must_match["dataset columns"] == ["a", "b"]
    assert [record.message for record in caplog.records] == [
        "A resume will not notice if rows of the data set have changed: "
        "the content of a builtins.object cannot be told."
    ]
