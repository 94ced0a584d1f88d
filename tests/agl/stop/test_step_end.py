"""Saves out of turn: by the clock, and before the machine's time runs out."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.agl.trainer import extend
from agl_async_ckpt.config import AsyncCheckpointConfig
from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.life import run_life, stock_trainer
from tests.rig.runs import settings
from tests.rig.server import AglServer

RUN = settings("8/2/4", save_freq=-1)
"""Four steps, none of which is saved."""
NUM_STEPS = 4
MLP = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
AWS = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


@pytest.fixture(autouse=True)
def _endless_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MLP, AWS):
        monkeypatch.delenv(name, raising=False)


def every(minutes: float, **changes: Any) -> Any:
    return replace(RUN, extension={"save_every_minutes": minutes}, **changes)


@pytest.mark.parametrize("save_freq", [-1, 1, 2])
def test_step_is_saved_once_its_time_has_come(server: AglServer, tmp_path: Path, save_freq: int) -> None:
    """Whatever `save_freq` says, and once: here each step takes longer than the time."""
    life = run_life(every(1e-9, save_freq=save_freq), tmp_path, server.url)
    assert list(life.saves) == list(life.steps) == [1, 2, 3, 4]
    assert sum(text.startswith("Saved the input position") for _, text in life.log) == NUM_STEPS


def test_time_that_has_not_come_saves_the_last_step_only(server: AglServer, tmp_path: Path) -> None:
    """As `save_freq` does; without either nothing is saved."""
    assert list(run_life(every(60), tmp_path / "60", server.url).saves) == [NUM_STEPS]
    server.reset()
    assert run_life(RUN, tmp_path / "off", server.url).saves == {}


def test_step_without_a_batch_is_saved_when_its_time_has_come(server: AglServer, tmp_path: Path) -> None:
    """Before the next one begins."""
    server.agents = AgentTable(AgentPlan(step_outcome={2: "overlong"}))
    life = run_life(every(1e-9), tmp_path, server.url)
    assert life.steps[2].updated == []
    assert list(life.saves) == [1, 2, 3, 4]


@pytest.mark.parametrize("variable", [MLP, AWS])
def test_each_step_is_saved_when_the_capacity_is_about_to_expire(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """VERL's own decision; with time enough, or with saving off, nothing is saved out of turn."""
    run = replace(RUN, save_freq=100)
    monkeypatch.setenv(variable, str(int(time.time()) + 30))
    assert list(run_life(run, tmp_path / "soon", server.url).saves) == [1, 2, 3, 4]
    server.reset()
    assert run_life(RUN, tmp_path / "off", server.url).saves == {}
    server.reset()
    monkeypatch.setenv(variable, str(int(time.time()) + 3600))
    assert list(run_life(run, tmp_path / "later", server.url).saves) == [NUM_STEPS]
    server.reset()
    redundant = replace(run, overrides=("trainer.esi_redundant_time=4000",))
    assert list(run_life(redundant, tmp_path / "redundant", server.url).saves) == [1, 2, 3, 4]


def test_variable_that_holds_no_time_is_ignored(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not end a training."""
    monkeypatch.setenv(AWS, "soon")
    assert list(run_life(replace(RUN, save_freq=100), tmp_path, server.url).saves) == [NUM_STEPS]


def test_save_that_is_due_comes_before_a_validation(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take longer than the machine has; the step is not saved again after it."""
    order: list[str] = []

    class Noting(stock_trainer()):
        def _validate(self, *args: Any, **kwargs: Any) -> Any:
            order.append(f"validated {self.global_steps}")
            return {"x": 1.0}

        def _save_checkpoint(self) -> Any:
            order.append(f"saved {self.global_steps}")
            return super()._save_checkpoint()

    monkeypatch.setenv(MLP, str(time.time() + 30))
    run = replace(RUN, save_freq=100, overrides=("trainer.test_freq=2",))
    run_life(run, tmp_path, server.url, trainer_cls=extend(Noting))
    assert order == ["saved 1", "saved 2", "validated 2", "saved 3", "saved 4", "validated 4"]


def test_verl_decides_about_the_capacity_in_seconds() -> None:
    """Contract: its function takes the longest step and the redundant time, by these names."""
    from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi

    parameters = inspect.signature(should_save_ckpt_esi).parameters
    assert {"max_steps_duration", "save_ckpt_duration", "redundant_time"} <= set(parameters)


def test_settings_of_saving_and_stopping_are_written_as_in_the_config() -> None:
    """In the line that says what is active."""
    text = AsyncCheckpointConfig(save_every_minutes=7.5).summary()
    assert "save_every_minutes=7.5, stop_signals=[SIGTERM,SIGUSR1], stop_grace_s=1800.0" in text
