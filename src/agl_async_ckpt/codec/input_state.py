"""`InputState` <-> the payload of the file."""

from __future__ import annotations

import zlib

from agl_async_ckpt.codec.decode import Plain, decode_value, require_tree
from agl_async_ckpt.codec.groups import decode_groups, encode_groups
from agl_async_ckpt.codec.values import encode_batch, encode_value
from agl_async_ckpt.exceptions import DamagedStateError
from agl_async_ckpt.state import Fingerprint, InputState, RngState


def encode_state(state: InputState) -> dict[str, Plain]:
    """Encode a state as the plain payload of a file.

    Large columns of the buffered batch are not copied: the payload shows their memory, and is to be written before
    they change.

    Raises:
        UnencodableValueError: A value that would not come back exactly, by column and row where it has one.
    """
    carry_over, shared = encode_groups(state.carry_over)
    return {
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
    """Rebuild the state. Keys that are not known are ignored.

    Raises:
        DamagedStateError: Not a payload of this format.
    """
    try:
        require_tree(payload)
        return _decode(payload)
    except DamagedStateError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, zlib.error) as error:
        raise DamagedStateError(f"Input state cannot be decoded: {type(error).__name__}: {error}") from error


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
        num_dropped_groups=payload["num_dropped_groups"],
    )
