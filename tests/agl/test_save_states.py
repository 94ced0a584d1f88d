"""Every state that a save leaves on disk on its way is one that a start resumes from, exactly, also with one kept."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, TRACKER_NAME
from tests.rig.life import run_life
from tests.rig.record import Life
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings
from tests.rig.standins import WorkerGroup

WATCHED = ("agl_async_ckpt", "verl/trainer", "verl/utils/checkpoint", "tests/rig/standins", "shutil.py")
"""Code that changes the output folder: between any two of its lines the process can be killed."""


def look(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Everything below a folder that a later start could tell apart."""
    found: list[tuple[str, int, int]] = []
    for place, _, names in os.walk(folder):
        found.append((place, 0, 0))
        for name in names:
            info = (Path(place) / name).lstat()
            found.append((f"{place}/{name}", info.st_size, info.st_mtime_ns))
    return tuple(sorted(found))


class States:
    """Copies of an output folder, one for each state it was in while a save ran.

    A killed process leaves what the kernel has, and that is what a copy taken between two of its lines shows.
    """

    def __init__(self, out_dir: Path, copies: Path) -> None:
        self._out_dir, self._copies = out_dir, copies
        self._last: Any = None
        self.found: list[tuple[Path, str]] = []

    def watch(self, step: int) -> Callable[[str, int], bool]:
        """A `die_at` that watches the save of `step` and ends the life after it."""

        def at(point: str, number: int) -> bool:
            if (point, number) == ("save", step):
                self._last = look(self._out_dir)
                sys.settrace(self._call)
            if (point, number) == ("saved", step):
                sys.settrace(None)
                return True
            return False

        return at

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in WATCHED) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        now = look(self._out_dir)
        if now != self._last:
            self._last = now
            copy = self._copies / str(len(self.found))
            shutil.copytree(self._out_dir, copy, symlinks=True)
            self.found.append((copy, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"))
        return self._line

    def put_back(self, copy: Path) -> None:
        """Make the output folder what it was; it stays the same folder, so it stays the same run."""
        for entry in self._out_dir.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        shutil.copytree(copy, self._out_dir, symlinks=True, dirs_exist_ok=True)


def assert_every_state_resumes(
    run: RunSettings, states: States, first: Life, truth: Life, server: AglServer, out_dir: Path, steps: tuple[int, int]
) -> None:
    """Each state leads to the step before the save or to the saved one, never back, and the stream goes on."""
    starts: list[int] = []
    for copy, where in states.found:
        states.put_back(copy)
        server.reset()
        try:
            second = run_life(run, out_dir, server.url, stop_after_step=steps[1] + 1, pull_until=max(truth.steps))
            assert second.start in steps
            assert_continues(truth, first, second)
            left = [path.name for path in out_dir.rglob("*.tmp")]
            assert not left
        except BaseException as error:
            error.add_note(f"the process was killed before {where}")
            raise
        starts.append(second.start)
    assert starts == sorted(starts)
    assert set(starts) == {*steps}


@pytest.mark.parametrize(
    "use_critic", [pytest.param(False, marks=pytest.mark.slow), True], ids=["actor", "actor and critic"]
)
def test_run_that_keeps_one_checkpoint_resumes_from_every_state_of_a_save(
    server: AglServer, tmp_path: Path, use_critic: bool
) -> None:
    """VERL's own retention, max_actor_ckpt_to_keep=1: killed anywhere in a save, also while the old model goes."""
    run = settings("12/2/5", use_critic=use_critic, max_ckpt_to_keep=1, shuffle=True)
    truth = uninterrupted(run, server)
    out_dir = tmp_path / "run"
    states = States(out_dir, tmp_path / "states")
    first = run_life(run, out_dir, server.url, die_at=states.watch(3))
    assert len(states.found) > (20 if use_critic else 12)
    names = {path.name for copy, _ in states.found for path in copy.rglob("*")}
    assert names >= {FILE_NAME, SEAL_NAME, TRACKER_NAME, "data.pt", "actor"}
    assert_every_state_resumes(run, states, first, truth, server, out_dir, (2, 3))


@pytest.mark.slow
def test_folder_that_is_used_again_never_pairs_new_inputs_with_an_old_model(server: AglServer, tmp_path: Path) -> None:
    """A step folder of another A is written again: killed anywhere, inputs and weights are of one save.

    The first run, A=6, had reached step 4. A new run with A=5 starts from scratch in the same folder and is killed
    while it writes step 3 over the old one.
    """
    old = settings("12/2/6", shuffle=True, max_ckpt_to_keep=1, use_critic=True)
    run = replace(old, A=5)
    out_dir = tmp_path / "run"
    run_life(old, out_dir, server.url, stop_after_step=3)
    server.reset()
    truth = uninterrupted(run, server)
    run_life(replace(run, resume_mode="disable"), out_dir, server.url, stop_after_step=2)
    server.reset()
    states = States(out_dir, tmp_path / "states")
    first = run_life(run, out_dir, server.url, die_at=states.watch(3))
    assert first.start == 2
    begin = run_life(run, tmp_path / "begin", server.url, stop_after_step=2)
    whole = Life(steps={**begin.steps, **first.steps}, saves={**begin.saves, **first.saves})
    assert_every_state_resumes(run, states, whole, truth, server, out_dir, (2, 3))


def test_retention_of_the_rig_is_verls_own() -> None:
    """The worker groups of these tests keep and remove models as VERL's checkpoint managers do, by the same code."""
    manager = WorkerGroup("actor")._retention
    assert isinstance(manager, BaseCheckpointManager)
    for method in ("ensure_checkpoint_capacity", "register_checkpoint", "remove_previous_save_local_path"):
        assert getattr(type(manager), method) is getattr(BaseCheckpointManager, method)
