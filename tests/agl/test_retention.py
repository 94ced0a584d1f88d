"""One complete checkpoint exists at every instant, also when the run keeps one; nothing unusable stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME
from tests.rig.life import run_life
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer


def models(out_dir: Path) -> list[str]:
    """Steps and roles whose model is there."""
    return sorted(f"{path.parent.name}/{path.name}" for path in out_dir.glob("global_step_*/*") if path.is_dir())


@pytest.mark.parametrize("use_critic", [False, True])
@pytest.mark.parametrize("point", ["save", "actor_saved", "critic_saved", "saved"])
def test_run_that_keeps_one_checkpoint_survives_a_death_inside_a_save(
    point: str, use_critic: bool, server: AglServer, tmp_path: Path
) -> None:
    """Killed between the worker saves or right after them, a run with max_actor_ckpt_to_keep=1 resumes, exactly."""
    if point == "critic_saved" and not use_critic:
        pytest.skip("without a critic there is no such instant")
    run = settings("14/2/5", use_critic=use_critic, max_ckpt_to_keep=1)
    truth = uninterrupted(run, server)
    first = run_life(run, tmp_path, server.url, die_at=(point, 3))
    second = run_life(run, tmp_path, server.url)
    assert second.start == (3 if point == "saved" else 2)
    assert_continues(truth, first, second)


def test_run_that_keeps_one_checkpoint_keeps_one_model(server: AglServer, tmp_path: Path) -> None:
    """Once a step is published, the models of this life's earlier steps are gone, as VERL alone would have it."""
    run = settings("14/2/5", use_critic=True, max_ckpt_to_keep=1)
    run_life(run, tmp_path, server.url, stop_after_step=3)
    assert models(tmp_path) == ["global_step_3/actor", "global_step_3/critic"]


def test_input_file_of_a_step_goes_with_its_model(server: AglServer, tmp_path: Path) -> None:
    """After the next good save no input file is left in a step whose model retention removed."""
    run = settings("14/2/5", max_ckpt_to_keep=2)
    run_life(run, tmp_path, server.url, stop_after_step=4)
    left = sorted(path.parent.name for path in tmp_path.glob(f"*/{FILE_NAME}"))
    assert left == ["global_step_3", "global_step_4"]
    assert sorted(path.parent.name for path in tmp_path.glob(f"*/{SEAL_NAME}")) == left


def test_leftover_temp_of_a_killed_writer_is_removed_at_the_next_start(server: AglServer, tmp_path: Path) -> None:
    """A writer that was killed leaves a temporary file; the next start removes it, and nothing else."""
    run = settings("14/2/5")
    run_life(run, tmp_path, server.url, stop_after_step=1)
    temp = tmp_path / "global_step_1" / f".{FILE_NAME}.12345.0123abcd.tmp"
    temp.write_bytes(b"part of a file")
    other = tmp_path / "global_step_1" / "notes.tmp"
    other.write_bytes(b"mine")
    run_life(run, tmp_path, server.url, stop_after_step=2)
    assert not temp.exists()
    assert other.exists()
