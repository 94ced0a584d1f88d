"""The rig itself: with the stock trainer it shows the losses of today, and its stand-ins act like the real thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.agents import AgentPlan, AgentTable, WaitReport
from tests.rig.child import ChildLife
from tests.rig.life import build_trainer, close_trainer, quiet, run_life, stock_trainer
from tests.rig.record import Life, lineage, rows_pulled, rows_trained
from tests.rig.runs import settings, uninterrupted, verl_version
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings, compose_config
from tests.rig.standins import WorkerGroup

SKIPS_LOADER_AT_MULTIPLES = verl_version() >= (0, 8)


def stock_lives(run: RunSettings, out_dir: Path, server: AglServer, step: int) -> tuple[Life, Life]:
    """Two lives of the stock trainer: dead after the save of `step`, then resumed to the end."""
    first = run_life(run, out_dir, server.url, trainer_cls=stock_trainer(), stop_after_step=step)
    assert first.died == f"saved {step}"
    return first, run_life(run, out_dir, server.url, trainer_cls=stock_trainer())


def lost_rows(truth: Life, *lives: Life) -> list[int]:
    """Rows that the uninterrupted run trains and these lives never do."""
    trained = set(rows_trained(lineage(*lives)))
    return [row for row in dict.fromkeys(rows_trained(truth.steps)) if row not in trained]


def test_uninterrupted_run_trains_the_oldest_groups_of_each_step(server: AglServer) -> None:
    """Without slow agents each step trains its B oldest groups, and everything pulled is trained or in flight."""
    truth = uninterrupted(settings("24/2/5"), server)
    assert [step.trained for step in truth.steps.values()] == [[2 * i, 2 * i + 1] for i in range(11)]
    assert truth.saves[4].in_flight == (8, 9, 10)
    assert truth.saves[4].buffered == (11,)
    assert truth.epochs == {**dict.fromkeys(range(1, 11), 1), 11: 2}
    assert truth.finished


def test_stock_trainer_skips_the_tail_on_resume(server: AglServer, tmp_path: Path) -> None:
    """Today: 14/4/6 resumed from step 1 pulls rows 8 to 11 and two of the next epoch; 4 to 7 are never trained."""
    run = settings("14/4/6", epochs=2)
    first, second = stock_lives(run, tmp_path, server, 1)
    assert first.saves[1].in_flight == (4, 5)
    assert first.saves[1].buffered == (6, 7)
    assert second.restored is not None
    assert second.restored.in_flight == second.restored.buffered == ()
    assert second.pulls[2] == [8, 9, 10, 11, 0, 1]
    assert uninterrupted(run, server).pulls[2] == [6, 7, 8, 9]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_stock_trainer_drops_what_is_in_flight(server: AglServer, tmp_path: Path, step: int) -> None:
    """Today: with A = 2B the tail is empty, and every resume loses B rows."""
    run = settings("24/4/8")
    lives = stock_lives(run, tmp_path, server, step)
    assert len(lost_rows(uninterrupted(run, server), *lives)) == 4


@pytest.mark.skipif(not SKIPS_LOADER_AT_MULTIPLES, reason="VERL 0.7.1 always loads the loader state")
def test_stock_trainer_replays_the_epoch_when_steps_divide(server: AglServer, tmp_path: Path) -> None:
    """Today: 3 optimizer steps divide by the loader length 3, so the first epoch starts over, in its old order."""
    run = settings("12/4/6", shuffle=True, epochs=2)
    first, second = stock_lives(run, tmp_path, server, 3)
    assert second.pulls[4] == first.pulls[1]


def test_stock_trainer_runs_on_after_the_end(server: AglServer, tmp_path: Path) -> None:
    """Today: a finished run, started again, trains a step more, because the epoch starts at 0."""
    run = settings("12/4/12")
    first = run_life(run, tmp_path, server.url, trainer_cls=stock_trainer())
    again = run_life(run, tmp_path, server.url, trainer_cls=stock_trainer())
    assert list(first.steps) == [1, 2]
    assert first.finished
    assert list(again.steps) == [3]
    assert len(again.pulls[3]) == 12


def test_stock_trainer_goes_back_to_row_0_with_a_full_tail(server: AglServer, tmp_path: Path) -> None:
    """Today: the tail of 10/4/7 holds the last row of the epoch, and the resumed run starts at row 0."""
    run = settings("10/4/7")
    first, second = stock_lives(run, tmp_path, server, 1)
    assert first.saves[1].buffered == (7,)
    assert second.pulls[2] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("case", "lost"), [("24/2/4", {2}), ("24/2/5", {3, 4}), ("40/4/10", {5, 6, 7, 8})])
def test_stock_trainer_loses_inputs_at_one_resume(server: AglServer, tmp_path: Path, case: str, lost: set[int]) -> None:
    """The numbers of today: one resume loses what was in flight and the tail."""
    run = settings(case)
    lives = stock_lives(run, tmp_path, server, 3)
    assert len(lost_rows(uninterrupted(run, server), *lives)) in lost


@pytest.mark.skipif(not SKIPS_LOADER_AT_MULTIPLES, reason="VERL 0.7.1 always loads the loader state")
def test_stock_trainer_repeats_the_permutation_of_epoch_1(server: AglServer, tmp_path: Path) -> None:
    """Killed at step 12 of 12-step epochs, in epoch 2: the order of epoch 1 is trained again, and epoch 2's never."""
    run = settings("24/2/4", shuffle=True, epochs=2)
    first, second = stock_lives(run, tmp_path, server, 12)
    truth = uninterrupted(run, server)
    assert rows_pulled(second.steps)[:24] == rows_pulled(first.steps)[:24]
    assert rows_pulled(truth.steps)[24:48] != rows_pulled(truth.steps)[:24]


