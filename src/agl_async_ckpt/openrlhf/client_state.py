"""One entry of the checkpoint's client state: the container of an input state, as a tensor of bytes.

DeepSpeed pickles the client state into the model file of the checkpoint, which has no checksum. The container brings
its own: every byte of it is verified before anything in it is unpickled, and what is unpickled are plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agl_async_ckpt._version import __version__
from agl_async_ckpt.exceptions import DamagedStateError, StateMismatchError, UnsupportedVersionError
from agl_async_ckpt.openrlhf.boundary import LAYOUT, Boundary
from agl_async_ckpt.openrlhf.internals import require_supported
from agl_async_ckpt.openrlhf.packed import pack_state, unpack_state
from agl_async_ckpt.openrlhf.samples import to_columns
from agl_async_ckpt.state import Fingerprint, InputState

KEY = "agl_async_ckpt"
"""The entry. While a batch travels it holds a `Boundary`, in a checkpoint a uint8 tensor."""

LOADER_KEY = "data_loader_state_dict"
"""OpenRLHF's own entry for the loader; it stays in place, so that OpenRLHF alone can read our checkpoints."""

_LAYOUT_KEY = "layout"


def materialise(client_states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client states as they go into a checkpoint: the boundary's tail fetched, encoded, with a checksum.

    Client states without a boundary pass unchanged. The given ones are not changed: a best checkpoint may be written
    of the same boundary later.

    Raises:
        UnencodableValueError: A sample holds what the format cannot carry.
    """
    boundary = client_states.get(KEY)
    if not isinstance(boundary, Boundary):
        return dict(client_states)
    tail = boundary.fetch_tail()
    must_match = {**boundary.must_match, **(boundary.must_match_tail if tail else {})}
    state = InputState(
        global_step=client_states["global_step"],
        epoch=client_states["episode"] + 1,
        exhausted=boundary.exhausted,
        loader_state=client_states[LOADER_KEY],
        buffered_batch=to_columns(tail) if tail else None,
        carry_over=(),
        rng_state=None,  # the order of prompts comes from the sampler's own generator, which the loader state holds
        fingerprint=Fingerprint(must_match, {**boundary.recorded, _LAYOUT_KEY: LAYOUT}),
        run_id="",
        written_by={"agl-async-ckpt": __version__, "openrlhf": require_supported(), "torch": str(torch.__version__)},
    )
    return {**client_states, KEY: pack_state(state)}


def read_entry(entry: Any, where: str, global_step: int) -> InputState:
    """Read what `materialise` put into a checkpoint.

    Args:
        entry: The value under `KEY`.
        where: The checkpoint, for error texts.
        global_step: As the client state itself says.

    Raises:
        DamagedStateError, UnsupportedVersionError: The entry cannot be used.
        StateMismatchError: It belongs to another step.
    """
    where = f"{where}, client state {KEY!r}"
    if not isinstance(entry, torch.Tensor) or entry.dtype is not torch.uint8 or entry.dim() != 1:
        raise DamagedStateError(
            f"{where} is damaged: it holds {type(entry).__name__}, not the bytes of an input state."
        )
    state = unpack_state(entry, where)
    layout = state.fingerprint.recorded.get(_LAYOUT_KEY)
    if layout != LAYOUT:
        raise UnsupportedVersionError(
            f"{where} has layout {layout}; this agl-async-ckpt reads layout {LAYOUT}.",
            act=f"Resume with the version that wrote it ({state.written_by.get('agl-async-ckpt', 'unknown')}).",
        )
    if state.global_step != global_step:
        raise StateMismatchError(
            f"{where} belongs to another step.",
            [("entry", f"global_step {state.global_step}"), ("checkpoint", f"global_step {global_step}")],
            "Resume from another checkpoint; this one is mixed.",
        )
    return state
