"""agl-server killed and started again under a live trainer: the real server, gateway, controller and agents."""

from __future__ import annotations

from typing import Any

import pytest

from agl_async_ckpt.ledger.audit import audit
from tests.scenes.account import assert_trained_what_agents_did
from tests.scenes.stage import Stage, StageMaker

pytestmark = pytest.mark.slow

ENDS = ["ask", "reward"]


def restart(stage: Stage) -> None:
    """SIGKILL agl-server and start it again: it knows nothing."""
    stage.services.kill_server()
    stage.services.start_server()


def outages(life: Any) -> list[str]:
    """The lines that say what an outage has cost."""
    return [text for _, text in life.log if text.endswith("Training goes on.")]


def test_restart_while_a_step_waits_costs_no_token_of_what_had_ended(make_stage: StageMaker) -> None:
    """Siblings that had ended are trained as they were; the others run again, whatever their old agents do."""
    with make_stage("8/2/4", rollout_n=2, total_steps=3) as stage:
        truth = stage.truth(3)
        held = {f"row{row}": [ENDS, ["ask", "gate:held", "reward"], ENDS] for row in (2, 3, 4, 5)}
        stage.plan(row1=[["gate:step 1", *ENDS]], **held)
        handle = stage.start_life()
        ended = [event["rollout_id"] for row in (2, 3) for event in stage.wait_agents(1, "end", row)]
        handle.wait_seen(ended)
        stage.open("step 1")
        handle.wait_reached("enqueued", 2)
        for row in (2, 3, 4, 5):
            stage.wait_agents(1, "at gate", row)
        ended += [event["rollout_id"] for row in (4, 5) for event in stage.wait_agents(1, "end", row)]
        handle.wait_seen(ended)
        restart(stage)
        for row in (2, 3, 4, 5):
            stage.wait_agents(3, "start", row)
        stage.open("held")  # the old agents post under ids that nobody knows
        life = handle.wait_end()
        stage.check(truth, life)
        assert_trained_what_agents_did([life], stage.agents())
        trained = {rollout["rollout_id"] for step in life.steps.values() for rollout in step.rollouts}
        assert set(ended) <= trained
        assert [len(stage.agents("start", row)) for row in (2, 3, 4, 5)] == [3, 3, 3, 3]
        [line] = outages(life)
        assert " was away for " in line
        assert "4 created again under new ids, 4 that had ended kept with their events" in line
        replaced = [request["metadata"]["replaces"] for request in life.posted if "replaces" in request["metadata"]]
        assert len(replaced) == 4
        assert set(replaced) <= set(life.posted_ids)
        assert not set(replaced) & set(ended)


MOMENTS = [("registered", 2), ("enqueued", 3), ("completed", 4), ("updated", 5), ("actor saved", 6)]


def test_restart_at_each_moment_of_a_step_loses_and_repeats_nothing(make_stage: StageMaker) -> None:
    """Before and after rollouts are created, before the gateway is paused, while it is, and in the middle of a save."""
    with make_stage("16/2/4", rollout_n=2, total_steps=7, overrides=("trainer.test_freq=3",)) as stage:
        truth = stage.truth(7)
        handle = stage.start_life(hold_at=MOMENTS)
        for point, step in MOMENTS:
            handle.wait_reached(point, step)
            restart(stage)
            stage.open(f"{point} {step}")
        life = handle.wait_end()
        stage.check(truth, life)
        assert_trained_what_agents_did([life], stage.agents())
        assert audit(stage.out_dir).problems == []
        assert 1 <= len(outages(life)) <= len(MOMENTS)


@pytest.mark.timeout(1200)
def test_three_restarts_in_fifty_steps_end_in_a_clean_audit(make_stage: StageMaker) -> None:
    """The run ends by itself; the stream is that of the uninterrupted run, and the audit finds nothing."""
    with make_stage("60/1/2", total_steps=50, save_freq=10) as stage:
        truth = stage.truth(50)
        handle = stage.start_life()
        for step in (10, 20, 30, 40, 50):
            handle.wait_reached("updated", step)
            if step in (10, 20, 40):
                restart(stage)
        life = handle.wait_end()
        stage.check(truth, life)
        assert_trained_what_agents_did([life], stage.agents())
        found = audit(stage.out_dir)
        assert found.problems == []
        assert found.holds


def test_server_that_never_returns_ends_the_run_and_the_next_start_is_exact(make_stage: StageMaker) -> None:
    """After `server_wait_s` an error names URL, subject and what to do; a new start finds nothing lost."""
    with make_stage("8/2/4", total_steps=4, extension={"server_wait_s": 2.0}) as stage:
        truth = stage.truth(4)
        stage.plan(row4=[["gate:held", *ENDS], ENDS], row5=[["gate:held", *ENDS], ENDS], row3=[["gate:held", *ENDS]])
        handle = stage.start_life()
        handle.wait_reached("enqueued", 2)
        stage.wait_agents(1, "at gate", 5)
        stage.services.kill_server()
        text = handle.wait_error()
        error = text[text.rindex("agl_async_ckpt.exceptions.ServerError") :]
        assert f"The agl-server at {stage.services.url}" in error
        assert "was not reachable for 2 s (ConnectError: " in error
        assert "waiting for rollout " in error
        assert "The checkpoint is untouched; start again once the server answers." in error
        stage.services.start_server()
        stage.open("held")
        second = stage.start_life().wait_end()
        stage.check(truth, handle.life, second)
        assert audit(stage.out_dir).problems == []


@pytest.mark.parametrize("die_at", [("updated", 2), ("save", 3)])
def test_death_after_a_restart_of_the_server_resumes_exactly(make_stage: StageMaker, die_at: tuple[str, int]) -> None:
    """What the trainer had created again is in no checkpoint: the resume reclaims it and trains each input once."""
    with make_stage("8/2/4", rollout_n=2, total_steps=4) as stage:
        truth = stage.truth(4)
        handle = stage.start_life(die_at=die_at, hold_at=[("enqueued", 2)])
        handle.wait_reached("enqueued", 2)
        restart(stage)
        stage.open("enqueued 2")
        first = handle.wait_killed()
        assert len(outages(first)) == 1
        second = stage.start_life().wait_end()
        stage.check(truth, first, second)
        assert_trained_what_agents_did([first, second], stage.agents())
        assert audit(stage.out_dir).problems == []