def test_slow_rows_stay_in_flight_while_held(server: AglServer) -> None:
    """A row held until step 5 is in flight in every save before, and is the oldest then."""
    plan = AgentPlan(hold={2: 5})
    truth = uninterrupted(settings("24/4/8"), server, plan)
    assert all(truth.saves[step].in_flight[0] == 2 for step in range(1, 5))
    assert truth.steps[5].trained[0] == 2
    assert sorted(rows_pulled(truth.steps)[:24]) == list(range(24))


def test_agents_that_are_all_held_are_an_error(server: AglServer, tmp_path: Path) -> None:
    """A plan that cannot go on is reported instead of hanging."""
    server.agents = AgentTable(AgentPlan(hold=dict.fromkeys(range(8), 9)))
    with pytest.raises(AssertionError, match=r"Step 1 waits for rows \[0, 1, 2, 3\]"):
        run_life(settings("8/2/4"), tmp_path, server.url, trainer_cls=stock_trainer())


def test_id_seen_once_is_never_started_again(server: AglServer) -> None:
    """As with the real local controller: an old id created again succeeds at once, without an event or a start."""
    import httpx

    body = [{"input": {"index": 3}, "rollout_id": "old"}]
    report = WaitReport(step=1, polled=("old",), num_groups=1, rollout_n=1)
    with httpx.Client(base_url=server.url) as client:
        client.post("/api/rollouts", json=body).raise_for_status()
        assert server.call(lambda: server.agents.act(report)) == 1
        assert len(client.get("/api/rollouts/old/events").json()) == 2
        server.restart()
        client.post("/api/rollouts", json=body).raise_for_status()
        assert server.call(lambda: server.agents.act(report)) == 1
        detail = client.get("/api/rollouts/old").json()
        assert detail["rollout"]["status"]["state"] == "succeeded"
        assert client.get("/api/rollouts/old/events").json() == []
    assert server.agents.starts == [("old", 3)]


def test_running_rollout_of_another_controller_fails(server: AglServer) -> None:
    """As with the real local controller: what runs, though it was not started here, has lost its process."""
    import httpx

    with httpx.Client(base_url=server.url) as client:
        client.post("/api/rollouts", json=[{"input": {"index": 0}, "rollout_id": "x"}]).raise_for_status()
        client.patch("/api/rollouts/x", json={"status": {"state": "running"}}).raise_for_status()
        server.call(lambda: server.agents.act(WaitReport(step=1, polled=(), num_groups=1, rollout_n=1)))
        status = client.get("/api/rollouts/x").json()["rollout"]["status"]
    assert (status["state"], status["error_message"]) == ("failed", "local subprocess is not running")


def test_empty_pass_is_no_complaint() -> None:
    """Agents that nobody waits for may all be held."""
    agents = AgentTable(AgentPlan(hold={0: 9}))
    assert agents.act(WaitReport(step=1, polled=(), num_groups=1, rollout_n=1)) == 0


def test_worker_group_keeps_as_many_models_as_verl(tmp_path: Path) -> None:
    """The stand-in writes and removes in the order of VERL's own FSDP checkpoint manager."""
    group = WorkerGroup("actor")
    folders = [tmp_path / f"global_step_{step}" / "actor" for step in range(1, 5)]
    with quiet():
        for step, folder in enumerate(folders, start=1):
            group.save_checkpoint(str(folder), None, step, max_ckpt_to_keep=2)
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    group.load_checkpoint(str(folders[3]))
    assert group.loaded_step == 4
    with pytest.raises(FileNotFoundError):
        group.load_checkpoint(str(folders[0]))


