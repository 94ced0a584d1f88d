"""`verify`: what it prints, and its exit code. Its verdicts are those of a resume: test_agreement.py."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_async_ckpt.storage.layout import (
    ALIVE_FILE_NAME,
    FILE_NAME,
    LOCK_FILE_NAME,
    RUN_FILE_NAME,
    SEAL_NAME,
    TRACKER_NAME,
)
from tests.cli.conftest import Cli
from tests.folder.made import DAMAGES, flip, plain_save, save_step


def test_sound_run_is_said_to_be_sound(cli: Cli, out: Path) -> None:
    """Exit code 0; each step with what it holds."""
    result = cli("verify", out)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        *(f"{out}/global_step_{n}: sound (epoch 1, 2 buffered inputs, 1 prompt group in flight)" for n in (2, 4, 6)),
        f"{out}: tracker and run file sound",
        "3 steps, 3 sound.",
    ]


def test_problem_has_path_reason_and_next_act(cli: Cli, out: Path) -> None:
    """Of one step; the others stay sound."""
    flip(out / "global_step_6" / FILE_NAME, 200)
    result = cli("verify", out)
    assert result.code == 1
    file = out / "global_step_6" / FILE_NAME
    assert (
        f"{file.parent}: 1 problem\n"
        f"  problem: {file} is damaged: its content does not match its checksum.\n"
        f"  next:    Resume from {out / 'global_step_4'} with trainer.resume_mode=resume_path and "
        "trainer.resume_from_path.\n"
    ) in result.out
    assert result.out.endswith("3 steps, 2 sound.\n")
    found = cli("verify", out, "--json").json()
    assert (found["sound"], [step["sound"] for step in found["steps"]]) == (False, [True, True, False])
    (problem,) = found["steps"][2]["problems"]
    assert problem == {
        "path": str(file),
        "reason": f"{file} is damaged: its content does not match its checksum.",
        "next": f"Resume from {out / 'global_step_4'} with trainer.resume_mode=resume_path and "
        "trainer.resume_from_path.",
    }


def test_one_step_is_judged_alone(cli: Cli, out: Path) -> None:
    """What is wrong beside it is not its problem."""
    flip(out / "global_step_6" / FILE_NAME, 200)
    (out / TRACKER_NAME).write_text("")
    assert cli("verify", out / "global_step_4").code == 0
    assert cli("verify", out / "global_step_4" / FILE_NAME).code == 0
    assert cli("verify", out / "global_step_6").code == 1
    found = cli("verify", out / "global_step_4", "--json").json()
    assert [step["decoded"] for step in found["steps"]] == [True]


def test_file_elsewhere_is_judged_for_itself(cli: Cli, out: Path, tmp_path: Path) -> None:
    """Hashed and decoded; that there is nothing to compare it with is noted."""
    copy = shutil.copy(out / "global_step_4" / FILE_NAME, tmp_path / "copy.pt")
    result = cli("verify", copy)
    assert result.code == 0
    assert "no seal, model or tracker was looked at" in result.out
    flip(copy, 200)
    assert cli("verify", copy).code == 1


def test_plain_run_says_that_the_extension_was_not_active(cli: Cli, tmp_path: Path) -> None:
    """Of each step and of all; a resume from one loses inputs."""
    for step in (2, 4):
        plain_save(tmp_path, step)
    result = cli("verify", tmp_path)
    assert result.code == 1
    assert result.out.count("saved while the extension was not active: it holds no input position") == 2
    assert "all 2 steps here were saved while the extension was not active" in result.out
    assert "switch the extension on" in result.out


def test_step_saved_while_the_extension_was_off_is_named(cli: Cli, out: Path) -> None:
    """Its run wrote input states before: a resume refuses it."""
    plain_save(out, 8)
    result = cli("verify", out)
    assert result.code == 1
    assert "global_step_8: 1 problem" in result.out
    assert "though this run wrote them before" in result.out


def test_background_save_without_a_tracker_is_named(cli: Cli, out: Path) -> None:
    """A backend that never writes it."""
    DAMAGES["saved_in_the_background_and_never_published"](out)
    result = cli("verify", out)
    assert result.code == 1
    assert result.out.count("saved in the background, and the tracker does not name it") >= 3


def test_tracker_that_a_start_repairs_is_a_problem_of_the_folder(cli: Cli, out: Path) -> None:
    """VERL alone would die on it."""
    (out / TRACKER_NAME).write_text("")
    result = cli("verify", out)
    assert result.code == 1
    assert f"{out}: 1 problem\n  problem: {out / TRACKER_NAME} holds no number (it is empty)\n" in result.out
    assert f"resumes from {out / 'global_step_6'} and repairs the tracker." in result.out


def test_what_costs_nothing_is_a_note(cli: Cli, out: Path) -> None:
    """Leftovers, an unreadable proof of life, a copied folder, what in_flight=drop has left out, an emptied step."""
    (out / "global_step_6" / f".{FILE_NAME}.123.0123abcd.tmp").write_bytes(b"x")
    (out / ALIVE_FILE_NAME).write_text('{"run_id": "run-1", "lives": [[1, 1' + "0" * 400 + "]]}")
    save_step(out, 7, num_dropped_groups=3, carry_over=())
    (out / "global_step_1").mkdir()
    copy = out.parent / "copy"
    shutil.copytree(out, copy)
    result = cli("verify", copy)
    assert result.code == 0
    for text in (
        "left behind by a writer that was killed",
        f"{ALIVE_FILE_NAME}: cannot be read",
        "a copy of another run's folder",
        "in_flight=drop: 3 prompt groups",
        "no model and no input position",
    ):
        assert text in result.out, text
    assert "left behind" not in cli("verify", out, "--json").json()["problems"]


def test_step_that_is_asked_for_and_holds_nothing_is_not_sound(cli: Cli, out: Path) -> None:
    """`verify STEP && cp -a STEP archive/` must not archive an empty shell; in its folder it is counted apart."""
    (out / "global_step_1").mkdir()
    result = cli("verify", out / "global_step_1")
    assert (result.code, "nothing to resume from" in result.out) == (1, True)
    assert cli("verify", out / "global_step_1", "--json").json()["sound"] is False
    result = cli("verify", out)
    assert result.code == 0
    assert result.out.endswith("4 steps, 3 sound, 1 with nothing to resume from.\n")


def test_step_that_is_being_saved_is_not_sound_yet(cli: Cli, out: Path) -> None:
    """Nor may it be archived; in its folder it is a note."""
    (out / LOCK_FILE_NAME).write_text('{"host": "node-1", "pid": 4711, "since": 1.0}')
    (out / "global_step_6" / SEAL_NAME).unlink()
    (out / TRACKER_NAME).write_text("4")
    with (out / LOCK_FILE_NAME).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cli("verify", out / "global_step_6").code == 1
        assert cli("verify", out).code == 0


def warm_up(cli: Cli, out: Path) -> None:
    """Import all that the commands import: a stranger may not be able to."""
    assert [cli(command, out).code for command in ("verify", "plan", "show")] == [0, 0, 0]


def test_step_that_may_not_be_looked_into_is_a_problem_of_that_step(
    cli: Cli, out: Path, stranger: Callable[[], None]
) -> None:
    """Of another user, perhaps: the other steps are judged all the same, and so does a start refuse it by name."""
    warm_up(cli, out)
    (out / "global_step_6").chmod(0)
    stranger()
    result = cli("verify", out)
    assert result.code == 1
    assert "2 sound" in result.out
    assert f"{out / 'global_step_6' / FILE_NAME} cannot be read: Permission denied." in result.out
    result = cli("plan", out)
    assert result.code == 1
    assert f"refused: {out / 'global_step_6' / FILE_NAME} cannot be read: Permission denied." in result.out
    assert f"Newest other complete checkpoint: {out / 'global_step_4'}" in result.out


def test_run_file_that_may_not_be_read_is_not_to_be_removed(cli: Cli, out: Path, stranger: Callable[[], None]) -> None:
    """It is sound, and another user's."""
    warm_up(cli, out)
    (out / RUN_FILE_NAME).chmod(0)
    stranger()
    result = cli("plan", out)
    assert result.code == 1
    assert f"refused: {out / RUN_FILE_NAME} cannot be read: Permission denied.\n" in result.out
    assert "remove it" not in result.out


