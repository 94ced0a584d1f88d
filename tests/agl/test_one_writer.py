"""Two trainers and one output folder: only one writes, whatever the file system knows of locks."""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from agl_async_ckpt.agl import resume
from agl_async_ckpt.exceptions import DamagedStateError, FolderInUseError
from agl_async_ckpt.folder.lock import OutputLock
from agl_async_ckpt.folder.run_identity import begin_life, read_run
from agl_async_ckpt.folder.steps import list_steps
from agl_async_ckpt.storage.layout import LOCK_FILE_NAME, RUN_FILE_NAME, TRACKER_NAME
from tests.rig.child import ChildLife
from tests.rig.life import run_life
from tests.rig.record import lineage, rows_pulled
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings


@pytest.fixture
def run() -> RunSettings:
    """A tail and two groups in flight at each step; a start waits for nobody."""
    return settings("14/4/6", epochs=2, shuffle=True, extension={"lock_wait_s": 0.0})


def test_start_beside_a_live_trainer_is_refused_and_changes_nothing(
    run: RunSettings, server: AglServer, tmp_path: Path
) -> None:
    """Real processes: the first stands still in step 2; once it is killed, the same start resumes exactly."""
    out = tmp_path / "out"
    with ChildLife(run, out, server.url, tmp_path / "log", stop_at=("trained", 2)) as first:
        first.wait_stopped()
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
        rollouts = set(server.rollouts())
        with pytest.raises(FolderInUseError) as caught:
            run_life(run, out, server.url)
        assert f"pid:   {first.process.pid}" in str(caught.value)
        assert f"host:  {socket.gethostname()}" in str(caught.value)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
        assert set(server.rollouts()) == rollouts
        assert [step.complete for step in list_steps(out)] == [True], "a look needs no lock"
        dead = first.kill()
    second = run_life(run, out, server.url)
    assert rows_pulled(lineage(dead, second)) == rows_pulled(lineage(uninterrupted(run, server)))


def test_checkpoint_of_a_live_run_can_be_resumed_elsewhere(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """A fork reads the other folder and writes its own: it needs no lock of the first, and leaves it as it is."""
    life = run_life(run, tmp_path / "a", server.url, stop_after_step=2)
    before = {path.name for path in (tmp_path / "a").rglob("*")}
    with_lock = OutputLock(tmp_path / "a", wait_s=0)
    fork = replace(run, resume_mode="resume_path", resume_from_path=str(tmp_path / "a" / "global_step_2"))
    second = run_life(fork, tmp_path / "b", server.url, stop_after_step=4)
    assert with_lock._fd is not None
    assert {path.name for path in (tmp_path / "a").rglob("*")} == before
    assert_continues(uninterrupted(run, server), life, second, until=4)


def test_validation_alone_takes_no_lock_and_writes_nothing(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """It may look at a checkpoint while the run goes on elsewhere."""
    run_life(run, tmp_path, server.url, stop_after_step=2)
    (tmp_path / TRACKER_NAME).write_text("")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    run_life(replace(run, val_before_train=True, overrides=("trainer.val_only=true",)), tmp_path, server.url)
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_folder_is_free_once_fit_has_ended(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """Also in a process that goes on, and also if `fit` ended with an error."""
    for stop in (1, None):
        run_life(run, tmp_path, server.url, stop_after_step=stop)
        with (tmp_path / LOCK_FILE_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("when", ["pulled", "actor_saved"])
def test_older_life_stops_where_locks_are_absent(
    run: RunSettings, server: AglServer, tmp_path: Path, when: str
) -> None:
    """A newer life begins while the older one trains or saves: the older one seals nothing, and says who took over."""

    def newer_begins(point: str, step: int) -> bool:
        if (point, step) == (when, 2):
            begin_life(tmp_path)
        return False

    with pytest.raises(FolderInUseError) as caught:
        run_life(run, tmp_path, server.url, die_at=newer_begins)
    newest = read_run(tmp_path)
    assert newest is not None
    assert newest.life == 2
    assert f"life 2, process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
    assert [step.step for step in list_steps(tmp_path) if step.seal is not None] == [1]
    if when == "pulled":  # before the save began
        assert [step.step for step in list_steps(tmp_path)] == [1]
        assert (tmp_path / TRACKER_NAME).read_text() == "1"


def test_lives_of_a_run_are_counted(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """One number for each start that trains; a refused one is none."""
    run_life(run, tmp_path, server.url, stop_after_step=1)
    run_life(run, tmp_path, server.url, stop_after_step=2)
    found = read_run(tmp_path)
    assert found is not None
    assert found.life == 2
    state = tmp_path / "global_step_2" / resume.FILE_NAME
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(DamagedStateError):
        run_life(run, tmp_path, server.url)
    assert read_run(tmp_path) == found
    assert (tmp_path / RUN_FILE_NAME).exists()
