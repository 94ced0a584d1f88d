"""What the inputs come from: what is compared, what is only recorded, and what a refusal says."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt.agl.inputs.fingerprint import Difference, differences, explain, take_fingerprint
from agl_async_ckpt.state import Fingerprint, InFlightRollout, InputState, PromptGroup
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
RECORDED = {"loader batch size": 4, "data.dataloader_num_workers": 2, "rollout.n": 3}


def state() -> InputState:
    """With two inputs buffered and three groups in flight."""
    group = PromptGroup("d", (InFlightRollout({"rollout_id": "r", "step": 1}),))
    return InputState(40, 1, False, {}, {"index": [1, 2]}, (group,) * 3, None, Fingerprint(), "run")


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


def test_refusal_aligns_both_values_and_says_what_to_do() -> None:
    """The example of the design, word by word."""
    text = str(explain([Difference("data.seed", 7, 1)], state(), Path("ckpt/global_step_40")))
    assert text == (
        "Input state does not fit this run: data.seed differs.\n"
        "  in checkpoint ckpt/global_step_40: 7\n"
        "  in this run:                       1\n"
        "Resume with 7, or set agentlightning.async_checkpoint.on_mismatch=reset to drop the saved position "
        "(2 buffered, 3 in flight)."
    )


def test_refusal_of_several_values_names_each() -> None:
    """All are said at once: nobody wants to find them one start after another."""
    found = [Difference("data.seed", 7, 1), Difference("dataset columns", ["a"], ["a", "z"])]
    lines = str(explain(found, state(), Path("ckpt/global_step_40"))).splitlines()
    assert lines[0] == "Input state does not fit this run: data.seed, dataset columns differ."
    assert lines[1:8] == [
        " data.seed",
        "  in checkpoint ckpt/global_step_40: 7",
        "  in this run:                       1",
        " dataset columns",
        "  in checkpoint ckpt/global_step_40: ['a']",
        "  in this run:                       ['a', 'z']",
        "  only in this run: z",
    ]
    assert lines[8].startswith("Resume with the saved settings, or set ")


@pytest.mark.parametrize(
    ("difference", "act"),
    [
        (Difference("dataset length", 10, 9), "Resume with the data set of the saved run, or set "),
        (Difference("dataset content", "68f9", "a31c"), "Resume with the data set of the saved run, or set "),
        (Difference("data.shuffle", True, False), "Resume with True, or set "),
        (Difference("data.seed", None, 1), "Resume with the saved settings, or set "),
        (Difference("data.dataloader_num_workers", 8, 0, "the reason"), "the reason\nResume with 8, or set "),
    ],
)
def test_refusal_ends_with_the_next_safe_act(difference: Difference, act: str) -> None:
    """A value to go back to, or the data set; and why, where it need not matter."""
    assert act in str(explain([difference], state(), Path("ckpt/global_step_40")))
