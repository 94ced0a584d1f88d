"""A training that goes back, or begins anew in its folder, resumes from its own steps; the others are marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import main
from agl_async_ckpt.folder.plan import plan_latest
from agl_async_ckpt.folder.steps import list_steps
from agl_async_ckpt.storage.layout import FILE_NAME, RUN_FILE_NAME, SEAL_NAME, TRACKER_NAME, step_name
from tests.rig.life import run_life
from tests.rig.record import Life
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

RUN = settings("24/2/4")


def back_to(out: Path, step: int, run: RunSettings = RUN) -> RunSettings:
    """Settings of a start that goes back to a step; 0 for a new training."""
    if step == 0:
        return replace(run, resume_mode="disable")
    return replace(run, resume_mode="resume_path", resume_from_path=str(out / step_name(step)))


def abandoned(out: Path) -> list[int]:
    """Steps that `inspect` marks."""
    return [info.step for info in list_steps(out) if info.abandoned]


def torn(out: Path) -> None:
    """As VERL leaves the tracker when it is killed while it writes."""
    (out / TRACKER_NAME).write_text("")


def lose_a_model_file(out: Path) -> None:
    """Of the step that the tracker names."""
    step = (out / TRACKER_NAME).read_text()
    next((out / f"global_step_{step}" / "actor").iterdir()).unlink()


@pytest.fixture
def first(server: AglServer, tmp_path: Path) -> Life:
    """Steps 1 to 6."""
    return run_life(RUN, tmp_path, server.url, stop_after_step=6)


@pytest.mark.parametrize("step", [2, 0])
@pytest.mark.parametrize("damage", [torn, lose_a_model_file])
def test_the_newest_step_of_this_branch_is_taken(
    step: int, damage: Callable[[Path], None], first: Life, server: AglServer, tmp_path: Path
) -> None:
    """Back to step 2, or anew: dies in the save of step 4, and the tracker misleads."""
    second = run_life(back_to(tmp_path, step), tmp_path, server.url, die_at=("actor_saved", 4))
    assert second.start == step
    assert abandoned(tmp_path) == [5, 6]
    damage(tmp_path)
    expected = 3 if damage is torn else 2
    plan = plan_latest(tmp_path)
    assert plan.step_dir == tmp_path / step_name(expected)
    third = run_life(RUN, tmp_path, server.url)
    assert third.start == expected
    assert_continues(uninterrupted(RUN, server), first, second, third)
    assert abandoned(tmp_path) == []  # saved again, each of them


@pytest.mark.parametrize("point", ["loaded", "pulled", "save", "actor_saved"])
def test_a_branch_that_has_saved_nothing_begins_where_it_began(
    point: str, first: Life, server: AglServer, tmp_path: Path
) -> None:
    """Step 2 is where the training went back to, and what the tracker names from then on."""
    second = run_life(back_to(tmp_path, 2), tmp_path, server.url, die_at=(point, 2 if point == "loaded" else 3))
    assert (tmp_path / TRACKER_NAME).read_text() == "2"
    plan = plan_latest(tmp_path)
    assert plan.step_dir == tmp_path / step_name(2)
    assert not plan.warnings
    third = run_life(RUN, tmp_path, server.url)
    assert third.start == 2
    assert_continues(uninterrupted(RUN, server), first, second, third)


@pytest.mark.parametrize("left", ["saved without the extension", "damaged"])
def test_a_branch_that_left_an_unusual_step_begins_where_it_began(
    left: str, first: Life, server: AglServer, tmp_path: Path
) -> None:
    """Such a step names no branch, and must not be taken, or refused, for that."""
    path = tmp_path / step_name(6) / FILE_NAME
    if left == "damaged":
        path.write_bytes(b"damaged")
    else:
        path.unlink()
        (tmp_path / step_name(6) / SEAL_NAME).unlink()
    second = run_life(back_to(tmp_path, 2), tmp_path, server.url, die_at=("pulled", 3))
    third = run_life(RUN, tmp_path, server.url)
    assert third.start == 2
    assert_continues(uninterrupted(RUN, server), first, second, third)


@pytest.mark.parametrize("point", ["loaded", "pulled", "save", "actor_saved"])
def test_a_new_training_that_has_saved_nothing_begins_from_scratch(
    point: str, first: Life, server: AglServer, tmp_path: Path
) -> None:
    """With a warning that names the newest step of the one before."""
    second = run_life(back_to(tmp_path, 0), tmp_path, server.url, die_at=(point, 0 if point == "loaded" else 1))
    plan = plan_latest(tmp_path)
    assert plan.action == "scratch"
    assert "global_step_6" in plan.warnings[0]
    third = run_life(RUN, tmp_path, server.url)
    assert third.start == 0
    assert_continues(uninterrupted(RUN, server), second, third)


def test_a_new_training_whose_only_steps_are_damaged_does_not_begin_again(
    first: Life, server: AglServer, tmp_path: Path
) -> None:
    """It has lost something: the start is refused, and the steps of the one before are named as such."""
    run_life(back_to(tmp_path, 0), tmp_path, server.url, stop_after_step=2)
    for step in (1, 2):
        next((tmp_path / step_name(step) / "actor").iterdir()).unlink()
    plan = plan_latest(tmp_path)
    assert plan.action == "refuse"
    assert "global_step_6: of a branch that was left when the training began anew" in plan.text


def test_a_branch_of_a_branch(first: Life, server: AglServer, tmp_path: Path) -> None:
    """Back to 2, on to 5; back to 4, on to 5; then back to the old 6, whose ancestors come back with it."""
    run_life(back_to(tmp_path, 2), tmp_path, server.url, stop_after_step=5)
    assert abandoned(tmp_path) == [6]
    run_life(back_to(tmp_path, 4), tmp_path, server.url, die_at=("loaded", 4))
    assert abandoned(tmp_path) == [5, 6]
    torn(tmp_path)
    run_life(RUN, tmp_path, server.url, stop_after_step=5)
    assert abandoned(tmp_path) == [6]
    run_life(back_to(tmp_path, 6), tmp_path, server.url, stop_after_step=7)
    assert abandoned(tmp_path) == [3, 4, 5]
    torn(tmp_path)
    assert run_life(RUN, tmp_path, server.url, die_at=("loaded", 7)).start == 7


def test_a_plain_run_records_no_branch(server: AglServer, tmp_path: Path) -> None:
    """However often it is killed: in a save, too, and with a tracker that misleads."""
    for point, step in (("saved", 2), ("actor_saved", 4), ("updated", 6)):
        run_life(RUN, tmp_path, server.url, die_at=(point, step))
        torn(tmp_path)
    run_life(RUN, tmp_path, server.url)
    assert json.loads((tmp_path / RUN_FILE_NAME).read_text())["branch"] == []
    assert abandoned(tmp_path) == []


def test_a_step_that_came_back_is_of_a_branch_that_was_left(first: Life, server: AglServer, tmp_path: Path) -> None:
    """The model of step 6 was away when the run went on from step 5 under other settings of saving."""
    away = (tmp_path / step_name(6) / "actor").rename(tmp_path / "away")
    run = replace(RUN, save_freq=2, resume_mode="auto")
    second = run_life(run, tmp_path, server.url, die_at=("updated", 6))
    assert second.start == 5
    away.rename(tmp_path / step_name(6) / "actor")
    assert abandoned(tmp_path) == [6]
    assert run_life(RUN, tmp_path, server.url, die_at=("loaded", 5)).start == 5


def test_a_fork_that_is_started_again_leaves_its_own_first_steps(
    first: Life, server: AglServer, tmp_path: Path
) -> None:
    """By the same path: what the fork saved before is of another branch."""
    fork, run = tmp_path / "fork", back_to(tmp_path, 2)
    run_life(run, fork, server.url, stop_after_step=5)
    assert abandoned(fork) == []
    assert run_life(run, fork, server.url, stop_after_step=3).start == 2
    assert abandoned(fork) == [4, 5]
    torn(fork)
    assert run_life(RUN, fork, server.url, die_at=("loaded", 3)).start == 3


def test_abandoned_models_go_once_as_many_newer_ones_are_complete(
    first: Life, server: AglServer, tmp_path: Path
) -> None:
    """The number to keep counts steps of the branch that goes on; the others are older."""
    run = replace(RUN, max_ckpt_to_keep=2)
    models = lambda: sorted(path.parent.name for path in tmp_path.glob("global_step_*/actor"))  # noqa: E731
    run_life(back_to(tmp_path, 2, run), tmp_path, server.url, stop_after_step=3)
    assert models() == [step_name(step) for step in (2, 3, 4, 5, 6)]
    run_life(run, tmp_path, server.url, stop_after_step=4)
    assert models() == [step_name(step) for step in (3, 4)]


def test_inspect_marks_what_was_left(
    first: Life, server: AglServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table and in its JSON; `verify` has a note, and finds no problem in the steps."""
    run_life(back_to(tmp_path, 2), tmp_path, server.url, stop_after_step=3)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows if row["abandoned"]] == [4, 5, 6]
    assert all(row["complete"] for row in rows)
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("complete, abandoned")] == ["4", "5", "6"]
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("left when the training went back to step 2") == 3


def test_a_folder_without_that_record_is_one_branch(first: Life, server: AglServer, tmp_path: Path) -> None:
    """Of an older version: all steps count, and going back records it from then on."""
    path = tmp_path / RUN_FILE_NAME
    values = json.loads(path.read_text())
    del values["branch"]
    path.write_text(json.dumps(values))
    assert abandoned(tmp_path) == []
    run_life(back_to(tmp_path, 2), tmp_path, server.url, stop_after_step=3)
    assert abandoned(tmp_path) == [4, 5, 6]
