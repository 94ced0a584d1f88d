"""Stops: what is asked for in a validation is done at once, and where nobody can be asked training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.agl.internals import ray_store
from agl_async_ckpt.agl.stop import step_end, stop_lookup
from agl_async_ckpt.cli.main import main
from agl_async_ckpt.folder.stop_request import StopRequest, request_stop
from agl_async_ckpt.storage.layout import STOP_NAME, TRACKER_NAME
from tests.rig.life import quiet, run_life
from tests.rig.record import Life
from tests.rig.runs import settings
from tests.rig.server import AglServer
from tests.yardstick.scene import Interruption, Scene, alone, assert_resumed, interrupted

STEP = 2
RUN = settings("14/4/6", epochs=2, rollout_n=2, overrides=("trainer.test_freq=1",))
IN_VALIDATION = Interruption("in the validation", STEP, how="stop")
"""No point of the rig: the trainers below ask."""


@pytest.fixture(autouse=True)
def _at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation of the rig takes milliseconds."""
    monkeypatch.setattr(step_end, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """What the trainers log: step and metrics."""
    from agentlightning.verl import trainer

    lines: list[tuple[int, dict[str, Any]]] = []

    class Tracking:
        def __init__(self, **kwargs: Any) -> None:
            pass

        def log(self, data: dict[str, Any], step: int) -> None:
            lines.append((step, dict(data)))

    monkeypatch.setattr(trainer, "Tracking", Tracking)
    return lines


def asking(act: Callable[[Any], None], *, after_looks: int = 0, step: int = STEP) -> Callable[[type], type]:
    """Make trainers that act once, in the validation of a step, between two looks at its rollouts."""
    done: list[bool] = []

    def own_trainer(base: type) -> type:
        class Asking(base):
            def _make_rollout_manager(self, manager_cls: type) -> Any:
                trainer = self

                class Manager(manager_cls):
                    looks = -1

                    def _create_rollouts(self, *args: Any, is_train: bool, **kwargs: Any) -> Any:
                        enqueued = super()._create_rollouts(*args, is_train=is_train, **kwargs)
                        if not is_train and trainer.global_steps == step:
                            self.looks = 0
                            self._act()
                        return enqueued

                    def _get_rollout(self, rollout_id: str) -> Any:
                        rollout = super()._get_rollout(rollout_id)
                        if self.looks >= 0:
                            self.looks += 1
                            self._act()
                        return rollout

                    def _act(self) -> None:
                        if self.looks == after_looks and not done:
                            done.append(True)
                            act(trainer)

                return super()._make_rollout_manager(Manager)

        return Asking

    return own_trainer


def ask(trainer: Any) -> None:
    request_stop(Path(trainer.config.trainer.default_local_dir), "the test")


def num_saves(life: Life, step: int) -> int:
    return sum(text.startswith(f"Saved the input position of step {step} ") for _, text in life.log)


@pytest.mark.parametrize("save_freq", [-1, 1, 2])
@pytest.mark.parametrize("after_looks", [0, 1, 3])
def test_stop_in_a_validation_saves_at_once_and_leaves_it(
    server: AglServer, tmp_path: Path, logged: list[tuple[int, dict[str, Any]]], save_freq: int, after_looks: int
) -> None:
    """The step is saved once, its metrics are logged without those of a validation, the server is left empty."""
    truth = alone(Scene(RUN), server, tmp_path)
    logged.clear()
    scene = Scene(replace(RUN, save_freq=save_freq), own_trainer=asking(ask, after_looks=after_looks))
    account = interrupted(scene.changed(save_freq=save_freq), server, tmp_path, IN_VALIDATION)
    first = account.lives[0]
    assert (first.stopped, list(first.steps), list(first.saves)[-1]) == (STEP, [1, 2], STEP)
    assert num_saves(first, STEP) == 1
    assert any(text.startswith(f"Left the validation of step {STEP}") for _, text in first.log)
    ours = "training/async_ckpt/last_save"
    by_step = {step: {name for name in metrics if not name.startswith(ours)} for step, metrics in logged[:STEP]}
    assert {name for name in by_step[1] if name.startswith("val")}
    assert by_step[2] == {name for name in by_step[1] if not name.startswith("val")}
    assert_resumed(truth, account)


def test_stop_in_a_validation_leaves_nothing_on_the_server(server: AglServer, tmp_path: Path) -> None:
    """With `reclaim: false`, too: the validation's own rollouts are what the trainer was waiting for."""
    run = replace(RUN, extension={"reclaim": False})
    life = run_life(run, tmp_path, server.url, trainer_cls=asking(ask, after_looks=1)(extended()))
    assert (life.stopped, server.rollouts()) == (STEP, {})
    assert (tmp_path / TRACKER_NAME).read_text() == str(STEP)
    assert main(["verify", str(tmp_path)]) == 0


def extended() -> type:
    from tests.rig.life import extended_trainer

    return extended_trainer()


def test_stop_in_the_first_validation_just_ends(server: AglServer, tmp_path: Path) -> None:
    """Nothing was trained since the start: nothing is saved, and what the resume adopted stays as it was."""
    run_life(replace(RUN, overrides=()), tmp_path, server.url, stop_after_step=STEP)
    before = sorted(server.rollouts())
    own = asking(ask, after_looks=1)(extended())
    life = run_life(replace(RUN, val_before_train=True), tmp_path, server.url, trainer_cls=own)
    assert (life.stopped, life.start, life.steps, life.saves) == (STEP, STEP, {}, {})
    assert not (tmp_path / STOP_NAME).exists()
    assert sorted(server.rollouts()) == before
    assert run_life(RUN, tmp_path, server.url).finished


@pytest.mark.parametrize("caught", [Exception, BaseException])
@pytest.mark.parametrize("around", ["the validation", "its rollouts"])
def test_own_validation_that_catches_everything_stops_all_the_same(
    server: AglServer, tmp_path: Path, logged: list[tuple[int, dict[str, Any]]], caught: type, around: str
) -> None:
    """At the end of the step at the latest; what it makes of half a validation is not logged as a whole one."""

    def catching(base: type) -> type:
        class Catching(base):
            def _validate(self, *args: Any, **kwargs: Any) -> Any:
                if around == "its rollouts":
                    return {"val/half": 1.0, **super()._validate(*args, **kwargs)}
                try:
                    return {"val/half": 1.0, **super()._validate(*args, **kwargs)}
                except caught:
                    return {"val/half": 1.0}

            def _rollout(self, gen_batch: Any, is_train: bool) -> Any:
                if is_train or around == "the validation":
                    return super()._rollout(gen_batch, is_train)
                try:
                    return super()._rollout(gen_batch, is_train)
                except caught:
                    return None, {"val/half": 1.0}

        return Catching

    from agl_async_ckpt.agl.trainer import extend
    from tests.rig.life import stock_trainer

    own = asking(ask, after_looks=1)(catching(stock_trainer()))
    life = run_life(replace(RUN, save_freq=-1), tmp_path, server.url, trainer_cls=extend(own))
    assert (life.stopped, list(life.saves), server.rollouts()) == (STEP, [STEP], {})
    assert [(step, "val/half" in metrics) for step, metrics in logged] == [(1, True), (2, False)]


def test_own_validation_that_fails_without_metrics_costs_no_step(server: AglServer, tmp_path: Path) -> None:
    """It picks one that is not there, and the training ends of it: the step is saved before."""

    class Picking(asking(ask, after_looks=1)(extended())):
        def _validate(self, *args: Any, **kwargs: Any) -> Any:
            return {"val/first": sorted(super()._validate(*args, **kwargs).items())[0]}

    with pytest.raises(IndexError):
        run_life(replace(RUN, save_freq=-1), tmp_path, server.url, trainer_cls=Picking)
    assert (tmp_path / TRACKER_NAME).read_text() == str(STEP)
    assert main(["verify", str(tmp_path)]) == 0


def test_save_that_was_due_is_not_made_again(server: AglServer, tmp_path: Path) -> None:
    """It came before the validation that was left."""
    run = replace(RUN, save_freq=1, extension={"save_every_minutes": 1e-9})
    life = run_life(run, tmp_path, server.url, trainer_cls=asking(ask, after_looks=1)(extended()))
    assert (life.stopped, num_saves(life, STEP)) == (STEP, 1)


def test_validation_that_waits_for_a_server_is_left(server: AglServer, tmp_path: Path) -> None:
    """The server is away, and the step must not wait for it to be saved."""

    def away(trainer: Any) -> None:
        server.stop()
        timers.append(threading.Timer(0.2, ask, [trainer]))
        timers[0].start()

    timers: list[threading.Timer] = []
    run = replace(RUN, save_freq=-1, extension={"server_wait_s": 100})
    try:
        life = run_life(run, tmp_path, server.url, trainer_cls=asking(away, after_looks=1)(extended()))
    finally:
        timers[0].join()
        with quiet():
            server.start()
    assert (life.stopped, list(life.saves)) == (STEP, [STEP])
    assert main(["verify", str(tmp_path)]) == 0


def test_synchronous_validation_is_left_too(server: AglServer, tmp_path: Path) -> None:
    """Its rollouts are no longer on the server either."""
    run = settings("12/4/0", async_mode=False, epochs=2, save_freq=-1, overrides=("trainer.test_freq=1",))
    life = run_life(run, tmp_path, server.url, trainer_cls=asking(ask, after_looks=1)(extended()))
    assert (life.stopped, list(life.saves), server.rollouts()) == (STEP, [STEP], {})


def test_switched_off_nothing_is_left(server: AglServer, tmp_path: Path) -> None:
    """`enabled: false` is as if not loaded."""
    run = replace(RUN, extension={"enabled": False})
    assert run_life(run, tmp_path, server.url, trainer_cls=asking(ask, after_looks=1)(extended())).finished


# --- where nobody can be asked ---------------------------------------------------------------------------------------


def test_store_that_answers_errors_ends_no_training(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so; a request in the folder is seen all the same."""

    def broken() -> StopRequest | None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(ray_store, "get_request", broken)
    life = run_life(RUN, tmp_path / "1", server.url)
    assert life.finished
    assert [text for text in life.warnings if "RuntimeError: the store is gone" in text] == life.warnings
    assert len(life.warnings) == 1
    server.reset()
    own = asking(ask, after_looks=1)(extended())
    assert run_life(RUN, tmp_path / "2", server.url, trainer_cls=own).stopped == STEP


@pytest.mark.parametrize("place", ["Ray's store", "the output folder"])
def test_place_that_hangs_holds_up_one_look(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nobody waits for it again until it has come back; then what it says counts."""
    back = threading.Event()
    real = stop_lookup.read_request

    def hang(*args: Any) -> StopRequest | None:
        if threading.current_thread() is not threading.main_thread():  # which looks once, at the start
            back.wait(60)
        return real(*args) if args else None

    def come_back(point: str, step: int) -> bool:
        if (point, step) == ("pulled", 3):
            back.set()
        if (point, step) == ("updated", 3):
            request_stop(tmp_path, "the test")
        return False

    monkeypatch.setattr(stop_lookup, "PATIENCE_S", 0.05)
    monkeypatch.setattr(
        *((ray_store, "get_request") if place == "Ray's store" else (stop_lookup, "read_request")), hang
    )
    try:
        life = run_life(RUN, tmp_path, server.url, die_at=come_back)
    finally:
        back.set()
    assert life.stopped == 3
    assert [text for text in life.warnings if f"in {place} (no answer within 0.05 s)" in text] == life.warnings
    assert len(life.warnings) == 1
    assert any(f"Requests to stop in {place} can be looked up again." in text for _, text in life.log)
