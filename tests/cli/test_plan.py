"""`plan`: what it prints, and its exit code. That a resume does it: test_agreement.py."""

from __future__ import annotations

import shutil
from pathlib import Path

from agl_async_ckpt.storage.layout import FILE_NAME, TRACKER_NAME
from tests.cli.conftest import Cli
from tests.folder.made import flip, plain_save, save_step


def test_empty_step_is_no_checkpoint_to_resume_from(cli: Cli, out: Path) -> None:
    """VERL would find that out when its models are built."""
    (out / "global_step_1").mkdir()
    result = cli("plan", out / "global_step_1")
    assert result.code == 1
    assert f"refused: {out / 'global_step_1'} holds nothing to resume from: no model, no data.pt and no " in result.out
    assert f"Newest other complete checkpoint: {out / 'global_step_6'}" in result.out


def test_sound_run_resumes_from_the_selected_step(cli: Cli, out: Path) -> None:
    """Mode, step, why, and what is restored."""
    result = cli("plan", out)
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        f"With trainer.resume_mode=auto and trainer.default_local_dir={out}:\n"
        f"Resuming the input stream from {out / 'global_step_6'}, which {TRACKER_NAME} names: step 6, epoch 1, "
        "2 buffered inputs and 1 prompt group in flight (2 rollouts, 1 finished).\n"
    )
    assert cli("plan", out, "--json").json() == {
        "path": str(out),
        "resume_mode": "auto",
        "action": "resume",
        "step": 6,
        "step_path": str(out / "global_step_6"),
        "repairs_tracker": False,
        "text": result.out.splitlines()[1],
        "warnings": [],
        "notes": [],
    }


def test_tracker_that_misleads_is_repaired(cli: Cli, out: Path) -> None:
    """Said beforehand, and not done."""
    (out / TRACKER_NAME).write_text("12abc")
    result = cli("plan", out)
    assert result.code == 0
    assert "warning: " in result.out
    assert "the newest complete checkpoint: step 6" in result.out
    assert f"The start repairs {TRACKER_NAME}" in result.out
    assert (out / TRACKER_NAME).read_text() == "12abc"
    assert cli("plan", out, "--json").json()["repairs_tracker"] is True


def test_damaged_selected_step_is_refused(cli: Cli, out: Path) -> None:
    """With the error of the start, and the step to take instead."""
    flip(out / "global_step_6" / FILE_NAME, 200)
    result = cli("plan", out)
    assert result.code == 1
    assert "\nrefused: " in result.out
    assert f"Newest other complete checkpoint: {out / 'global_step_4'}" in result.out
    assert cli("plan", out, "--json").json()["action"] == "refuse"


def test_plain_run_resumes_without_a_position_and_says_what_is_skipped(cli: Cli, tmp_path: Path) -> None:
    """The extension was not active when it was saved."""
    plain_save(tmp_path, 4)
    result = cli("plan", tmp_path)
    assert result.code == 0
    assert "the extension was not active then" in result.out
    assert "cannot be reconstructed and are skipped" in result.out
    assert cli("plan", tmp_path, "--json").json()["action"] == "resume_without_position"


def test_step_folder_is_planned_as_an_explicit_resume(cli: Cli, out: Path) -> None:
    """Whatever the tracker says; a file is not what a start takes."""
    result = cli("plan", out / "global_step_2")
    assert result.code == 0
    assert f"With trainer.resume_mode=resume_path and trainer.resume_from_path={out / 'global_step_2'}:" in result.out
    assert "which trainer.resume_from_path names: step 2" in result.out
    assert cli("plan", out / "global_step_2" / FILE_NAME).code == 0, "it stands for its step"
    copy = shutil.copy(out / "global_step_2" / FILE_NAME, out / "copy.pt")
    assert cli("plan", copy).code == 2


def test_copy_of_a_folder_is_told_apart(cli: Cli, out: Path) -> None:
    """It adopts nothing from the server."""
    copy = out.parent / "copy"
    shutil.copytree(out, copy)
    assert "belongs to no run that is on record (a copy?)" in cli("plan", copy).out


def test_dropped_groups_are_warned_about(cli: Cli, out: Path) -> None:
    """As the log of the resume does."""
    save_step(out, 8, num_dropped_groups=3, carry_over=())
    assert "saved with in_flight=drop: 3 prompt groups in flight at that save are not trained" in cli("plan", out).out


def test_empty_folder_trains_from_scratch(cli: Cli, tmp_path: Path) -> None:
    """As a first start does."""
    found = cli("plan", tmp_path, "--json").json()
    assert (found["action"], found["step"], found["step_path"]) == ("scratch", None, None)
    assert found["text"] == f"Training from scratch: there is no checkpoint in {tmp_path}."
