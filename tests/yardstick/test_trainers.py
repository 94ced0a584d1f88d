"""Trainers of users that replace a method, with or without the classes before it: they train as alone, and resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import ServerError
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, STOP_NAME, step_name
from tests.rig.in_flight import saved_state
from tests.rig.life import run_life, stock_trainer
from tests.rig.record import Recorder
from tests.rig.runs import settings
from tests.rig.server import AglServer
from tests.yardstick.scene import (
    Interruption,
    Scene,
    alone,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)


def validation_saves(base: type) -> type:
    """Each validation ends with a save, also the one before the first step."""

    class Own(base):
        def _validate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super()._validate(*args, **kwargs)
            self._save_checkpoint()
            return metrics

    return Own


def own_fit(base: type) -> type:
    """agent-lightning's loop, and nothing of the classes before it."""
    fit: Any = stock_trainer().fit  # type: ignore[attr-defined]

    class Own(base):
        def fit(self) -> Any:
            return fit(self)

    return Own


def own_manager(base: type) -> type:
    """agent-lightning's own way to make a rollout manager, likewise."""
    make: Any = stock_trainer()._make_rollout_manager  # type: ignore[attr-defined]

    class Own(base):
        def _make_rollout_manager(self, manager_cls: type) -> Any:
            return make(self, manager_cls)

    return Own


@pytest.mark.parametrize(
    "ends",
    [
        (),
        (Interruption("loaded", 0),),
        (Interruption("trained", 1),),
        (Interruption("saved", 4), Interruption("pulled", 5)),
        (Interruption("saved", 8, server="restarted"), Interruption("pulled", 9, server="restarted")),
    ],
    ids=len,
)
def test_validation_before_the_first_step_may_save(
    ends: tuple[Interruption, ...], server: AglServer, tmp_path: Path
) -> None:
    """Of a new run, and of one that was resumed, in each epoch: the epoch is that of the step that is saved."""
    run = settings("12/2/5", val_before_train=True, epochs=3, shuffle=True)
    scene = Scene(run, own_trainer=validation_saves)
    truth = alone(scene, server, tmp_path)
    if not ends:
        assert_same(truth, extended(scene, server, tmp_path))
    else:
        assert_resumed(truth, interrupted(scene, server, tmp_path, *ends))


def manager_with_names(base: type) -> type:
    """A manager of one's own, with attributes of its own under names that anybody may use."""

    class Own(base):
        def _make_rollout_manager(self, manager_cls: type) -> Any:
            class Mine(manager_cls):
                def __init__(self, *args: Any, **kwargs: Any) -> None:
                    self.keeper = self.recorder = self.validations = self.life = {}
                    super().__init__(*args, **kwargs)

            return super()._make_rollout_manager(Mine)

    return Own


@pytest.mark.parametrize("own_trainer", [own_fit, own_manager, manager_with_names])
@pytest.mark.parametrize(
    "end",
    [
        None,
        Interruption("saved", 2),
        Interruption("saved", 2, server="restarted"),
        Interruption("saved", 4, back_to=2),
    ],
    ids=str,
)
def test_trainer_that_replaces_loop_or_manager_trains_as_alone(
    own_trainer: Callable[[type], type], end: Interruption | None, server: AglServer, tmp_path: Path
) -> None:
    """Surplus rows too, after a kill."""
    scene = Scene(settings("24/4/7", rollout_n=2, mini_batch=3), own_trainer=own_trainer)
    truth = alone(scene, server, tmp_path)
    if end is None:
        assert_same(truth, extended(scene, server, tmp_path))
    else:
        assert_resumed(truth, interrupted(scene, server, tmp_path, end))


def test_stop_of_a_trainer_with_a_manager_of_its_own_can_be_resumed(server: AglServer, tmp_path: Path) -> None:
    """Nothing of it is left on the server, and the next start creates it again."""
    scene = Scene(settings("24/2/5"), own_trainer=own_manager)
    truth = alone(scene, server, tmp_path)
    assert_resumed(truth, interrupted(scene, server, tmp_path, Interruption("pulled", 2, how="stop")))