def test_folder_in_use_is_noted(cli: Cli, out: Path) -> None:
    """A step that is being saved looks unfinished."""
    (out / LOCK_FILE_NAME).write_text('{"host": "node-1", "pid": 4711, "since": 1.0}')
    with (out / LOCK_FILE_NAME).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "in use by process 4711 on node-1" in cli("verify", out).out
        assert "in use by process 4711 on node-1" in cli("plan", out).out
    assert "in use" not in cli("verify", out).out


def test_torn_run_file_is_a_problem_with_its_own_act(cli: Cli, out: Path) -> None:
    """A start refuses it."""
    (out / RUN_FILE_NAME).write_text("{")
    result = cli("verify", out)
    assert result.code == 1
    assert "  next:    It names the run of this output folder. Restore it, or remove it" in result.out


def test_run_without_a_save_yet_is_sound(cli: Cli, out: Path) -> None:
    """Its folder is a run's; there is nothing wrong with it."""
    DAMAGES["no_steps_and_no_tracker"](out)
    result = cli("verify", out)
    assert (result.code, result.out) == (0, f"{out}: tracker and run file sound\n0 steps, 0 sound.\n")


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_json_names_path_reason_and_act_of_every_problem(cli: Cli, out: Path, name: str) -> None:
    """And the exit code says whether there are any."""
    DAMAGES[name](out)
    result = cli("verify", out, "--json")
    found = result.json()
    problems = [*found["problems"], *(problem for step in found["steps"] for problem in step["problems"])]
    assert result.code == (1 if problems else 0)
    assert found["sound"] == (not problems)
    for problem in problems:
        assert set(problem) == {"path", "reason", "next"}
        assert all(problem.values())
    assert cli("verify", out).code == result.code
