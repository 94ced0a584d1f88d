"""Events that are kept compressed read as the list or tuple that was packed."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest

from agl_async_ckpt.codec.events import PackedEvents, decode_events
from agl_async_ckpt.codec.packed_json import compress
from agl_async_ckpt.exceptions import DamagedStateError
from tests.golden.sample import assert_same

EVENTS: list[Any] = [
    {"event_type": "model_request", "data": {"ids": [1, 2, 3], "log_probs": [-0.0, math.inf, 0.1]}},
    {"event_type": "note", "data": {"text": "a\ud800b\u2028", "none": None, "one": 1, "true": True, "float": 1.0}},
]
REWARD: Any = {"event_type": "reward", "data": {"value": 0.5}}


@pytest.mark.parametrize("kind", [list, tuple])
def test_packed_events_read_as_what_was_packed(kind: Any) -> None:
    """As a sequence, as a whole, and from a payload."""
    packed = PackedEvents.pack(kind(EVENTS))
    assert_same(packed.unpack(), kind(EVENTS))
    assert_same(decode_events(packed.encode()).unpack(), kind(EVENTS))
    assert packed == kind(EVENTS)
    assert packed != kind(EVENTS[:1])
    assert [len(packed), packed[1], *packed] == [2, EVENTS[1], *EVENTS]
    assert PackedEvents.pack(packed) is packed


def test_numbers_keep_every_bit() -> None:
    """Of any 64 bits that are a number, of whole numbers of any size, and of each end of the range."""
    rng = random.Random(3)
    floats = [value for value in (struct.unpack("d", rng.randbytes(8))[0] for _ in range(5000)) if value == value]
    floats += [5e-324, 1.7976931348623157e308, 1e16, 1e22, 0.1, -0.0, math.inf, -math.inf, math.nan, 2.0**53]
    whole = [0, -1, 2**53 + 1, 2**63, -(2**64), 10**40]
    assert_same(PackedEvents.take([{"numbers": [*floats, *whole]}]).unpack(), [{"numbers": [*floats, *whole]}])


def test_each_look_returns_values_of_its_own() -> None:
    """Whoever changes an event in place changes no checkpoint."""
    packed = PackedEvents.pack(tuple(EVENTS))
    packed[0]["data"]["ids"].append(4)  # type: ignore[index]
    assert packed[0]["data"]["ids"] == [1, 2, 3]


@pytest.mark.parametrize("kind", [list, tuple])
def test_event_that_came_later_is_one_of_them(kind: Any) -> None:
    """In memory and in a payload, and not in the copy from before."""
    before = PackedEvents.pack(kind(EVENTS))
    after = before.with_event(REWARD)
    assert_same(after.unpack(), kind([*EVENTS, REWARD]))
    assert_same(decode_events(after.encode()).unpack(), kind([*EVENTS, REWARD]))
    assert_same(before.unpack(), kind(EVENTS))
    assert after == PackedEvents.pack(kind([*EVENTS, REWARD]))


def test_size_and_types_are_known_without_a_look() -> None:
    """Of those that were packed, came later, or came from a payload."""
    packed = PackedEvents.pack(tuple(EVENTS)).with_event(REWARD)
    whole = PackedEvents.pack(packed.unpack())
    for events in (packed, whole, decode_events(packed.encode())):
        assert events.event_types == {"model_request", "note", "reward"}
        assert events.num_bytes == whole.num_bytes
    assert PackedEvents.pack(()).event_types == frozenset()


def test_payload_of_something_else_is_refused() -> None:
    """By the look at it; a text that is no JSON, is nested without end, or is no list."""
    for text, said in (('{"a":1}', "no list"), ("[1", "delimiter"), ("[" * 100_000, "recursion")):
        data, size = compress(text.encode())
        events = decode_events({**PackedEvents.pack(()).encode(), "zlib": data, "size": size})
        with pytest.raises(DamagedStateError, match=said):
            events.unpack()
