"""`plan`, `verify`, `inspect` and `show` on folders of real runs, against what the real trainer's start then does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import main
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.folder.plan import plan_latest
from agl_async_ckpt.storage.layout import FILE_NAME, TRACKER_NAME
from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.life import run_life, stock_trainer
from tests.rig.record import Life
from tests.rig.runs import settings
from tests.rig.server import AglServer

RUN = settings("24/2/5", rollout_n=2)


def first_life(out_dir: Path, server: AglServer, *, stock: bool = False) -> None:
    """Three steps, a checkpoint of each, then death."""
    server.agents = AgentTable(AgentPlan())
    run_life(RUN, out_dir, server.url, stop_after_step=3, trainer_cls=stock_trainer() if stock else None)


def second_life(out_dir: Path, server: AglServer) -> Life:
    """One step more."""
    return run_life(RUN, out_dir, server.url, stop_after_step=4)


def told(life: Life, level: str) -> list[str]:
    """What the log of a life says at one level."""
    return [text for found, text in life.log if found == level]


def test_plan_is_what_the_log_of_the_resume_says(
    server: AglServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, warnings too; and the other commands find a real folder sound."""
    first_life(tmp_path, server)
    for command in ("inspect", "show", "verify", "plan"):
        assert main([command, str(tmp_path)]) == 0, command
    output = capsys.readouterr().out
    assert f"{tmp_path / 'global_step_3'}: sound (epoch 1, " in output
    assert "Epoch 1: the loader has handed out 10 of 24 rows." in output
    (tmp_path / TRACKER_NAME).write_text("")
    plan = plan_latest(tmp_path)
    assert (plan.action, plan.step_dir, plan.repairs_tracker) == ("resume", tmp_path / "global_step_3", True)
    life = second_life(tmp_path, server)
    assert life.start == 3
    assert plan.text in told(life, "INFO")
    assert [text for text in told(life, "WARNING") if TRACKER_NAME in text] == list(plan.warnings)


def test_refusal_is_the_error_of_the_start(server: AglServer, tmp_path: Path) -> None:
    """The same text, from the command and from the trainer."""
    first_life(tmp_path, server)
    file = tmp_path / "global_step_3" / FILE_NAME
    file.write_bytes(file.read_bytes()[:-1])
    plan = plan_latest(tmp_path)
    assert plan.action == "refuse"
    with pytest.raises(AsyncCheckpointError) as caught:
        second_life(tmp_path, server)
    assert plan.text == str(caught.value)
    assert main(["verify", str(tmp_path)]) == 1


def test_run_of_the_plain_trainer_is_told_apart(
    server: AglServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planned as VERL's own resume, with the warning that the start then logs."""
    first_life(tmp_path, server, stock=True)
    assert main(["verify", str(tmp_path)]) == 1
    assert "all 3 steps here were saved while the extension was not active" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["problems"][0] for row in rows} == {"saved without the input position: the extension was not active"}
    assert main(["show", str(tmp_path)]) == 1
    plan = plan_latest(tmp_path)
    assert (plan.action, plan.step_dir) == ("resume_without_position", tmp_path / "global_step_3")
    life = second_life(tmp_path, server)
    assert life.start == 3
    assert list(plan.warnings) == [text for text in told(life, "WARNING") if "without the input position" in text]
    assert main(["verify", str(tmp_path / "global_step_4")]) == 0