def test_rollouts_that_fail_or_record_nothing_are_told_apart(server: AglServer) -> None:
    """A failed, a silent and an overlong rollout end their groups, and bring no sample into the update."""
    plan = AgentPlan(outcome={0: "failed", 1: "silent", 2: "overlong"})
    truth = uninterrupted(settings("8/4/6"), server, plan)
    assert truth.steps[1].trained == [0, 1, 2, 3]
    assert truth.steps[1].updated == [3]


def test_step_without_a_batch_trains_nothing_and_saves_nothing(server: AglServer) -> None:
    """`_train_step` returns None if every sample is dropped; the step counts and leaves no checkpoint."""
    truth = uninterrupted(settings("12/4/6", epochs=2), server, AgentPlan(step_outcome={2: "overlong"}))
    assert truth.steps[2].trained == [4, 5, 6, 7]
    assert truth.steps[2].updated == []
    assert 2 not in truth.saves
    assert truth.steps[3].updated


def test_siblings_come_back_as_one_group(server: AglServer) -> None:
    """With rollout.n = 3 a group is three rollouts of one row, and the B oldest groups finish."""
    truth = uninterrupted(settings("12/2/5", rollout_n=3), server)
    assert truth.steps[1].trained == [0, 1]
    assert truth.steps[1].num_rollouts == 6
    assert truth.saves[1].in_flight == (2, 3, 4)


def test_synchronous_run_trains_what_it_pulls(server: AglServer) -> None:
    """Synchronous training waits for everything."""
    truth = uninterrupted(settings("12/4/0", async_mode=False, epochs=2), server)
    assert [step.trained for step in truth.steps.values()] == [step.pulled for step in truth.steps.values()]
    assert len(truth.steps) == 6


def test_validation_runs_before_training(server: AglServer) -> None:
    """A validation plays its own rollouts and leaves the stream alone."""
    with_val = uninterrupted(settings("12/4/6", val_before_train=True), server)
    without = uninterrupted(settings("12/4/6"), server)
    assert with_val.steps == without.steps


def test_settings_survive_their_json() -> None:
    """A child process gets exactly the run that its parent means."""
    run = settings("24/2/5", extension={"enabled": False}, overrides=("data.seed=4",), num_workers=2)
    assert RunSettings.from_json(run.to_json()) == run


def test_config_is_agent_lightnings_own(tmp_path: Path) -> None:
    """The composed config has agent-lightning's defaults, and the section of the extension only if asked for."""
    config = compose_config(settings("24/2/5"), tmp_path, "http://x")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "per_rollout_mean"
    assert "async_checkpoint" not in config.agentlightning
    config = compose_config(settings("24/2/5", extension={"enabled": False}), tmp_path, "http://x")
    assert config.agentlightning.async_checkpoint.enabled is False


def test_loader_workers_end_with_the_life(server: AglServer, tmp_path: Path) -> None:
    """A life with loader workers leaves no child process behind."""
    import multiprocessing

    run_life(settings("24/4/6", num_workers=2), tmp_path, server.url, trainer_cls=stock_trainer(), stop_after_step=2)
    assert multiprocessing.active_children() == []


def test_rich_rows_carry_every_kind_of_column(server: AglServer, tmp_path: Path) -> None:
    """Tensor, numeric array, object array and list columns all pass through a stock run."""
    run = settings("8/2/5", payload="rich")
    with quiet():
        trainer = build_trainer(run, tmp_path, server.url, trainer_cls=stock_trainer())
        batch = next(iter(trainer.train_dataloader))
        close_trainer(trainer)
    assert {type(value).__name__ for value in batch.values()} == {"Tensor", "ndarray", "list"}
    assert uninterrupted(run, server).finished


def test_child_process_runs_dies_and_leaves_its_record(server: AglServer, tmp_path: Path) -> None:
    """A life in another process stops at a chosen instant, is killed there, and its record says how far it came."""
    run = settings("8/2/4", num_workers=0)
    with ChildLife(
        run, tmp_path / "out", server.url, tmp_path / "record.jsonl", stock=True, stop_at=("saved", 2)
    ) as child:
        child.wait_stopped()
        life = child.kill()
    assert list(life.saves) == [1, 2]
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not life.finished
