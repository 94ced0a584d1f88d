"""Each error of the package, raised by the code that raises it for users: what docs/errors.md shows."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt import worker
from agl_async_ckpt.agl.inputs.fingerprint import refusal
from agl_async_ckpt.agl.internals import ray_store
from agl_async_ckpt.agl.life import refusing
from agl_async_ckpt.agl.locate import explicit_step
from agl_async_ckpt.agl.stop.signals import StopSignals
from agl_async_ckpt.agl.stop.step_end import StepEnd
from agl_async_ckpt.codec.values import check_batch_encodable
from agl_async_ckpt.config import AsyncCheckpointConfig, read_config
from agl_async_ckpt.exceptions import AsyncCheckpointError, StopRequested, TrainingStopped
from agl_async_ckpt.folder.judgement import judge_step, missing_state
from agl_async_ckpt.folder.lock import OutputLock
from agl_async_ckpt.folder.mismatch import differences
from agl_async_ckpt.folder.stop_request import StopRequest
from agl_async_ckpt.state import Fingerprint
from agl_async_ckpt.storage.commit import commit_state
from agl_async_ckpt.storage.container import read_trailer
from agl_async_ckpt.storage.layout import FILE_NAME, LOADER_FILE_NAME, LOCK_FILE_NAME, STOP_NAME, step_name
from agl_async_ckpt.storage.trailer import BLANK_DIGEST
from agl_async_ckpt.storage.writer import TrailerWriter
from tests.folder.made import begin_run, save_step
from tests.golden.sample import objects, small_state

OUT = Path("checkpoints/my_run")


def make_run() -> None:
    """A run below the current folder, so that paths come out relative: steps 20 and 40, the latter selected."""
    begin_run(OUT, 20)
    for step in (20, 40):
        save_step(OUT, step)


def _config_error() -> None:
    from omegaconf import OmegaConf

    read_config(OmegaConf.create({"agentlightning": {"async_checkpoint": {"on_mismatch": "ignore"}}}))


def _activation_error() -> None:
    worker._load("my_package.hooks.setup")


def _folder_in_use() -> None:
    path = OUT / LOCK_FILE_NAME
    path.write_text(json.dumps({"host": "node-3", "pid": 4711, "since": 1769860800.0}))
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        OutputLock(OUT, wait_s=0)


def _not_found() -> None:
    explicit_step(str(OUT))


def _missing_state() -> None:
    (OUT / step_name(40) / FILE_NAME).unlink()
    error = missing_state(OUT / step_name(40))
    assert error is not None
    raise error


def _refused_step() -> None:
    error = judge_step(OUT / step_name(40)).refusal
    assert error is not None
    raise error


def _damaged() -> None:
    path = OUT / step_name(40) / FILE_NAME
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    _refused_step()


def _foreign() -> None:
    shutil.copy(OUT / step_name(40) / LOADER_FILE_NAME, OUT / step_name(40) / FILE_NAME)
    _refused_step()


def _newer_version() -> None:
    path = OUT / step_name(40) / FILE_NAME
    trailer = read_trailer(path)
    newer = replace(trailer, format_version=trailer.format_version + 1, sha256=BLANK_DIGEST)
    data = path.read_bytes()[: trailer.num_zip_bytes - 2] + b"\0\0"  # the last two: length of the trailer
    with path.open("wb") as file, TrailerWriter(file.fileno()) as writer:
        writer.write(data)
        writer.finish(lambda _: newer)
    _refused_step()


def _mismatch() -> None:
    saved, current = Fingerprint({"dataset length": 7473, "data.seed": 7}), Fingerprint({"data.seed": 1})
    state = small_state(40, fingerprint=saved)
    raise refusal(differences(saved, current), state, OUT / step_name(40))


def _unencodable() -> None:
    from PIL import Image

    image = Image.new("RGB", (2, 2))
    with refusing("step 7 leaves buffered"):
        check_batch_encodable({"question": objects("1+1?", "2+2?"), "image": objects(b"\x89PNG", image)})


def _unwritten() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        commit_state(small_state(60), OUT / step_name(60))


def _no_space(_fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _server_error() -> None:
    import httpx

    from agl_async_ckpt.agl.in_flight.agl_server import list_rollouts

    refuses = httpx.MockTransport(lambda _: httpx.Response(401))
    with httpx.Client(base_url="http://127.0.0.1:8000", transport=refuses) as client:
        list_rollouts(client)


def _training_stopped() -> None:
    from omegaconf import OmegaConf

    section = OmegaConf.create({"default_local_dir": str(OUT), "save_freq": -1})
    end = StepEnd(AsyncCheckpointConfig(), section, save=lambda: end.on_saved(SimpleNamespace(global_steps=40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_store, "get_request", lambda: None)  # no Ray runs here
        end.on_step_begins(SimpleNamespace(global_steps=40))
        (OUT / STOP_NAME).write_text(StopRequest(time.time(), "agl-async-ckpt stop", "node-3", 4711).to_json())
        end.on_step_ends(SimpleNamespace(global_steps=40))
        end.on_step_begins(SimpleNamespace(global_steps=41))


def _stop_requested() -> None:
    with StopSignals(["SIGUSR1"], lambda _: None, grace_s=0) as signals:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(30)  # ended by the second half of the first signal: the time of grace is over
        assert signals.request is not None


def _usage_error() -> None:
    from agl_async_ckpt.cli.target import find_target

    find_target("checkpoints/my_rum")


PROVOKED: dict[str, Callable[[], Any]] = {
    "ConfigError": _config_error,
    "ActivationError": _activation_error,
    "FolderInUseError": _folder_in_use,
    "CheckpointNotFoundError": _not_found,
    "MissingStateError": _missing_state,
    "DamagedStateError": _damaged,
    "ForeignFormatError": _foreign,
    "UnsupportedVersionError": _newer_version,
    "StateMismatchError": _mismatch,
    "UnencodableValueError": _unencodable,
    "StateWriteError": _unwritten,
    "ServerError": _server_error,
    "TrainingStopped": _training_stopped,
    "StopRequested": _stop_requested,
    "UsageError": _usage_error,
}
"""Name of the class -> function that raises it, where `make_run` has made a run."""


def message(name: str) -> str:
    """What an error says, paths relative to the folder of the test."""
    with pytest.raises((AsyncCheckpointError, TrainingStopped, StopRequested)) as found:
        PROVOKED[name]()
    assert found.type.__name__ == name
    return str(found.value).replace(f"{Path.cwd()}/", "")
