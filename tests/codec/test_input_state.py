"""The state as a payload: what repeats is stored once, and events keep every bit."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agl_async_ckpt.codec.input_state import decode_state, encode_state
from agl_async_ckpt.codec.packed_json import pack_tree, unpack_tree
from agl_async_ckpt.exceptions import DamagedStateError, UnencodableValueError
from agl_async_ckpt.state import FinishedRollout, InFlightRollout, InputState, PromptGroup
from tests.golden.sample import assert_same, sample_state, small_state


def edited(payload: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A payload whose groups were changed by hand."""
    tree = unpack_tree(payload["carry_over"])
    change(tree)
    return {**payload, "carry_over": pack_tree(tree)}


def state_of(*rollouts: InFlightRollout) -> InputState:
    return small_state(carry_over=(PromptGroup("data-0", rollouts),))


def enqueued(index: int, value: Any) -> dict[str, Any]:
    return {"rollout_id": f"r{index}", "step": 1, "input": value}


def round_trip(state: InputState) -> InputState:
    file = io.BytesIO()
    torch.save(encode_state(state), file)
    file.seek(0)
    return decode_state(torch.load(file, weights_only=True))


def finished(events: Any) -> InFlightRollout:
    return InFlightRollout(enqueued(0, 1), None, FinishedRollout({"rollout_id": "r0"}, events))


def test_state_comes_back_exactly() -> None:
    """Every field, and the defaults."""
    for state in (sample_state(), small_state(), small_state(buffered_batch=None, carry_over=()), small_state(0)):
        assert_same(round_trip(state), state)


def test_equal_inputs_are_stored_once() -> None:
    """Sixteen siblings carry their input twice each; the file holds it once, and one config."""
    task = {"prompt": "x" * 10_000}
    rollouts = [
        InFlightRollout(
            enqueued(index, dict(task)), {"input": dict(task), "config": {"image": "a"}, "metadata": {"index": index}}
        )
        for index in range(16)
    ]
    payload = encode_state(state_of(*rollouts))
    assert len(payload["shared"]) == 1 + 1 + 16
    file = io.BytesIO()
    torch.save(payload, file)
    assert len(file.getvalue()) < 25_000
    assert_same(round_trip(state_of(*rollouts)), state_of(*rollouts))


def test_restored_siblings_do_not_share_their_input() -> None:
    """A hook may change the input of one sibling in place."""
    rollouts = [InFlightRollout(enqueued(index, {"a": [1]}), {"input": {"a": [1]}}) for index in range(2)]
    first, second = round_trip(state_of(*rollouts)).carry_over[0].rollouts
    first.enqueued["input"]["a"].append(2)
    assert second.enqueued["input"] == {"a": [1]}
    assert first.request == {"input": {"a": [1]}}


def test_similar_inputs_are_not_taken_for_equal() -> None:
    """1, 1.0, True and "1", the order of keys, the type and bytes of arrays, a path: all tell inputs apart."""
    import numpy as np

    values = [
        *(1, 1.0, True, "1", None, "", [], {}, (), 0.0, -0.0, math.nan, b"", b"1"),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {1: 2}, {"1": 2}, [1], (1,), {"$type": "tuple", "items": [1]}),
        *(torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2), torch.ones(2), np.zeros(2)),
        *(bytes(2000), bytes(2001), np.zeros(2, dtype=np.float32)),
        *({"bytes": b"x", "path": "/a.png"}, {"bytes": b"x", "path": "/b.png"}),
    ]
    rollouts = [InFlightRollout(enqueued(index, value)) for index, value in enumerate(values)]
    assert len(encode_state(state_of(*rollouts))["shared"]) == len(values)
    assert_same(round_trip(state_of(*rollouts)), state_of(*rollouts))


def test_input_that_looks_like_a_reference_comes_back() -> None:
    """The tag of the format is no reserved word for users, anywhere."""
    value = {"$type": "shared", "digest": "0" * 64}
    blob = {"$type": "blob", "index": 0}
    fields = {**enqueued(0, value), "$type": value}
    state = state_of(finished([blob]), InFlightRollout(fields, {"input": value, **blob}), InFlightRollout(blob, blob))
    state = dataclasses.replace(state, buffered_batch={"$type": [value]}, loader_state={"$type": value, "x": value})
    assert_same(round_trip(state), state)


def test_events_keep_order_kind_and_nan() -> None:
    """Key order, int or float, NaN, the infinities, the sign of zero, and text of every kind."""
    events = [
        {"b": 1, "a": 1.0, "c": True, "d": None, "e": [0.1, 5e-324, 1e308, -0.0, math.nan, math.inf, -math.inf]},
        {"text": "a\ud800b\u2028\x00日本", "big": 2**200, "empty": [{}, [], ""], "$type": "tuple"},
    ]
    state = state_of(finished(events))
    assert_same(round_trip(state), state)


def test_events_take_one_tensor_of_bytes() -> None:
    """Nested lists of numbers are slow to load."""
    events = [{"token_ids": list(range(5000))}]
    blob, _ = encode_state(state_of(finished(events)))["carry_over"]["blobs"]
    assert blob.dtype is torch.uint8
    assert 1024 < blob.numel() < len(json.dumps(events))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"a": (1, 2)}, "tuple"),
        ({"a": {1: 2}}, "key"),
        ({"a": object()}, "object"),
        ({"a": b"x"}, "bytes"),
        ({"a": {"b": [[{"c": {1}}]]}}, "set"),
    ],
)
def test_events_that_json_would_change_are_refused(event: Any, text: str) -> None:
    """They come from JSON; anything else would return as something else."""
    with pytest.raises(UnencodableValueError, match=f"rollout r0, events.*{text}"):
        encode_state(state_of(finished([event])))


def test_events_nested_too_deep_are_refused() -> None:
    """With a name, not a RecursionError."""
    event: Any = {}
    for _ in range(200):
        event = {"a": event}
    with pytest.raises(UnencodableValueError, match="nested"):
        encode_state(state_of(finished([event])))


def test_value_in_flight_is_refused_by_rollout_and_field() -> None:
    """The message names what to look for on the server."""
    with pytest.raises(UnencodableValueError, match=r"in-flight rollout r0, input, at \['image'\]: object"):
        encode_state(state_of(InFlightRollout(enqueued(0, {"image": object()}))))


def test_value_in_flight_that_cannot_be_carried_is_saved_as_it_was_posted() -> None:
    """Nothing reads the original once it is posted."""
    posted = {"image": "data:image/png;base64,AAAA"}
    state = state_of(InFlightRollout(enqueued(0, {"image": object()}), {"input": posted, "is_train": True}))
    (group,) = round_trip(state).carry_over
    assert group.rollouts[0].enqueued["input"] == group.rollouts[0].request["input"] == posted


@pytest.mark.parametrize(
    "changes",
    [{"size": 10**12}, {"size": 1}, {"size": -5}, {"size": "1"}, {"zlib": b"abc"}, {"zlib": None}],
    ids=lambda changes: repr(changes),
)
def test_compressed_events_are_bounded_by_their_declared_size(changes: dict[str, Any]) -> None:
    """Too long, too short, torn: one error, and no more memory than declared."""
    payload = encode_state(state_of(finished([{"a": [1] * 10_000}])))
    with pytest.raises(DamagedStateError):
        decode_state(edited(payload, lambda tree: tree[0]["rollouts"][0]["finished"]["raw_events"].update(changes)))
