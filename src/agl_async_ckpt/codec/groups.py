"""Prompt groups in flight <-> plain values, with everything that repeats stored once.

The siblings of a prompt group carry the same input, config and metadata several times over: each distinct one is stored
once under its digest. What is left, a few ids and times for each of thousands of rollouts, goes in as one compressed
JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agl_async_ckpt.codec.arrays import Lender
from agl_async_ckpt.codec.content import canonical
from agl_async_ckpt.codec.decode import TAG, Plain, decode_value
from agl_async_ckpt.codec.events import PackedEvents, decode_events
from agl_async_ckpt.codec.packed_json import pack_tree, unpack_tree
from agl_async_ckpt.codec.values import encode_value
from agl_async_ckpt.exceptions import UnencodableValueError
from agl_async_ckpt.state import FinishedRollout, InFlightRollout, PromptGroup

# A field that is named like the tag, too: no dict of the tree may look like one that stands for a blob.
_SHARED_FIELDS = frozenset({"input", "config", "metadata", TAG})


def encode_groups(groups: Sequence[PromptGroup]) -> tuple[dict[str, Plain], dict[str, Plain]]:
    """Encode prompt groups; the payload shows the memory of large events.

    Returns:
        The packed groups, and digest -> encoded value of what they share.

    Raises:
        UnencodableValueError: A value that would not come back exactly, by rollout and field.
    """
    shared, lender = _SharedValues(), Lender()
    return pack_tree([_encode_group(group, shared, lender) for group in groups]), shared.values


def decode_groups(packed: dict[str, Plain], shared: Mapping[str, Plain]) -> tuple[PromptGroup, ...]:
    """Rebuild the prompt groups; no two rollouts share a value.

    Raises:
        ValueError, TypeError, KeyError, RecursionError, zlib.error: Not what `encode_groups` returned.
    """
    return tuple(_decode_group(group, shared) for group in unpack_tree(packed))


class _SharedValues:
    """Values stored once, by digest."""

    def __init__(self) -> None:
        self.values: dict[str, Plain] = {}
        self._seen: dict[int, tuple[Any, Plain]] = {}

    def put(self, value: Any, where: str) -> Plain:
        # Siblings may share one object; it is kept here so that its id stays its own.
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        encoded = encode_value(value, where)
        digest = _digest(encoded)
        self.values.setdefault(digest, encoded)
        reference = {TAG: "shared", "digest": digest}
        self._seen[id(value)] = value, reference
        return reference


def _digest(encoded: Plain) -> str:
    """Return the digest of an encoded value as a whole, with the order of its keys and where a file lies.

    Two inputs that are the same by their content may differ in those, and each is to come back as it was.
    """
    return hashlib.sha256(_digest_text(encoded).encode()).hexdigest()


def _digest_leaf(leaf: bytes | torch.Tensor) -> Plain:
    return {TAG: "leaf", "content": canonical(leaf)}


_digest_text = json.JSONEncoder(default=_digest_leaf, separators=(",", ":"), check_circular=False).encode


def _encode_group(group: PromptGroup, shared: _SharedValues, lender: Lender) -> Plain:
    rollouts: list[Plain] = []
    for rollout in group.rollouts:
        request, finished = rollout.request, rollout.finished
        where = f"in-flight rollout {rollout.enqueued.get('rollout_id')}"
        try:
            enqueued = _encode_fields(rollout.enqueued, shared, where)
        except UnencodableValueError:
            if request is None:
                raise
            # agent-lightning reads the input before it posts it, and not again: what was posted stands for it.
            enqueued = _encode_fields({**rollout.enqueued, "input": request.get("input")}, shared, where)
        rollouts.append(
            {
                "enqueued": enqueued,
                "request": None if request is None else _encode_fields(request, shared, where),
                "finished": None if finished is None else _encode_finished(finished, shared, where, lender),
            }
        )
    return {"data_id": group.data_id, "rollouts": rollouts}


def _encode_fields(fields: Mapping[str, Any], shared: _SharedValues, where: str) -> Plain:
    return {
        key: shared.put(value, f"{where}, {key}") if key in _SHARED_FIELDS else encode_value(value, f"{where}, {key}")
        for key, value in fields.items()
    }


def _encode_finished(finished: FinishedRollout, shared: _SharedValues, where: str, lender: Lender) -> Plain:
    where_events = f"{where}, events"
    return {
        "record": _encode_fields(finished.record, shared, where),
        "raw_events": PackedEvents.pack(finished.raw_events, where_events).encode(lender),
        "triplet_events": PackedEvents.pack(finished.triplet_events, where_events).encode(lender),
    }


def _decode_group(group: Plain, shared: Mapping[str, Plain]) -> PromptGroup:
    return PromptGroup(group["data_id"], tuple(_decode_rollout(rollout, shared) for rollout in group["rollouts"]))


def _decode_rollout(rollout: Plain, shared: Mapping[str, Plain]) -> InFlightRollout:
    request, finished = rollout["request"], rollout["finished"]
    return InFlightRollout(
        enqueued=_decode_fields(rollout["enqueued"], shared),
        request=None if request is None else _decode_fields(request, shared),
        finished=None if finished is None else _decode_finished(finished, shared),
    )


def _decode_fields(fields: Plain, shared: Mapping[str, Plain]) -> dict[str, Any]:
    return {key: decode_value(value, shared) for key, value in fields.items()}


def _decode_finished(finished: Plain, shared: Mapping[str, Plain]) -> FinishedRollout:
    return FinishedRollout(
        record=_decode_fields(finished["record"], shared),
        raw_events=decode_events(finished["raw_events"]),
        triplet_events=decode_events(finished["triplet_events"]),
    )
