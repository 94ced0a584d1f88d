"""`verify` and `plan` say what a resume does: on a table of damaged folders, and in a real run's log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agl_async_ckpt.agl.in_flight.keeper import Outcome
from agl_async_ckpt.agl.locate import accept
from agl_async_ckpt.agl.report import ResumeReport
from agl_async_ckpt.agl.resume import verified_state
from agl_async_ckpt.cli.findings import verify_folder, verify_step
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.folder.decision import decide_latest
from agl_async_ckpt.folder.plan import plan_explicit, plan_latest
from agl_async_ckpt.folder.run_identity import read_run
from agl_async_ckpt.folder.steps import list_steps
from tests.folder.made import DAMAGES, run_folder


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run folder to which one thing has happened."""
    out = run_folder(tmp_path / "out")
    DAMAGES[request.param](out)
    return out


def resume(out: Path) -> tuple[str, Path | None]:
    """What the resume's own functions do with an output folder: the action, and the step or the error's text."""
    try:
        decision = decide_latest(out)
        step_dir = accept(decision)
        state = None if step_dir is None else verified_state(step_dir, "error")
        read_run(out)  # as `begin_life` does before anything is loaded
    except AsyncCheckpointError as error:
        return "refuse", Path(str(error))
    if step_dir is None:
        return "scratch", None
    return ("resume" if state is not None else "resume_without_position"), step_dir


def files_of(out: Path) -> dict[Path, tuple[int, int]]:
    """Every file with its time and size."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in out.rglob("*")}


def test_plan_says_what_a_resume_does_and_changes_nothing(damaged: Path) -> None:
    """Action, step and, where it is refused, the very text of the error."""
    before = files_of(damaged)
    plan = plan_latest(damaged)
    assert files_of(damaged) == before
    action, found = resume(damaged)
    assert plan.action == action
    assert (Path(plan.text) if action == "refuse" else plan.step_dir) == found


def test_plan_of_a_step_says_what_a_resume_from_it_does(damaged: Path) -> None:
    """With trainer.resume_mode=resume_path."""
    for info in list_steps(damaged):
        try:
            state = verified_state(info.path, "error")
            wanted = "resume_without_position" if state is None else "resume"
        except AsyncCheckpointError as error:
            wanted = str(error)
        plan = plan_explicit(info.path)
        assert (plan.text if plan.action == "refuse" else plan.action) == wanted


def test_step_is_sound_exactly_if_a_resume_from_it_restores_its_position(damaged: Path) -> None:
    """A step that retention has emptied is no problem, and nothing to resume from either."""
    steps = list_steps(damaged)
    before = files_of(damaged)
    for info in steps:
        report = verify_step(info, steps)
        try:
            exact = verified_state(info.path, "error") is not None
        except AsyncCheckpointError:
            exact = False
        assert (report.sound and report.position is not None) == exact
        assert all(finding.reason and finding.act for finding in report.problems)
    assert files_of(damaged) == before


def test_folder_has_a_problem_exactly_if_a_start_warns_repairs_or_refuses_for_it(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside the steps: tracker and run file."""
    report = verify_folder(damaged, list_steps(damaged))
    with caplog.at_level(logging.WARNING):
        try:
            accept(decide_latest(damaged))
            read_run(damaged)
        except AsyncCheckpointError:
            troubled = True
        else:
            troubled = bool(caplog.messages)
    assert report.sound != troubled
    assert all(finding.reason and finding.act for finding in report.problems)


def test_plan_prints_the_text_that_the_log_of_the_resume_has(tmp_path: Path) -> None:
    """From the trailer beforehand, from the state afterwards."""
    out = run_folder(tmp_path / "out")
    decision = decide_latest(out)
    assert decision.step_dir is not None
    state = verified_state(decision.step_dir, "error")
    assert state is not None
    report = ResumeReport(decision.step_dir, decision.reason, state, Outcome())
    assert plan_latest(out).text == report.restored_text()
