"""Samples as columns and back, and the shelf that puts a tail into Ray's object store once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import ray
import torch

from agl_async_ckpt.codec.decode import decode_value
from agl_async_ckpt.codec.values import check_batch_encodable, encode_batch
from agl_async_ckpt.exceptions import StateMismatchError, UnencodableValueError
from agl_async_ckpt.openrlhf.boundary import Boundary, TailShelf
from agl_async_ckpt.openrlhf.internals import experience_class
from agl_async_ckpt.openrlhf.samples import from_columns, to_columns
from tests.openrlhf.rig.stage import Stage

Experience = experience_class()


def sample(number: int, **changes: Any) -> Any:
    """A sample as OpenRLHF's generator makes one."""
    length = 4 + number
    values = {
        "sequences": torch.arange(length).unsqueeze(0),
        "attention_mask": torch.ones(1, length, dtype=torch.long),
        "action_mask": torch.ones(1, length - 1, dtype=torch.long),
        "rollout_log_probs": torch.rand(1, length - 1).to(torch.bfloat16),
        "prompts": [str(number)],
        "labels": [{"answer": number}],
        "images": [None],
        "mm_train_inputs": [{"pixel_values": torch.rand(2, 2)} if number else None],
        "rewards": torch.tensor([0.5 * number]),
        "truncated": torch.tensor([False]),
        "total_length": torch.tensor([float(length)]),
        "info": {"reward": torch.tensor([0.5 * number]), "score": torch.tensor([1.0])},
    }
    return Experience(**values | changes)


def assert_same(one: Any, other: Any) -> None:
    """Equal in value and in type, at every depth."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("infos", [[{}, {}], [{"a": torch.ones(1)}, {"b": torch.ones(1)}], None], ids=str)
def test_samples_come_back_exactly(infos: list[Any] | None) -> None:
    """Through the codec, field by field."""
    samples = [sample(number, **({} if infos is None else {"info": infos[number]})) for number in range(2)]
    encoded = encode_batch(to_columns(samples))
    back = from_columns({name: decode_value(column) for name, column in encoded.items()})
    assert len(back) == 2
    for one, other in zip(samples, back, strict=True):
        for field in fields(Experience):
            assert_same(getattr(one, field.name), getattr(other, field.name))


def test_rebuilt_samples_share_no_memory() -> None:
    """Training changes a sample in place."""
    one, other = from_columns(to_columns([sample(1), sample(1)]))
    one.rewards += 1
    one.info["reward"] += 1
    assert other.rewards.item() == other.info["reward"].item() == 0.5


def test_numbers_are_stacked() -> None:
    """A thousand samples must not make ten thousand records in the file."""
    columns = to_columns([sample(number) for number in range(5)])
    assert columns["rewards"].shape == columns["info.reward"].shape == (5, 1)
    assert len(columns["sequences"]) == 5


def test_what_cannot_be_saved_is_named() -> None:
    """An image object among the samples, and an attribute that is no field."""
    with pytest.raises(UnencodableValueError, match="column 'images', row 1"):
        check_batch_encodable(to_columns([sample(0), sample(1, images=[object()])]))
    extra = sample(0)
    extra.note = "mine"
    with pytest.raises(UnencodableValueError, match=r"generated sample 0: Experience with \['note'\]"):
        to_columns([extra])


def test_field_of_another_version_is_named() -> None:
    """Not dropped."""
    with pytest.raises(StateMismatchError, match="fields that this OpenRLHF does not know: entropy"):
        from_columns({**to_columns([sample(0)]), "entropy": torch.ones(1)})


def test_tail_is_put_once_per_generation(stage: Stage) -> None:
    """Later batches share the reference and hold what remains; the shelf forgets an empty tail."""
    shelf, samples = TailShelf(), [sample(number) for number in range(6)]
    first = shelf.place(samples[2:])
    second = shelf.place(samples[4:])
    assert first == second
    assert [item.prompts for item in Boundary(second, 2, False, {}, {}, {}).fetch_tail()] == [["4"], ["5"]]
    assert Boundary(first, 4, False, {}, {}, {}).fetch_tail()[0].prompts == ["2"]
    assert shelf.place([]) is None
    grown = shelf.place([*samples[5:], sample(7)])
    assert grown != first
    assert len(ray.get(grown)) == 2
