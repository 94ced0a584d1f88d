"""A training that is asked to stop: it saves the step that it is in, leaves the server empty, and resumes exactly."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.agl.trainer import extend
from agl_async_ckpt.cli.main import main
from agl_async_ckpt.exceptions import EXIT_STOPPED, TrainingStopped
from agl_async_ckpt.folder.stop_request import StopRequest, request_stop
from agl_async_ckpt.storage.layout import STOP_NAME, TRACKER_NAME
from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.child import ChildLife
from tests.rig.life import build_trainer, close_trainer, quiet, run_life, stock_trainer
from tests.rig.record import Life
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

RUN = settings("14/4/6", epochs=2, shuffle=True)
LAST = 6
"""The last step of RUN."""


def asked(out: Path, point: str, step: int) -> Callable[[str, int], bool]:
    """Ask for a stop at a point of the rig, for `die_at`."""

    def here(passed: str, passed_step: int) -> bool:
        if (passed, passed_step) == (point, step):
            request_stop(out, "the test")
        return False

    return here


def stopped_life(run: RunSettings, out: Path, server: AglServer, point: str, step: int, **kwargs: Any) -> Life:
    """A life that is asked to stop at a point."""
    return run_life(run, out, server.url, die_at=asked(out, point, step), **kwargs)


def true_life(server: AglServer, plan: AgentPlan | None = None) -> Life:
    """The uninterrupted run of RUN; the server is empty afterwards, and its agents follow the plan."""
    truth = uninterrupted(RUN, server, plan)
    server.reset()
    server.agents = AgentTable(plan)
    return truth


def counting(num: list[int], base: type) -> type:
    """The extended trainer on a class that counts the validations that take place."""

    class Counting(base):
        def _validate(self, *args: Any, **kwargs: Any) -> Any:
            num.append(self.global_steps)
            return {"x": 1.0}

    return extend(Counting)


@pytest.mark.parametrize(("save_freq", "point"), [(-1, "pulled"), (1, "updated"), (2, "pulled"), (3, "updated")])
def test_stop_saves_its_step_once_and_resumes_exactly(
    server: AglServer, tmp_path: Path, save_freq: int, point: str
) -> None:
    """Whatever `save_freq` says, and wherever in the step the request comes; nothing is left on the server."""
    run = replace(RUN, save_freq=save_freq)
    truth = true_life(server)
    first = stopped_life(run, tmp_path, server, point, 2)
    assert (first.stopped, first.finished, list(first.steps)) == (2, False, [1, 2])
    assert list(first.saves) == ([1, 2] if save_freq == 1 else [2])
    assert (tmp_path / TRACKER_NAME).read_text() == "2"
    assert main(["verify", str(tmp_path)]) == 0
    assert server.rollouts() == {}
    assert not (tmp_path / STOP_NAME).exists()
    second = run_life(replace(run, save_freq=1), tmp_path, server.url)
    assert (second.start, second.finished) == (2, True)
    assert_continues(truth, first, second)
    assert main(["audit", str(tmp_path)]) == 0


def test_step_that_was_just_saved_is_not_saved_again(server: AglServer, tmp_path: Path) -> None:
    """A request that comes after the save of step 2 ends the training before step 3 begins."""
    truth = true_life(server)
    first = stopped_life(RUN, tmp_path, server, "saved", 2)
    assert (first.stopped, list(first.steps), list(first.saves)) == (2, [1, 2], [1, 2])
    saves = [text for _, text in first.log if text.startswith("Saved the input position of step 2")]
    assert len(saves) == 1
    assert_continues(truth, first, run_life(RUN, tmp_path, server.url))


def test_stop_in_a_step_without_a_batch_saves_it(server: AglServer, tmp_path: Path) -> None:
    """The loop goes on to the next step there, without a save of its own."""
    plan = AgentPlan(step_outcome={2: "overlong"})
    truth = true_life(server, plan)
    first = stopped_life(RUN, tmp_path, server, "trained", 2)
    assert (first.stopped, list(first.steps), list(first.saves)) == (2, [1, 2], [1, 2])
    second = run_life(RUN, tmp_path, server.url)
    steps = {**first.steps, **second.steps}
    assert second.start == 2
    assert {number: step.pulled for number, step in steps.items()} == truth.pulls


@pytest.mark.parametrize("save_freq", [-1, 2])
def test_stop_in_the_last_step_is_a_stop(server: AglServer, tmp_path: Path, save_freq: int) -> None:
    """Its validation was left out, so it does not count as finished; the next start has nothing to train."""
    run = replace(RUN, save_freq=save_freq)
    first = stopped_life(run, tmp_path, server, "updated", LAST)
    assert (first.stopped, first.finished) == (LAST, False)
    assert list(first.saves)[-1] == LAST
    second = run_life(run, tmp_path, server.url)
    assert (second.start, second.finished, list(second.steps)) == (LAST, True, [])


def test_stop_runs_no_validation(server: AglServer, tmp_path: Path) -> None:
    """Validations of the steps before took place, that of the step in which the request came does not."""
    num: list[int] = []
    run = replace(RUN, val_before_train=True, overrides=("trainer.test_freq=1",))
    first = stopped_life(run, tmp_path, server, "updated", 2, trainer_cls=counting(num, stock_trainer()))
    assert (first.stopped, num) == (2, [0, 1])


def test_stop_before_the_first_step_saves_nothing(server: AglServer, tmp_path: Path) -> None:
    """Asked while the checkpoint was loaded: no validation, no step, and the checkpoint is as it was."""
    num: list[int] = []
    run_life(RUN, tmp_path, server.url, stop_after_step=2)
    run = replace(RUN, val_before_train=True)
    before = sorted(server.rollouts())
    life = stopped_life(run, tmp_path, server, "loaded", 2, trainer_cls=counting(num, stock_trainer()))
    assert (life.stopped, life.steps, life.saves, num) == (2, {}, {}, [])
    assert sorted(server.rollouts()) == before
    life = stopped_life(RUN, tmp_path, server, "loaded", 2)  # no validation: seen before the first step
    assert (life.stopped, life.steps, life.saves) == (2, {}, {})
    assert run_life(RUN, tmp_path, server.url).finished


def test_request_that_is_older_than_the_run_is_ignored_and_removed(server: AglServer, tmp_path: Path) -> None:
    """It was meant for a trainer that was killed before it could stop."""
    request_stop(tmp_path, "an earlier test")
    life = run_life(RUN, tmp_path, server.url)
    assert life.finished
    assert not (tmp_path / STOP_NAME).exists()
    assert any("it was there before this trainer" in text for _, text in life.log)


@pytest.mark.parametrize("touched", [True, False])
def test_request_counts_whatever_its_clock_says(server: AglServer, tmp_path: Path, touched: bool) -> None:
    """Left by a host whose clock is an hour behind, or after the clock was set back; over an earlier trainer's."""
    path = tmp_path / STOP_NAME
    request_stop(tmp_path, "an earlier test")

    def ask(point: str, step: int) -> bool:
        if (point, step) == ("pulled", 2):
            if touched:
                path.write_text("")
                os.utime(path, (time.time() - 3600,) * 2)
            else:
                path.write_text(replace(StopRequest.now("the test"), requested_at=time.time() - 3600).to_json())
        return False

    assert run_life(RUN, tmp_path, server.url, die_at=ask).stopped == 2
    assert not path.exists()


