"""`InputState` <-> the payload of the file, with everything that repeats stored once.

The siblings of a prompt group carry the same input, config and metadata several times over: each distinct one is
stored once under its digest. The events of a finished rollout are long lists of numbers; they go in as compressed JSON
in one tensor per rollout, because nested lists are slow to load.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from agl_async_ckpt.codec.arrays import pack_bytes, unpack_bytes
from agl_async_ckpt.codec.decode import require_tree
from agl_async_ckpt.codec.values import TAG, Plain, decode_value, encode_batch, encode_value
from agl_async_ckpt.exceptions import DamagedStateError, UnencodableValueError, UnsupportedVersionError
from agl_async_ckpt.state import Fingerprint, FinishedRollout, InFlightRollout, InputState, PromptGroup, RngState
from agl_async_ckpt.storage.trailer import FORMAT_NAME, FORMAT_VERSION

_SHARED_FIELDS = frozenset({"input", "config", "metadata"})

_UPGRADES: dict[int, Callable[[dict[str, Plain]], dict[str, Plain]]] = {}
"""Format version -> function that turns its payload into the payload of the next version."""


def encode_state(state: InputState) -> dict[str, Plain]:
    """Encode a state as the plain payload of a file of the current format version.

    Large columns of the buffered batch are not copied: the payload shows their memory, and is to be written before
    they change.

    Raises:
        UnencodableValueError: A value that would not come back exactly, by column and row where it has one.
    """
    shared = _SharedValues()
    return {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "global_step": state.global_step,
        "epoch": state.epoch,
        "exhausted": state.exhausted,
        "run_id": state.run_id,
        "parent_run_id": state.parent_run_id,
        "written_by": dict(state.written_by),
        "num_dropped_groups": state.num_dropped_groups,
        "loader_state": encode_value(dict(state.loader_state), "loader state"),
        "buffered_batch": None if state.buffered_batch is None else encode_batch(state.buffered_batch, lend=True),
        "carry_over": [_encode_group(group, shared) for group in state.carry_over],
        "shared": shared.values,
        "rng_state": _encode_rng(state.rng_state),
        "fingerprint": {
            "must_match": encode_value(dict(state.fingerprint.must_match), "fingerprint"),
            "recorded": encode_value(dict(state.fingerprint.recorded), "fingerprint"),
        },
    }


def decode_state(payload: dict[str, Plain]) -> InputState:
    """Rebuild the state. Keys this version does not know are ignored; older versions are brought up to date first.

    Raises:
        UnsupportedVersionError: The payload is of a newer version.
        DamagedStateError: Not a payload of this format.
    """
    try:
        require_tree(payload)
        return _decode(upgrade(payload))
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, zlib.error) as error:
        if isinstance(error, (UnsupportedVersionError, DamagedStateError)):
            raise
        raise DamagedStateError(f"Input state cannot be decoded: {type(error).__name__}: {error}") from error


def upgrade(payload: dict[str, Plain]) -> dict[str, Plain]:
    """Bring the payload of an older format version up to the current one.

    Raises:
        UnsupportedVersionError: The payload is of a newer version.
        DamagedStateError: It names no version.
    """
    if type(payload) is not dict or type(payload.get("format_version")) is not int:
        raise DamagedStateError("Input state cannot be decoded: it names no format version.")
    version: int = payload["format_version"]
    if version > FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"Input state is of format version {version}; this agl-async-ckpt reads up to version {FORMAT_VERSION}."
        )
    for older in range(version, FORMAT_VERSION):
        if older not in _UPGRADES:
            raise DamagedStateError(f"Input state cannot be decoded: there is no format version {older}.")
        payload = {**_UPGRADES[older](payload), "format_version": older + 1}
    return payload


class _SharedValues:
    """Values stored once, by digest."""

    def __init__(self) -> None:
        self.values: dict[str, Plain] = {}
        self._names: dict[str, str] = {}
        self._seen: dict[int, tuple[Any, str]] = {}

    def put(self, value: Any, where: str) -> Plain:
        # Siblings may share one object; it is kept here so that its id stays its own.
        if id(value) in self._seen:
            return {TAG: "shared", "digest": self._seen[id(value)][1]}
        encoded = encode_value(value, where)
        digest = _digest(encoded)
        self.values.setdefault(digest, encoded)
        # One string object per digest: the pickle then writes its text once.
        name = self._names.setdefault(digest, digest)
        self._seen[id(value)] = value, name
        return {TAG: "shared", "digest": name}


def _digest(encoded: Plain) -> str:
    """Digest of an encoded value; tells 1 from 1.0 and True, and keeps the order of keys."""
    text = json.dumps(encoded, default=_digest_leaf, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_leaf(leaf: bytes | torch.Tensor) -> Plain:
    if isinstance(leaf, bytes):
        return {TAG: "leaf", "sha256": hashlib.sha256(leaf).hexdigest()}
    data = leaf.reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""  # pyright: ignore[reportUnknownMemberType]
    return {TAG: "leaf", "of": [str(leaf.dtype), list(leaf.shape)], "sha256": hashlib.sha256(data).hexdigest()}


def _encode_group(group: PromptGroup, shared: _SharedValues) -> Plain:
    rollouts: list[Plain] = []
    for rollout in group.rollouts:
        where = f"in-flight rollout {rollout.enqueued.get('rollout_id')}"
        rollouts.append(
            {
                "enqueued": _encode_fields(rollout.enqueued, shared, where),
                "request": None if rollout.request is None else _encode_fields(rollout.request, shared, where),
                "finished": None if rollout.finished is None else _encode_finished(rollout.finished, shared, where),
            }
        )
    return {"data_id": group.data_id, "rollouts": rollouts}


def _encode_fields(fields: Mapping[str, Any], shared: _SharedValues, where: str) -> Plain:
    return {
        key: shared.put(value, f"{where}, {key}") if key in _SHARED_FIELDS else encode_value(value, f"{where}, {key}")
        for key, value in fields.items()
    }


def _encode_finished(finished: FinishedRollout, shared: _SharedValues, where: str) -> Plain:
    return {
        "record": _encode_fields(finished.record, shared, where),
        "raw_events": _encode_events(finished.raw_events, where),
        "triplet_events": _encode_events(finished.triplet_events, where),
    }


def _encode_events(events: Sequence[Mapping[str, Any]], where: str) -> Plain:
    _require_json(events, f"{where}, events", 0)
    text = json.dumps(events, separators=(",", ":")).encode()
    return {"tuple": isinstance(events, tuple), "size": len(text), "zlib": pack_bytes(zlib.compress(text, 1))}


def _decode_events(plain: Plain) -> Sequence[Mapping[str, Any]]:
    size = plain["size"]
    if type(size) is not int or size < 0:
        raise ValueError("compressed events have no size")  # zlib takes a limit of 0 for none
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(unpack_bytes(plain["zlib"]), size + 1)  # never more memory than declared
    if len(text) != size or not unpacker.eof:
        raise ValueError("compressed events do not have their declared size")
    events = json.loads(text)
    return tuple(events) if plain["tuple"] else events


def _require_json(value: Any, where: str, depth: int) -> None:
    """Refuse what JSON would carry as something else: tuples, keys that are not text, subclasses."""
    if depth > 100:
        raise UnencodableValueError(f"{where}: nested more than 100 deep.")
    items: Any = value
    if type(value) is dict:
        mapping = cast("dict[Any, Any]", value)
        if any(type(key) is not str for key in mapping):
            raise UnencodableValueError(f"{where}: a key that is no text cannot be saved as JSON.")
        items = mapping.values()
    elif type(value) is not list and not (depth == 0 and type(value) is tuple):
        raise UnencodableValueError(f"{where}: {type(value).__name__} cannot be saved as JSON.")
    # A list of token ids or log-probabilities is settled by the set of its types.
    if not {*map(type, items)} <= {str, int, float, bool, type(None)}:
        for item in items:
            if type(item) not in (str, int, float, bool, type(None)):
                _require_json(item, where, depth + 1)


def _encode_rng(rng: RngState | None) -> Plain:
    if rng is None:
        return None
    return encode_value({"python": rng.python, "numpy": rng.numpy, "torch": rng.torch}, "rng state")


def _decode(payload: dict[str, Plain]) -> InputState:
    shared = payload["shared"]
    batch, rng, fingerprint = payload["buffered_batch"], payload["rng_state"], payload["fingerprint"]
    rng = None if rng is None else decode_value(rng)
    return InputState(
        global_step=payload["global_step"],
        epoch=payload["epoch"],
        exhausted=payload["exhausted"],
        loader_state=decode_value(payload["loader_state"]),
        # Column by column: a batch may have a column that is named like the tag.
        buffered_batch=None if batch is None else {name: decode_value(column) for name, column in batch.items()},
        carry_over=tuple(_decode_group(group, shared) for group in payload["carry_over"]),
        rng_state=None if rng is None else RngState(rng["python"], rng["numpy"], rng["torch"]),
        fingerprint=Fingerprint(decode_value(fingerprint["must_match"]), decode_value(fingerprint["recorded"])),
        run_id=payload["run_id"],
        parent_run_id=payload["parent_run_id"],
        written_by=payload["written_by"],
        num_dropped_groups=payload.get("num_dropped_groups", 0),
    )


def _decode_group(group: Plain, shared: dict[str, Plain]) -> PromptGroup:
    return PromptGroup(group["data_id"], tuple(_decode_rollout(rollout, shared) for rollout in group["rollouts"]))


def _decode_rollout(rollout: Plain, shared: dict[str, Plain]) -> InFlightRollout:
    request, finished = rollout["request"], rollout["finished"]
    return InFlightRollout(
        enqueued=_decode_fields(rollout["enqueued"], shared),
        request=None if request is None else _decode_fields(request, shared),
        finished=None if finished is None else _decode_finished(finished, shared),
    )


def _decode_fields(fields: Plain, shared: dict[str, Plain]) -> dict[str, Any]:
    return {key: decode_value(value, shared) for key, value in fields.items()}


def _decode_finished(finished: Plain, shared: dict[str, Plain]) -> FinishedRollout:
    return FinishedRollout(
        record=_decode_fields(finished["record"], shared),
        raw_events=_decode_events(finished["raw_events"]),
        triplet_events=_decode_events(finished["triplet_events"]),
    )
