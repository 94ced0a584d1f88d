"""In-flight prompt groups survive a resume: on the played rig, with the server alive or restarted in between."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_async_ckpt.agl.in_flight.carry_over import RUN_ID_KEY
from agl_async_ckpt.agl.in_flight.kept_events import json_bytes
from agl_async_ckpt.exceptions import ServerError
from tests.rig.agents import row_of
from tests.rig.in_flight import (
    FOREVER,
    SiblingAgents,
    SiblingPlan,
    TimeTravel,
    begin,
    end,
    ids_of,
    kill_after,
    prove_life,
    prove_life_until_now,
    saved_state,
)
from tests.rig.life import run_life
from tests.rig.record import Life, lineage, rows_trained
from tests.rig.runs import TRACKER, assert_balanced, assert_continues, settings, uninterrupted
from tests.rig.server import AglServer

pytestmark = pytest.mark.timeout(240)


def early_siblings(num_rows: int) -> SiblingPlan:
    """One sibling of every second row finishes at once, now and then in failure; rows divisible by 5 are slow."""
    return SiblingPlan(
        rank=dict.fromkeys(range(0, num_rows, 5), 1),
        early=dict.fromkeys(range(0, num_rows, 2), 1),
        early_outcome=dict.fromkeys(range(0, num_rows, 6), "failed"),
    )


@pytest.mark.parametrize("alive", [True, False], ids=["server alive", "server restarted"])
@pytest.mark.parametrize("case", ["24/2/4", "24/2/5", "40/4/10"])
def test_resume_from_every_step_is_exact(server: AglServer, tmp_path: Path, case: str, alive: bool) -> None:
    """Killed after each step in turn: what is trained, in flight and buffered is what the uninterrupted run pulled."""
    run = settings(case, rollout_n=2)
    plan = early_siblings(run.n)
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    travel = TimeTravel(server, tmp_path / "out")
    whole = run_life(run, tmp_path / "out", server.url, die_at=travel.at_saves)
    assert_continues(truth, whole)
    travel.keep_folder(tmp_path / "aside")
    for step in list(whole.saves)[:-1]:
        travel.go_back(step)
        prove_life_until_now(tmp_path / "out")
        known = {rollout_id: record.status.state.value for rollout_id, record in server.rollouts().items()}
        if not alive:
            server.reset_store()
        num_starts = len(server.agents.starts)
        life = run_life(run, tmp_path / "out", server.url, stop_after_step=step + 1, pull_until=max(truth.steps))
        first = Life(steps={n: s for n, s in whole.steps.items() if n <= step}, saves={step: whole.saves[step]})
        assert_continues(truth, first, life)
        for saved in (step, step + 1):
            assert_balanced(truth, saved, first, life)
        assert len(life.pulls[step + 1]) == run.B, "B inputs, not A"
        started = server.agents.starts[num_starts:]
        assert not {rid for rid, _ in started} & known.keys(), "an old id is never started again"
        rollouts = [rollout for group in saved_state(tmp_path / "out", step).carry_over for rollout in group.rollouts]
        num_lost = sum(rollout.finished is None for rollout in rollouts)
        if alive:
            num_lost = sum(known[rollout.rollout_id] == "failed" for rollout in rollouts)
        assert len(started) == num_lost + run.B * run.rollout_n, "what nobody has, and what is new"
        assert sorted(life.steps[step + 1].updated) == sorted(whole.steps[step + 1].updated), "tokens of each rollout"


# --- generations and rollback ---------------------------------------------------------------------------------------


def test_requests_stay_byte_equal_over_five_generations(server: AglServer, tmp_path: Path) -> None:
    """Rows 3 and 4 stay in flight through five resumes, each before they finish: same requests, new ids, each named."""
    run = settings("16/2/6", rollout_n=2, epochs=2)
    plan = SiblingPlan(hold={3: 8, 4: 8}, early={3: 1})
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    lives = [kill_after(run, tmp_path, server, 2)]
    first = {g.data_id: g for g in saved_state(tmp_path, 2).carry_over}
    before = [item for group in first.values() for item in group.rollouts if row_of(item.enqueued["input"]) in (3, 4)]
    texts = [json.dumps(item.request) for item in before]
    assert len(texts) == 4
    assert [item.finished is not None for item in before] == [True, False, False, False]
    for step in (3, 4, 5, 6):
        server.reset_store()
        lives.append(kill_after(run, tmp_path, server, step))
        now = [r for g in saved_state(tmp_path, step).carry_over for r in g.rollouts if row_of(r.enqueued["input"]) < 5]
        assert [json.dumps(rollout.request) for rollout in now] == texts
        assert now[0].rollout_id == before[0].rollout_id, "finished: served under its old id, never created again"
        assert now[0].finished == before[0].finished
        records = server.rollouts()
        assert before[0].rollout_id not in records
        for old, new in zip(before[1:], now[1:], strict=True):
            assert new.rollout_id != old.rollout_id
            assert records[new.rollout_id].metadata.model_extra["replaces"] == old.rollout_id
            kept = ("data_id", "step", "sample_idx_in_step", "input")
            assert [new.enqueued[key] for key in kept] == [old.enqueued[key] for key in kept]
        before = now
    assert server.agents.num_starts(3) == 2 + 4
    server.reset_store()
    lives.append(run_life(run, tmp_path, server.url))
    assert_continues(truth, *lives)


def test_ids_stay_over_generations_while_the_server_lives(server: AglServer, tmp_path: Path) -> None:
    """Adopted again and again: no agent starts twice for what is in flight."""
    run = settings("24/2/6", rollout_n=2)
    plan = SiblingPlan(hold={3: 6, 4: 6}, early={4: 1})
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    lives = [kill_after(run, tmp_path, server, step) for step in (1, 2, 3, 4)]
    lives.append(run_life(run, tmp_path, server.url))
    assert_continues(truth, *lives)
    assert all(server.agents.num_starts(row) == 2 for row in range(6, 24)), "rows 0 to 5 begin another epoch"
    assert (server.agents.num_starts(3), server.agents.num_starts(4)) == (2, 2)


@pytest.mark.parametrize("alive", [True, False], ids=["server alive", "server restarted"])
def test_groups_trained_after_the_checkpoint_are_trained_again(server: AglServer, tmp_path: Path, alive: bool) -> None:
    """Rollback: what was in flight at step 2 is trained and deleted in step 3, death comes in step 4, then from 2."""
    run = settings("24/2/6", rollout_n=2, save_freq=2)
    plan = SiblingPlan(early=dict.fromkeys(range(24), 1))
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    first = run_life(run, tmp_path, server.url, die_at=("trained", 4))
    prove_life_until_now(tmp_path)
    assert first.steps[3].trained == [4, 5]
    assert ids_of(server, 4, 5) == [], "trained and deleted"
    kept = [r for g in saved_state(tmp_path, 2).carry_over for r in g.rollouts if r.finished]
    assert {row_of(rollout.enqueued["input"]) for rollout in kept} >= {4, 5}
    newer = ids_of(server, 8, 9, 10, 11)
    assert len(newer) == 8, "enqueued in steps 3 and 4"
    if not alive:
        server.reset_store()
    starts = server.agents.num_starts()
    second = run_life(run, tmp_path, server.url, stop_after_step=4)
    assert second.start == 2
    assert_continues(truth, first, second, until=4)
    started = server.agents.rows_started()[starts:]
    assert [started.count(row) for row in (4, 5)] == [1, 1], "only the sibling that had not finished"
    assert not set(newer) & set(server.rollouts()), "no checkpoint holds them"
    assert len(server.rollouts()) == 2 * len(second.saves[4].in_flight)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_kills_in_two_hundred_steps_lose_nothing(server: AglServer, tmp_path: Path) -> None:
    """Twenty deaths at all kinds of instants, servers alive and restarted: lost 0, repeated 0."""
    run = settings("100/2/5", rollout_n=2, epochs=4, shuffle=True)
    plan = early_siblings(100)
    truth = uninterrupted(run, server, plan)
    assert max(truth.steps) >= 195
    begin(server, SiblingAgents(plan))
    points = ("saved", "trained", "pulled", "updated", "save", "actor_saved")
    lives = []
    for number in range(20):
        lives.append(run_life(run, tmp_path, server.url, die_at=(points[number % 6], 9 + 9 * number)))
        assert lives[-1].died
        if number % 2:
            server.reset_store()
    lives.append(run_life(run, tmp_path, server.url))
    assert_continues(truth, *lives)
    assert rows_trained(lineage(*lives)) == rows_trained(truth.steps)


# --- finished siblings ----------------------------------------------------------------------------------------------


def kept_rollouts(out_dir: Path, step: int, row: int) -> list[Any]:
    """The rollouts of a row in a checkpoint."""
    groups = saved_state(out_dir, step).carry_over
    return [item for group in groups for item in group.rollouts if row_of(item.enqueued["input"]) == row]


SIBLINGS = SiblingPlan(hold={3: 5, 4: 5}, early={3: 1, 4: 2})
"""Of 3 siblings one of row 3 and two of row 4 finish in step 1, the rest in step 5."""


def test_finished_siblings_are_in_the_file_with_tokens_and_reward(server: AglServer, tmp_path: Path) -> None:
    """Record, raw events and the triplet form, as the server had them."""
    run = settings("16/2/6", rollout_n=3)
    begin(server, SiblingAgents(SIBLINGS))
    kill_after(run, tmp_path, server, 2)
    for row, num_finished in ((3, 1), (4, 2), (6, 0)):
        rollouts = kept_rollouts(tmp_path, 2, row)
        assert [rollout.finished is not None for rollout in rollouts] == [i < num_finished for i in range(3)]
    finished = kept_rollouts(tmp_path, 2, 3)[0].finished
    assert finished.record["status"]["state"] == "succeeded"
    assert [event["event_type"] for event in finished.raw_events] == ["model_request", "reward"]
    request, reward = finished.triplet_events
    assert request["data"]["prompt_token_ids"] == [13, 13]
    assert request["data"]["response_token_ids"] == [6, 4, 1]
    assert request["data"]["response_log_probs"] == [-0.5, -0.5, -0.5]
    assert reward["data"] == {"value": 0.75}


@pytest.mark.parametrize(
    ("mode", "alive", "started", "events_in_file"),
    [
        ("keep", True, 0, 3),
        ("keep", False, 3, 3),
        ("regenerate", True, 0, 0),
        ("regenerate", False, 6, 0),
    ],
)
def test_finished_siblings_run_again_only_if_nobody_has_them(
    server: AglServer, tmp_path: Path, mode: str, alive: bool, started: int, events_in_file: int
) -> None:
    """Adopted while the server lives, else served from the checkpoint; `regenerate` keeps the requests only."""
    run = settings("16/2/6", rollout_n=3, extension={"in_flight": mode})
    truth = uninterrupted(run, server, SIBLINGS)
    begin(server, SiblingAgents(SIBLINGS))
    first = kill_after(run, tmp_path, server, 2)
    rollouts = [*kept_rollouts(tmp_path, 2, 3), *kept_rollouts(tmp_path, 2, 4)]
    assert sum(rollout.finished is not None for rollout in rollouts) == events_in_file
    assert all(rollout.request for rollout in rollouts)
    if not alive:
        server.reset_store()
    starts = server.agents.num_starts(3) + server.agents.num_starts(4)
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert server.agents.num_starts(3) + server.agents.num_starts(4) - starts == started
    assert sorted(second.steps[5].updated) == [3] * 3 + [4] * 3, "every sibling brings its tokens into the update"


@pytest.mark.parametrize("alive", [True, False], ids=["server alive", "server restarted"])
def test_what_had_failed_before_the_checkpoint_runs_again(server: AglServer, tmp_path: Path, alive: bool) -> None:
    """Though it failed of itself while a trainer was there: a failure is nothing worth keeping. Here it fails again."""
    failed = dict.fromkeys((3, 4), "failed")
    plan = SiblingPlan(hold={3: 4, 4: 4}, early={3: 1, 4: 1}, early_outcome=failed)
    run = settings("16/2/6", rollout_n=2)
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    first = kill_after(run, tmp_path, server, 2)
    if not alive:
        server.reset_store()
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert sorted(second.steps[4].updated) == [3, 4], "the failed siblings bring no tokens"
    assert server.agents.num_starts(3) == (3 if alive else 4)


def test_half_of_the_siblings_finished_is_half_of_the_work(server: AglServer, tmp_path: Path) -> None:
    """Server restarted with four of eight siblings finished: exactly the other four of each group start again."""
    run = settings("24/2/4", rollout_n=8)
    plan = SiblingPlan(early=dict.fromkeys(range(24), 4))
    begin(server, SiblingAgents(plan))
    first = kill_after(run, tmp_path, server, 2)
    in_flight = first.saves[2].in_flight
    finished = {row: sum(r.finished is not None for r in kept_rollouts(tmp_path, 2, row)) for row in in_flight}
    assert finished == dict.fromkeys(in_flight, 4)
    server.reset_store()
    starts = server.agents.num_starts()
    second = run_life(run, tmp_path, server.url, stop_after_step=3)
    started = server.agents.rows_started()[starts:]
    assert {row: started.count(row) for row in in_flight} == dict.fromkeys(in_flight, 4)
    assert_continues(uninterrupted(run, server, plan), first, second, until=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_finished_groups_of_eight_at_full_size(server: AglServer, tmp_path: Path) -> None:
    """64/8/16, n = 8, half of the siblings finished: no finished one runs again after a server restart."""
    run = settings("64/8/16", rollout_n=8)
    plan = SiblingPlan(early=dict.fromkeys(range(64), 4))
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    first = kill_after(run, tmp_path, server, 3)
    in_flight = first.saves[3].in_flight
    assert len(in_flight) == 8
    server.restart()
    starts = server.agents.num_starts()
    second = run_life(run, tmp_path, server.url)
    started = server.agents.rows_started()[starts:]
    assert {row: started.count(row) for row in in_flight} == dict.fromkeys(in_flight, 4)
    assert_continues(truth, first, second)


def test_bound_of_kept_bytes_falls_back_group_by_group(server: AglServer, tmp_path: Path) -> None:
    """What fits is kept and served, the rest is generated again, and the save says so."""
    plan = SiblingPlan(hold={3: 5, 4: 5}, early={3: 1, 4: 1})
    run = settings("16/2/6", rollout_n=2)
    begin(server, SiblingAgents(plan))
    kill_after(run, tmp_path / "measure", server, 2)
    one_group = json_bytes(kept_rollouts(tmp_path / "measure", 2, 3)[0].finished)

    bounded = replace(run, extension={"in_flight_max_bytes": one_group + one_group // 2})
    begin(server, SiblingAgents(plan))
    first = kill_after(bounded, tmp_path / "run", server, 2)
    assert [r.finished is not None for r in kept_rollouts(tmp_path / "run", 2, 3)] == [True, False]
    assert [r.finished is not None for r in kept_rollouts(tmp_path / "run", 2, 4)] == [False, False]
    assert any("of 1 rollouts that have ended only the requests are saved" in text for text in first.warnings)
    server.reset_store()
    second = run_life(bounded, tmp_path / "run", server.url)
    assert (server.agents.num_starts(3), server.agents.num_starts(4)) == (3, 4)
    assert_continues(uninterrupted(run, server, plan), first, second)


def test_dropping_says_what_it_costs_at_save_and_resume(server: AglServer, tmp_path: Path) -> None:
    """`drop` keeps no group: the counts are said twice, and the resumed run pulls A new inputs."""
    run = settings("16/2/6", extension={"in_flight": "drop"})
    first = kill_after(run, tmp_path, server, 2)
    state = saved_state(tmp_path, 2)
    assert (state.carry_over, state.num_dropped_groups) == ((), 4)
    said = "in_flight=drop: step 2 does not hold its 4 prompt groups in flight; a resume from it never trains them."
    assert said in first.warnings
    second = run_life(run, tmp_path, server.url, stop_after_step=3)
    assert second.pulls[3] == [8, 9, 10, 11, 12, 13], "the four in flight, 4 to 7, are lost, as was said"
    said = f"{tmp_path / 'global_step_2'} was saved with in_flight=drop: 4 prompt groups in flight at that save"
    assert any(text.startswith(said) for text in second.warnings)
    assert ids_of(server, 4, 5, 6, 7) == [], "and they do not stay on the server"


def test_keeping_again_after_a_checkpoint_that_dropped(server: AglServer, tmp_path: Path) -> None:
    """The setting of the save decides what a checkpoint holds, that of the resume what the next one does."""
    run = settings("16/2/6", extension={"in_flight": "drop"})
    kill_after(run, tmp_path, server, 2)
    kept = replace(run, extension=None)
    kill_after(kept, tmp_path, server, 3)
    state = saved_state(tmp_path, 3)
    assert (state.num_in_flight, state.num_dropped_groups) == (4, 0)
    third = run_life(kept, tmp_path, server.url, stop_after_step=4)
    assert third.restored is not None
    assert third.restored.in_flight == (10, 11, 12, 13)
    assert len(third.pulls[4]) == 2


def test_late_reward_is_in_the_next_checkpoint(server: AglServer, tmp_path: Path) -> None:
    """An agent posts its reward after its rollout has ended: the events are fetched again until it is there."""
    plan = SiblingPlan(hold={3: 6}, early={3: 1}, early_outcome={3: "unrewarded"})
    run = settings("16/2/6", rollout_n=2)
    begin(server, SiblingAgents(plan))

    def post_late(point: str, step: int) -> bool:
        if (point, step) == ("pulled", 3):
            (early,) = ids_of(server, 3, state="succeeded")
            body = {"event_type": "reward", "data": {"value": 0.25, "message": "late"}}
            httpx.post(f"{server.url}/api/rollouts/{early}/attempt/0/events", json=body).raise_for_status()
        return (point, step) == ("saved", 3)

    run_life(run, tmp_path, server.url, die_at=post_late)
    assert [event["event_type"] for event in kept_rollouts(tmp_path, 2, 3)[0].finished.raw_events] == ["model_request"]
    finished = kept_rollouts(tmp_path, 3, 3)[0].finished
    assert [event["data"] for event in finished.raw_events][1:] == [{"value": 0.25, "message": "late"}]
    assert [event["data"] for event in finished.triplet_events][1:] == [{"value": 0.25}]


# --- what ended without a trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ok", "failed", "silent"])
def test_what_ended_after_the_last_proof_of_life_runs_again(server: AglServer, tmp_path: Path, outcome: str) -> None:
    """Whatever its state: its agent may have met no model. What was still running goes on under its old id."""
    run = settings("16/2/6", rollout_n=2)
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    first = kill_after(run, tmp_path, server, 2)
    ended = ids_of(server, 4, 6)
    end(server, *ended, outcome=outcome)
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert {row: server.agents.num_starts(row) for row in (4, 5, 6, 7)} == {4: 4, 5: 2, 6: 4, 7: 2}
    assert all(len(step.updated) == 4 for step in second.steps.values()), "none is trained as failed or empty"
    assert not set(ended) & set(server.rollouts())


def test_what_succeeded_before_the_last_proof_of_life_is_adopted(server: AglServer, tmp_path: Path) -> None:
    """Though no step has read it: the trainer was there when it ended."""
    run = settings("16/2/6", rollout_n=2)
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    first = run_life(run, tmp_path, server.url, stop_after_step=2)
    end(server, *ids_of(server, 4))
    prove_life_until_now(tmp_path)
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert all(server.agents.num_starts(row) == 2 for row in (4, 5, 6, 7))
    assert sorted(second.steps[3].updated) == [4, 4, 5, 5]


def test_running_rollouts_run_again_under_the_strict_choice(server: AglServer, tmp_path: Path) -> None:
    """`adopt: finished_before_death`: no rollout mixes weights of two lives; what ended in time is adopted."""
    run = settings("16/2/6", rollout_n=2, extension={"adopt": "finished_before_death"})
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    first = run_life(run, tmp_path, server.url, stop_after_step=2)
    end(server, *ids_of(server, 4))
    prove_life_until_now(tmp_path)
    running = ids_of(server, 5, 6, 7)
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert {row: server.agents.num_starts(row) for row in (4, 5, 6, 7)} == {4: 2, 5: 4, 6: 4, 7: 4}
    assert not set(running) & set(server.rollouts())


class FailFirst(SiblingAgents):
    """Agents whose first `times` runs of a row fail in the second life: they have met a gap.

    Attributes:
        failures: Row -> how many more of its runs fail.
    """

    failures: dict[int, int]

    def _finish(self, rollout_id: str, step: int) -> None:
        from agentlightning.server.store import _rollouts

        row = row_of(_rollouts[rollout_id].input)
        if self.failures.get(row, 0):
            self.failures[row] -= 1
            self._outcomes[rollout_id] = "failed"
        super()._finish(rollout_id, step)


@pytest.mark.parametrize(("failures", "starts", "samples"), [(1, 2, 1), (2, 2, 0)])
def test_failure_of_an_adopted_rollout_runs_again_once(
    server: AglServer, tmp_path: Path, failures: int, starts: int, samples: int
) -> None:
    """It ran across the gap, so a first failure proves nothing; a second one is its own."""
    run = settings("16/2/6")
    agents = FailFirst()
    agents.failures = {}
    begin(server, agents)
    kill_after(run, tmp_path, server, 2)
    agents.failures = {4: failures}
    (old,) = ids_of(server, 4)
    second = run_life(run, tmp_path, server.url, stop_after_step=4)
    assert second.steps[3].trained == [5, 4], "later than it would have been, and in the same step"
    assert second.steps[4].trained == [6, 7]
    assert agents.num_starts(4) == starts
    assert second.steps[3].updated.count(4) == samples
    assert agents.failures == {4: 0}
    assert old not in server.rollouts()
    assert any(text.startswith(f"Rollout {old} failed, or brought nothing to train from") for _, text in second.log)


def test_failure_within_one_life_is_trained_as_failed(server: AglServer, tmp_path: Path) -> None:
    """New inputs of the resumed life have crossed no gap."""
    run = settings("16/2/6")
    agents = FailFirst()
    agents.failures = {}
    begin(server, agents)
    kill_after(run, tmp_path, server, 2)
    agents.failures = {8: 1}
    second = run_life(run, tmp_path, server.url)
    assert agents.num_starts(8) == 1
    assert second.steps[5].trained == [8, 9]
    assert second.steps[5].updated == [9]


def test_gap_of_an_earlier_resume_is_remembered(server: AglServer, tmp_path: Path) -> None:
    """Ended in the first gap, left on the server by a second life that died before its first save: still doubted."""
    run = settings("16/2/6", extension={"reclaim": False})
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    first = kill_after(run, tmp_path, server, 2)
    now = time.time()
    end(server, *ids_of(server, 4), outcome="failed")
    second = run_life(run, tmp_path, server.url, die_at=("pulled", 3))
    prove_life(tmp_path, (0.0, now), (time.time(), FOREVER))
    third = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second, third)
    assert third.steps[3].updated == [4, 5]


# --- the server -----------------------------------------------------------------------------------------------------


def put_foreign(server: AglServer) -> dict[str, Any]:
    """Rollouts of another run, and of none, on the server; their records."""
    bodies = [
        {"rollout_id": "other-run", "input": {"index": 1}, "metadata": {RUN_ID_KEY: "another"}},
        {"rollout_id": "no-run", "input": {"index": 2}},
        {"rollout_id": "other-ended", "input": {"index": 3}, "metadata": {RUN_ID_KEY: "another", "k": [1]}},
    ]
    httpx.post(f"{server.url}/api/rollouts", json=bodies).raise_for_status()
    for rollout_id in ("other-run", "no-run", "other-ended"):
        body = {"status": {"state": "running"}}
        httpx.patch(f"{server.url}/api/rollouts/{rollout_id}", json=body).raise_for_status()
    body = {"status": {"state": "failed"}}
    httpx.patch(f"{server.url}/api/rollouts/other-ended", json=body).raise_for_status()
    return {rollout_id: server.rollouts()[rollout_id] for rollout_id in ("other-run", "no-run", "other-ended")}


class OwnAgents(SiblingAgents):
    """A controller that leaves the rollouts of other runs to theirs."""

    def _reconcile(self) -> int:
        self._ended |= {"other-run": False, "no-run": False, "other-ended": False}
        return super()._reconcile()


def test_foreign_rollouts_are_all_there_in_the_end(server: AglServer, tmp_path: Path) -> None:
    """Of another run id and of none, put there before the kill: neither deleted nor changed by two resumes."""
    run = settings("16/2/6", rollout_n=2)
    begin(server, OwnAgents())
    first = run_life(run, tmp_path, server.url, stop_after_step=2)
    foreign = put_foreign(server)
    second = run_life(run, tmp_path, server.url, stop_after_step=4)
    third = run_life(run, tmp_path, server.url)
    assert third.finished
    left = server.rollouts()
    assert {rollout_id: left.get(rollout_id) for rollout_id in foreign} == foreign
    assert_continues(uninterrupted(run, server), first, second, third)


@pytest.mark.parametrize("reclaim", [True, False])
def test_rollouts_that_no_checkpoint_holds_are_reclaimed(server: AglServer, tmp_path: Path, reclaim: bool) -> None:
    """Enqueued after the checkpoint, training or validation; `reclaim: false` leaves them."""
    run = settings("16/2/6", rollout_n=2, save_freq=2, extension={"reclaim": reclaim})
    begin(server, SiblingAgents())
    run_life(run, tmp_path, server.url, die_at=("trained", 3))
    orphans = ids_of(server, 8, 9)
    assert len(orphans) == 4
    tag = {RUN_ID_KEY: saved_state(tmp_path, 2).run_id}
    body = {"rollout_id": "validation", "input": {"index": 0}, "is_train": False, "metadata": tag}
    httpx.post(f"{server.url}/api/rollouts", json=[body]).raise_for_status()
    second = run_life(run, tmp_path, server.url, stop_after_step=4)
    assert second.start == 2
    left = set(server.rollouts())
    assert set(orphans) & left == (set() if reclaim else set(orphans))
    assert ("validation" in left) is not reclaim


def test_validation_rollouts_carry_the_runs_tag(server: AglServer, tmp_path: Path) -> None:
    """A validation that is killed half-way is reclaimed by the next start, so its rollouts must be known as ours."""
    tags: list[tuple[bool, str]] = []

    class Watching(SiblingAgents):
        def _finish(self, rollout_id: str, step: int) -> None:
            from agentlightning.server.store import _rollouts

            record = _rollouts[rollout_id]
            tags.append((record.is_train, record.metadata.model_extra[RUN_ID_KEY]))
            super()._finish(rollout_id, step)

    begin(server, Watching())
    run_life(settings("8/2/4", val_before_train=True), tmp_path, server.url, stop_after_step=1)
    run_id = saved_state(tmp_path, 1).run_id
    assert set(tags) == {(False, run_id), (True, run_id)}


def test_first_start_again_from_scratch_reclaims_too(server: AglServer, tmp_path: Path) -> None:
    """A run that died before its first checkpoint starts over; what it had enqueued does not stay."""
    run = settings("16/2/6", rollout_n=2)
    begin(server, SiblingAgents())
    run_life(run, tmp_path, server.url, die_at=("trained", 1))
    orphans = set(server.rollouts())
    assert orphans
    second = run_life(run, tmp_path, server.url, stop_after_step=1)
    assert second.pulls[1] == [0, 1, 2, 3, 4, 5]
    assert not orphans & set(server.rollouts())


def test_unreachable_server_at_resume_leaves_the_checkpoint_untouched(
    server: AglServer, free_url: str, tmp_path: Path
) -> None:
    """A clear message with the URL after `server_wait_s`; a start with the server there continues."""
    run = settings("16/2/6", extension={"server_wait_s": 0})
    first = kill_after(run, tmp_path, server, 2)
    checkpoint = [tmp_path / TRACKER, *(path for path in tmp_path.glob("global_step_*/**/*") if path.is_file())]
    before = {path: path.read_bytes() for path in checkpoint}
    with pytest.raises(ServerError, match=f"The agl-server at {free_url} was not reachable for 0 s"):
        run_life(run, tmp_path, free_url)
    assert {path: path.read_bytes() for path in checkpoint} == before
    second = run_life(run, tmp_path, server.url)
    assert_continues(uninterrupted(run, server), first, second)