def test_request_that_was_there_before_stops_no_later_fit(server: AglServer, tmp_path: Path) -> None:
    """Nor when the folder cannot be written, so that it stays."""
    request_stop(tmp_path, "an earlier test")
    path = tmp_path / STOP_NAME
    content = path.read_text()

    def bring_back(point: str, step: int) -> bool:
        path.write_text(content)
        return False

    assert run_life(RUN, tmp_path, server.url, die_at=bring_back).finished


def test_touched_file_is_a_request(server: AglServer, tmp_path: Path) -> None:
    """Where no Python is at hand, the shell is enough."""

    def touch(point: str, step: int) -> bool:
        if (point, step) == ("pulled", 2):
            (tmp_path / STOP_NAME).touch()
        return False

    assert run_life(RUN, tmp_path, server.url, die_at=touch).stopped == 2


def test_what_is_no_file_is_no_request(server: AglServer, tmp_path: Path) -> None:
    """A folder or a FIFO in its place neither stops nor blocks the training."""
    os.mkfifo(tmp_path / STOP_NAME)
    assert run_life(RUN, tmp_path, server.url).finished


def test_disabled_extension_looks_for_no_request(server: AglServer, tmp_path: Path) -> None:
    """`enabled: false` is as if not loaded."""
    run = replace(RUN, extension={"enabled": False})
    assert stopped_life(run, tmp_path, server, "pulled", 2).finished


def test_synchronous_training_stops_too(server: AglServer, tmp_path: Path) -> None:
    """With VERL's own checkpoint, which is all that it has."""
    run = settings("12/4/0", async_mode=False, epochs=2, save_freq=-1)
    life = stopped_life(run, tmp_path, server, "pulled", 2)
    assert (life.stopped, list(life.saves)) == (2, [2])
    assert (tmp_path / TRACKER_NAME).read_text() == "2"