def saves_every_third(base: type) -> type:
    """Leaves the saves of other steps out."""

    class Own(base):
        def _save_checkpoint(self) -> Any:
            return super()._save_checkpoint() if self.global_steps % 3 == 0 else None

    return Own


def test_stop_at_a_step_that_a_trainer_does_not_save_says_so(server: AglServer, tmp_path: Path) -> None:
    """And what no checkpoint holds stays on the server, for the next start to adopt."""
    scene = Scene(settings("24/2/5"), own_trainer=saves_every_third)
    truth = alone(scene, server, tmp_path)
    asked = Interruption("pulled", 4, how="stop")
    account = interrupted(scene, server, tmp_path, asked)
    assert [life.start for life in account.lives] == [0, 3]
    assert_resumed(truth, account)
    out_dir = tmp_path / "again"
    recorder = Recorder()

    def ask(point: str, step: int) -> bool:
        if (point, step) == (asked.point, asked.step):
            (out_dir / STOP_NAME).touch()
        return False

    server.reset()
    run_life(scene.run, out_dir, server.url, trainer_cls=_extended(saves_every_third), die_at=ask, recorder=recorder)
    [stopped] = [event for event in recorder.events if event["kind"] == "stopped"]
    assert (stopped["step"], stopped["saved"]) == (4, False)
    assert server.rollouts()


def test_evaluation_that_saves_leaves_the_position_of_its_step(server: AglServer, tmp_path: Path) -> None:
    """The step can be resumed from exactly as before."""
    run = settings("14/4/6", epochs=2)
    run_life(run, tmp_path, server.url, stop_after_step=2)
    before = saved_state(tmp_path, 2)
    evaluation = replace(run, val_before_train=True, overrides=("trainer.val_only=true",))
    run_life(evaluation, tmp_path, server.url, trainer_cls=_extended(validation_saves))
    assert saved_state(tmp_path, 2).carry_over == before.carry_over
    assert {FILE_NAME, SEAL_NAME} <= {path.name for path in (tmp_path / step_name(2)).iterdir()}
    third = run_life(run, tmp_path, server.url)
    assert third.start == 2
    assert third.pulls[3] == [10, 11, 0, 1]


def _extended(own_trainer: Callable[[type], type]) -> type:
    from tests.rig.life import extended_trainer

    return own_trainer(extended_trainer())


# --- hooks that change or delete what they are given ----------------------------------------------------------------

_CHANGES = """
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import RolloutState

class Changes(RolloutHooks):
    def on_succeeded(self, rollout, events, store):
        rollout.status.state = {state}
"""

_DELETES = """
import httpx
from agentlightning.hooks import RolloutHooks

class Deletes(RolloutHooks):
    def on_succeeded(self, rollout, events, store):
        httpx.delete("{url}/api/rollouts/" + rollout.rollout_id)
"""


@pytest.mark.parametrize("state", ["RolloutState.RUNNING", '"failed"'])
@pytest.mark.parametrize("rollout_n", [1, 2])
def test_hook_may_change_the_record_that_it_is_given(
    state: str, rollout_n: int, server: AglServer, tmp_path: Path
) -> None:
    """The trainer has read the state before."""
    scene = Scene(settings("24/2/5", rollout_n=rollout_n, total_steps=3), hooks=_CHANGES.format(state=state))
    assert_same(alone(scene, server, tmp_path), extended(scene, server, tmp_path))


def test_hook_that_deletes_its_rollouts_ends_the_run(server: AglServer, tmp_path: Path) -> None:
    """It ends the trainer alone as well; agents are not started without end."""
    scene = Scene(settings("24/2/5"), hooks=_DELETES.format(url=server.url))
    with pytest.raises(ServerError, match="right after it had ended"):
        extended(scene, server, tmp_path)
    assert len(server.agents.starts) < 100
