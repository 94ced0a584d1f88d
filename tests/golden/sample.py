"""One state with a value of every kind the format carries, and exact comparison. Golden files hold this state.

`make golden` writes them, once per format version and never again: one under numpy 1, one under numpy 2.
"""

from __future__ import annotations

import datetime as dt
import math
import shutil
import struct
import tempfile
from dataclasses import fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agl_async_ckpt.codec.events import PackedEvents
from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.state import Fingerprint, FinishedRollout, InFlightRollout, InputState, PromptGroup, RngState

NUMPY_1, NUMPY_2 = (Path(__file__).parent / f"input_state_v{FORMAT_VERSION}_numpy{major}.pt" for major in (1, 2))


def objects(*items: Any) -> np.ndarray[Any, Any]:
    """A one-dimensional object array of exactly these items."""
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def sample_batch() -> dict[str, Any]:
    """Two rows with each kind of column."""
    noon = dt.datetime(2024, 2, 29, 12, 30, 15, 7)
    berlin = dt.timezone(dt.timedelta(hours=1))
    return {
        "input_ids": torch.arange(12).reshape(2, 6),
        "mask": torch.tensor([[True], [False]]),
        "bf16": torch.tensor([[1.5, float("nan")], [-0.0, float("inf")]], dtype=torch.bfloat16),
        "float8": torch.tensor([[0.5], [-2.0]]).to(torch.float8_e4m3fn),
        "scalar_tensor": [torch.tensor(7, dtype=torch.int8), torch.tensor(0.25)],
        "float32": np.array([[1.5, -0.0], [math.nan, math.inf]], dtype=np.float32),
        "float16": np.array([0.5, 65504.0], dtype=np.float16),
        "big_endian": np.array([1, 258], dtype=">i4"),
        "int8": np.array([-128, 127], dtype=np.int8),
        "time": np.array(["2024-02-29T12:30:15", "NaT"], dtype="datetime64[s]"),
        "text": np.array(["Ärger", "日本\U0001f600"]),
        "raw": np.array([b"ab", b"\x00\xff"]),
        "record": np.array([(1, 2.5), (3, math.nan)], dtype=[("id", "<i4"), ("score", "<f8")]),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "messages": objects(
            [{"role": "user", "content": "hi", "images": None}],
            [{"role": "user", "content": "a\ud800b", "images": []}, {"role": "system"}],
        ),
        "media": objects({"image": ["https://example.org/a.png"], "video": None}, {"image": []}),
        "ragged": objects([1, 2, 3], []),
        "token_ids": objects(list(range(200)), [0.5] * 40),
        "bytes": objects(b"", b"\x89PNG" + bytes(2000)),
        "numbers": objects(2**200, -(2**63)),
        "scalars": objects(np.float64(0.1), np.int16(-3)),
        "more_scalars": objects(np.str_("x\x00"), np.datetime64("2024-02-29", "D")),
        "dates": objects(noon, noon.replace(tzinfo=berlin, fold=1)),
        "more_dates": objects(dt.date(2024, 2, 29), (dt.time(1, 2), dt.timedelta(days=-1, microseconds=5))),
        "decimals": objects(Decimal("1.10"), Decimal("-Infinity")),
        "nested_arrays": objects(np.array(3.5), objects(np.zeros((0, 3)), None)),
        "keys": objects({1: "a", None: "b", (2, True): "c"}, {"$type": "tuple", "items": 1}),
        "sets": objects({1, 2}, frozenset({"a"})),
        "plain_list": [None, {"a": [True, 1, 1.0, complex(0, -1)]}],
    }