def test_what_has_ended_is_kept_before_the_server_is_cleared(server: AglServer, tmp_path: Path) -> None:
    """A rollout in flight that ends during the update is in the checkpoint, and no agent runs it again."""
    ended: list[int] = []

    def here(point: str, step: int) -> bool:
        if (point, step) == ("updated", 2):
            rid, record = next(iter(server.rollouts().items()))
            ended.append(record.input["index"])
            server.call(lambda: server.agents._finish(rid, step))
            request_stop(tmp_path, "the test")
        return False

    truth = true_life(server)
    first = run_life(RUN, tmp_path, server.url, die_at=here)
    assert first.saves[2].in_flight[0] == ended[0]
    num_starts = len(server.agents.starts)
    second = run_life(RUN, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert any(re.search(r" 1 \(\w+\) finished before and reused", text) for _, text in second.log)
    in_flight = first.saves[2].in_flight
    again = [row for _, row in server.agents.starts[num_starts : num_starts + len(in_flight) - 1]]
    assert again == list(in_flight[1:])


def test_server_that_is_gone_does_not_keep_a_stop_from_saving(server: AglServer, tmp_path: Path) -> None:
    """The checkpoint is complete, two lines say what could not be done, and the resume is exact."""
    truth = true_life(server)

    def here(point: str, step: int) -> bool:
        if (point, step) == ("updated", 2):
            request_stop(tmp_path, "the test")
            server.stop()
        return False

    try:
        first = run_life(RUN, tmp_path, server.url, die_at=here)
    finally:
        with quiet():
            server.start()
    assert (first.stopped, list(first.saves)) == (2, [1, 2])
    assert len(first.warnings) == 2
    assert_continues(truth, first, run_life(RUN, tmp_path, server.url))


def test_reclaim_off_deletes_what_this_training_waits_for_only(server: AglServer, tmp_path: Path) -> None:
    """Others of the run stay, as at a resume."""
    run = replace(RUN, extension={"reclaim": False})

    def here(point: str, step: int) -> bool:
        if (point, step) == ("updated", 2):
            record = next(iter(server.rollouts().values()))
            other = record.model_copy(update={"rollout_id": "other"})
            from agentlightning.server import store

            server.call(lambda: store._rollouts.update(other=other))
            request_stop(tmp_path, "the test")
        return False

    run_life(run, tmp_path, server.url, die_at=here)
    assert list(server.rollouts()) == ["other"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_a_real_process_group_saves_and_resumes_exactly(
    server: AglServer, tmp_path: Path, number: signal.Signals
) -> None:
    """In the rollouts of step 2; the request takes the time of a file, so step 3 may have begun."""
    truth = true_life(server)
    out, record = tmp_path / "out", tmp_path / "record.jsonl"
    with ChildLife(RUN, out, server.url, record, stop_at=("pulled", 2), stop_signals=("SIGTERM", "SIGUSR1")) as child:
        child.wait_stopped()
        os.killpg(child.process.pid, number)
        os.killpg(child.process.pid, signal.SIGCONT)
        _, error = child.process.communicate(timeout=120)
        first = child.life()
    assert child.process.returncode == EXIT_STOPPED, error
    assert first.stopped in (2, 3)
    assert list(first.saves)[-1] == first.stopped
    assert server.rollouts() == {}
    assert main(["verify", str(out)]) == 0
    second = run_life(RUN, out, server.url)
    assert second.start == first.stopped
    assert_continues(truth, first, second)
    assert main(["audit", str(out)]) == 0


def test_config_is_put_back_after_a_stop(server: AglServer, tmp_path: Path) -> None:
    """`trainer.save_freq` is another one only while the loop reads it; the error carries step and outcome."""
    with quiet():
        trainer = build_trainer(replace(RUN, save_freq=7), tmp_path, server.url, die_at=asked(tmp_path, "pulled", 1))
        try:
            with pytest.raises(TrainingStopped) as stopped:
                trainer.fit()
            assert trainer.config.trainer.save_freq == 7
        finally:
            close_trainer(trainer)
    assert (stopped.value.step, stopped.value.saved) == (1, True)
    assert stopped.value.__traceback__ is not None
    assert all("agentlightning" not in entry.filename for entry in map(_frame, _entries(stopped.value)))


def test_stop_waits_for_a_model_that_is_saved_in_the_background(server: AglServer, tmp_path: Path) -> None:
    """Megatron's: the process that writes it would end with Ray. The request is answered after that."""
    waited: list[tuple[bool, bool]] = []
    with quiet():
        trainer = build_trainer(
            replace(RUN, async_save=True), tmp_path, server.url, die_at=asked(tmp_path, "pulled", 1)
        )
        trainer.actor_rollout_wg.async_calls_finalize_fn_exec = lambda *, blocking: waited.append(
            (blocking, (tmp_path / STOP_NAME).exists())
        )
        try:
            with pytest.raises(TrainingStopped):
                trainer.fit()
        finally:
            close_trainer(trainer)
    assert waited == [(True, True)]


def _entries(error: BaseException) -> list[Any]:
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _frame(entry: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(filename=entry.tb_frame.f_code.co_filename)
