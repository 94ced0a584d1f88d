"""`InputState` <-> the payload of the file, and the payloads of older format versions."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from agl_async_ckpt.codec.decode import require_tree
from agl_async_ckpt.codec.groups import decode_groups, encode_groups
from agl_async_ckpt.codec.packed_json import pack_tree
from agl_async_ckpt.codec.values import Plain, decode_value, encode_batch, encode_value
from agl_async_ckpt.exceptions import DamagedStateError, UnsupportedVersionError
from agl_async_ckpt.state import Fingerprint, InputState, RngState
from agl_async_ckpt.storage.trailer import FORMAT_NAME, FORMAT_VERSION

_UPGRADES: dict[int, Callable[[dict[str, Plain]], dict[str, Plain]]] = {
    1: lambda payload: {**payload, "carry_over": pack_tree(payload["carry_over"])},  # was the tree itself
}
"""Format version -> function that turns its payload into the payload of the next version."""


def encode_state(state: InputState) -> dict[str, Plain]:
    """Encode a state as the plain payload of a file of the current format version.

    Large columns of the buffered batch are not copied: the payload shows their memory, and is to be written before
    they change.

    Raises:
        UnencodableValueError: A value that would not come back exactly, by column and row where it has one.
    """
    carry_over, shared = encode_groups(state.carry_over)
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
        "carry_over": carry_over,
        "shared": shared,
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


def _encode_rng(rng: RngState | None) -> Plain:
    if rng is None:
        return None
    return encode_value({"python": rng.python, "numpy": rng.numpy, "torch": rng.torch}, "rng state")


def _decode(payload: dict[str, Plain]) -> InputState:
    batch, rng, fingerprint = payload["buffered_batch"], payload["rng_state"], payload["fingerprint"]
    rng = None if rng is None else decode_value(rng)
    return InputState(
        global_step=payload["global_step"],
        epoch=payload["epoch"],
        exhausted=payload["exhausted"],
        loader_state=decode_value(payload["loader_state"]),
        # Column by column: a batch may have a column that is named like the tag.
        buffered_batch=None if batch is None else {name: decode_value(column) for name, column in batch.items()},
        carry_over=decode_groups(payload["carry_over"], payload["shared"]),
        rng_state=None if rng is None else RngState(rng["python"], rng["numpy"], rng["torch"]),
        fingerprint=Fingerprint(decode_value(fingerprint["must_match"]), decode_value(fingerprint["recorded"])),
        run_id=payload["run_id"],
        parent_run_id=payload["parent_run_id"],
        written_by=payload["written_by"],
        num_dropped_groups=payload.get("num_dropped_groups", 0),
    )