def sample_state(step: int = 3) -> InputState:
    """A state after `step` steps: a tail of two inputs, one group of two rollouts in flight, one of them finished."""
    task = {"question": "1+1?", "media": [None, [], "https://example.org/b.png"], "weight": 1.0}
    events = [
        {"type": "model", "token_ids": list(range(300)), "log_probs": [-0.5, math.nan, -1e-300], "z": 1, "a": 1.0},
        {"type": "reward", "value": True},
    ]
    rollouts = tuple(
        InFlightRollout(
            enqueued={
                "data_id": "data-0",
                "rollout_id": f"rollout-{index}",
                "step": step,
                "sample_idx_in_step": index,
                "enqueue_time": 1700000000.25,
                "input": dict(task),
                "running_at": None,
                "finished_at": 1700000001.5 if index else None,
            },
            request={"input": dict(task), "is_train": True, "config": {"image": "agent:1"}, "metadata": {"n": index}},
            finished=FinishedRollout({"rollout_id": "rollout-1", "state": "succeeded"}, events, events[:1])
            if index
            else None,
        )
        for index in range(2)
    )
    python_state = (3, tuple(range(625)), None)
    numpy_state = ("MT19937", np.arange(624, dtype=np.uint32), 5, 1, 0.25)
    return InputState(
        global_step=step,
        epoch=2,
        exhausted=False,
        loader_state={"_snapshot": {"_snapshot_step": 4, "worker_0": None}, "_steps_since_snapshot": 0},
        buffered_batch=sample_batch(),
        carry_over=(PromptGroup("data-0", rollouts),),
        rng_state=RngState(python_state, numpy_state, torch.arange(16, dtype=torch.uint8)),
        fingerprint=Fingerprint({"num_rows": 40, "columns": ["a", "b"], "seed": 7}, {"workers": 8}),
        run_id="run-1",
        parent_run_id="run-0",
        written_by={"agl-async-ckpt": "0.1.0"},
    )


def small_state(step: int = 3, **changes: Any) -> InputState:
    """A state with next to nothing in it."""
    values: dict[str, Any] = {
        "epoch": 1,
        "exhausted": False,
        "loader_state": {"position": 4},
        "buffered_batch": {"id": objects("row-4")},
        "carry_over": (),
        "rng_state": None,
        "fingerprint": Fingerprint({"seed": 7}),
        "run_id": "run-1",
    }
    return InputState(global_step=step, **{**values, **changes})


def assert_same(found: Any, wanted: Any, where: str = "value") -> None:
    """Assert equality in value, type, dtype, shape, key order and sign of zero, with NaN equal to NaN."""
    found, wanted = (item.unpack() if isinstance(item, PackedEvents) else item for item in (found, wanted))
    assert type(found) is type(wanted), f"{where}: {type(found)} for {type(wanted)}"
    if is_dataclass(wanted) and not isinstance(wanted, type):
        for field in fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name), f"{where}.{field.name}")
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape, found.device) == (wanted.dtype, wanted.shape, torch.device("cpu")), where
        assert _tensor_bytes(found) == _tensor_bytes(wanted), where
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert found.dtype.byteorder == wanted.dtype.byteorder, where
        if wanted.flags.forc:
            assert found.flags.f_contiguous == wanted.flags.f_contiguous, where
        if wanted.dtype == object:
            for index, (item, other) in enumerate(zip(found.ravel(), wanted.ravel(), strict=True)):
                assert_same(item, other, f"{where}[{index}]")
        else:
            assert found.tobytes() == wanted.tobytes(), where
        assert found.flags.writeable, where
    elif isinstance(wanted, np.generic):
        assert found.dtype == wanted.dtype, where
        assert found.tobytes() == wanted.tobytes(), where
    elif isinstance(wanted, dict):
        assert len(found) == len(wanted), where
        for (key, item), (other_key, other) in zip(found.items(), wanted.items(), strict=True):
            assert_same(key, other_key, f"{where} key")
            assert_same(item, other, f"{where}[{other_key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, (item, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(item, other, f"{where}[{index}]")
    elif isinstance(wanted, (set, frozenset)):
        key = repr
        assert_same(sorted(found, key=key), sorted(wanted, key=key), where)
    elif isinstance(wanted, float):
        assert struct.pack(">d", found) == struct.pack(">d", wanted), where
    elif isinstance(wanted, (Decimal, complex)):
        assert repr(found) == repr(wanted), where
    else:
        assert found == wanted, where
        if isinstance(wanted, (dt.datetime, dt.time)):
            assert (found.fold, repr(found.tzinfo)) == (wanted.fold, repr(wanted.tzinfo)), where


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


if __name__ == "__main__":
    from agl_async_ckpt.storage.commit import commit_state

    state = sample_state()
    with tempfile.TemporaryDirectory() as folder:
        written = commit_state(state, Path(folder) / f"global_step_{state.global_step}")
        shutil.copy(written, NUMPY_1 if np.__version__.startswith("1.") else NUMPY_2)
