"""In-flight prompt groups across changes: rollout.n, A and B, forks, val_only, hooks, settings; and what is counted."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.agl.in_flight.carry_over import REPLACES_KEY, RUN_ID_KEY
from tests.rig.agents import row_of
from tests.rig.in_flight import (
    SiblingAgents,
    SiblingPlan,
    begin,
    end,
    ids_of,
    kill_after,
    metrics_of,
    prove_life_until_now,
    saved_state,
)
from tests.rig.life import run_life
from tests.rig.record import Life, lineage, rows_pulled, rows_trained
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

pytestmark = pytest.mark.timeout(240)

ALIVE = pytest.mark.parametrize("alive", [True, False], ids=["server alive", "server restarted"])


def assert_nothing_lost(out_dir: Path, step: int, *lives: Life) -> None:
    """Of lives under different settings: what was pulled is trained, in flight or buffered, each exactly as often."""
    steps = {number: value for number, value in lineage(*lives).items() if number <= step}
    groups = [row_of(group.rollouts[0].enqueued["input"]) for group in saved_state(out_dir, step).carry_over]
    assert Counter([*rows_trained(steps), *groups]) == Counter(rows_pulled(steps))


def group_sizes(out_dir: Path, step: int) -> dict[int, int]:
    """Row -> siblings of its group in a checkpoint."""
    groups = saved_state(out_dir, step).carry_over
    return {row_of(group.rollouts[0].enqueued["input"]): len(group.rollouts) for group in groups}


# --- rollout.n ------------------------------------------------------------------------------------------------------


@ALIVE
def test_groups_follow_rollout_n_up_and_down(server: AglServer, tmp_path: Path, alive: bool) -> None:
    """1, 2, 3 and 1 siblings in four lives: rows 3 and 4 stay in flight through all of them, none is lost."""
    plan = SiblingPlan(hold={3: 8, 4: 8})
    truth = uninterrupted(settings("24/2/6"), server, plan)
    begin(server, SiblingAgents(plan))
    lives = []
    for step, n in ((2, 1), (4, 2), (6, 3)):
        lives.append(kill_after(settings("24/2/6", rollout_n=n), tmp_path, server, step))
        assert group_sizes(tmp_path, step) == dict.fromkeys(lives[-1].saves[step].in_flight, n)
        assert {lives[-1].steps[k].num_rollouts for k in (step - 1, step)} == {2 * n}
        if not alive:
            server.reset_store()
    lives.append(run_life(settings("24/2/6"), tmp_path, server.url))
    assert_continues(truth, *lives)
    if alive:
        assert [server.agents.num_starts(row) for row in (3, 4)] == [3, 3], "grown by one sibling twice, no rerun"


def test_fresh_siblings_repeat_the_request_and_replace_nobody(server: AglServer, tmp_path: Path) -> None:
    """A grown group: the old sibling is adopted, the new one has its input, and the next file holds both alike."""
    plan = SiblingPlan(hold={3: 8})
    begin(server, SiblingAgents(plan))
    kill_after(settings("24/2/6"), tmp_path, server, 2)
    (old,) = ids_of(server, 3)
    kill_after(settings("24/2/6", rollout_n=2), tmp_path, server, 3)
    first, fresh = (server.rollouts()[rollout_id] for rollout_id in ids_of(server, 3))
    assert first.rollout_id == old
    assert fresh.input == first.input
    assert fresh.config == first.config
    assert fresh.metadata.model_extra == {RUN_ID_KEY: saved_state(tmp_path, 3).run_id}
    (group,) = [g for g in saved_state(tmp_path, 3).carry_over if row_of(g.rollouts[0].enqueued["input"]) == 3]
    assert json.dumps(group.rollouts[0].request) == json.dumps(group.rollouts[1].request)
    shared = ("data_id", "step", "sample_idx_in_step", "input")
    assert [group.rollouts[0].enqueued[key] for key in shared] == [group.rollouts[1].enqueued[key] for key in shared]


@ALIVE
def test_group_that_shrinks_to_finished_siblings_is_trained_at_once(
    server: AglServer, tmp_path: Path, alive: bool
) -> None:
    """Of three siblings the second had finished: with n = 1 the group is complete, and no agent starts for it."""
    # Rows 4 and 5 would finish in step 9 only; their one finished sibling is the first.
    plan = SiblingPlan(hold={4: 9, 5: 9}, early={4: 1, 5: 1})
    begin(server, SiblingAgents(plan))
    first = kill_after(settings("24/2/6", rollout_n=3), tmp_path, server, 3)
    assert first.saves[3].in_flight[:2] == (4, 5)
    unfinished = [
        rollout_id for rollout_id in ids_of(server, 4, 5) if server.rollouts()[rollout_id].status.state != "succeeded"
    ]
    assert len(unfinished) == 4
    if not alive:
        server.reset_store()
    starts = Counter(server.agents.rows_started())
    second = run_life(settings("24/2/6"), tmp_path, server.url, stop_after_step=5)
    assert second.steps[4].trained == [4, 5]
    assert second.steps[4].updated == [4, 5], "with the tokens that had been generated"
    assert starts[4] == server.agents.num_starts(4)
    assert not set(unfinished) & set(server.rollouts()), "the siblings that are too many are reclaimed"
    assert_nothing_lost(tmp_path, 5, first, second)


def test_more_complete_groups_than_a_step_trains_wait_for_the_next(server: AglServer, tmp_path: Path) -> None:
    """Four groups become complete by shrinking; two are trained in each of the next steps."""
    plan = SiblingPlan(hold=dict.fromkeys((4, 5, 6, 7), 9), early=dict.fromkeys((4, 5, 6, 7), 1))
    begin(server, SiblingAgents(plan))
    first = kill_after(settings("24/2/8", rollout_n=2), tmp_path, server, 2)
    assert first.saves[2].in_flight[:4] == (4, 5, 6, 7)
    server.reset_store()
    second = run_life(settings("24/2/8"), tmp_path, server.url, stop_after_step=5)
    assert [second.steps[step].trained for step in (3, 4)] == [[4, 5], [6, 7]]
    assert_nothing_lost(tmp_path, 5, first, second)


# --- A and B --------------------------------------------------------------------------------------------------------


@ALIVE
@pytest.mark.parametrize("a", [8, 5])
def test_lowered_a_makes_groups_wait_and_drops_none(server: AglServer, tmp_path: Path, alive: bool, a: int) -> None:
    """Eight groups in flight, room for A - 1; killed again while some wait; admitted oldest first, all trained."""
    run = settings("40/4/12", rollout_n=2)
    plan = SiblingPlan(early={5: 1, 9: 1, 10: 1})
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    lives = [kill_after(run, tmp_path, server, 2)]
    assert lives[0].saves[2].in_flight == tuple(range(8, 16))
    if not alive:
        server.reset_store()
    lower = replace(run, A=a)
    lives.append(kill_after(lower, tmp_path, server, 3))
    waiting = 8 - (a - 1)
    (restored,) = [text for _, text in lives[1].log if text.startswith("Resuming the input stream")]
    assert "8 prompt groups in flight (16 rollouts, " in restored
    assert restored.endswith(
        f" {waiting} of the groups wait for room." if waiting > 1 else " 1 of the groups waits for room."
    )
    assert len(lives[1].pulls[3]) == 1, "the trainer cannot pull none"
    assert lives[1].steps[3].trained == [8, 9, 10, 11]
    left = [row_of(g.rollouts[0].enqueued["input"]) for g in saved_state(tmp_path, 3).carry_over]
    assert left == [12, 13, 14, 15, 16], "oldest first"
    assert_nothing_lost(tmp_path, 3, *lives)
    if not alive:
        server.reset_store()
    lives.append(run_life(lower, tmp_path, server.url))
    steps = lineage(*lives)
    assert steps[4].trained == [12, 13, 14, 15], "older than 16, which was pulled while they waited"
    assert steps[5].trained[0] == 16
    assert rows_pulled(steps) == rows_pulled(truth.steps)[: len(rows_pulled(steps))]
    assert set(range(40)) <= {*rows_trained(steps), *lives[-1].saves[max(steps)].in_flight}
    assert_nothing_lost(tmp_path, max(lives[-1].saves), *lives)
    # Three siblings had finished before the first kill, and no group was started for nothing.
    for row in range(8, 16):
        assert server.agents.num_starts(row) == 2 if alive else server.agents.num_starts(row) <= 6


@ALIVE
def test_no_group_waits_for_ever_where_a_step_trains_one(server: AglServer, tmp_path: Path, alive: bool) -> None:
    """B = 1 pulls one and trains one: room never appears, so what was pulled later lets older groups pass."""
    begin(server, SiblingAgents())
    first = kill_after(settings("30/1/7"), tmp_path, server, 2)
    assert first.saves[2].in_flight == (2, 3, 4, 5, 6, 7)
    if not alive:
        server.reset_store()
    second = run_life(settings("30/1/3"), tmp_path, server.url, stop_after_step=12)
    trained = [row for step in range(3, 13) for row in second.steps[step].trained]
    assert trained == list(range(2, 12)), "in the order of pulling"
    assert_nothing_lost(tmp_path, 12, first, second)
    if alive:
        assert max(Counter(server.agents.rows_started()).values()) == 1


@ALIVE
def test_raised_b_waits_for_more_groups_than_were_restored(server: AglServer, tmp_path: Path, alive: bool) -> None:
    """Four in flight, B raised to 6: the step pulls up to A and trains six, the restored ones first."""
    begin(server, SiblingAgents())
    first = kill_after(settings("48/2/6", rollout_n=2), tmp_path, server, 2)
    if not alive:
        server.reset_store()
    second = run_life(settings("48/6/10", rollout_n=2), tmp_path, server.url, stop_after_step=5)
    assert second.pulls[3] == [8, 9, 10, 11, 12, 13]
    assert second.steps[3].trained == [4, 5, 6, 7, 8, 9]
    steps = lineage(first, second)
    assert rows_pulled(steps) == list(range(len(rows_pulled(steps))))
    assert_nothing_lost(tmp_path, 5, first, second)


# --- forks and val_only ---------------------------------------------------------------------------------------------


def test_fork_creates_everything_afresh_and_leaves_the_parent_alone(server: AglServer, tmp_path: Path) -> None:
    """The parent's rollouts stay as they are while a fork trains; then the parent resumes, and adopts all of them."""
    run = settings("24/2/6", rollout_n=2)
    plan = SiblingPlan(hold={4: 5, 5: 5}, early={4: 1, 5: 1})
    truth = uninterrupted(run, server, plan)
    begin(server, SiblingAgents(plan))
    parent = kill_after(run, tmp_path / "parent", server, 3)
    before = server.rollouts()
    events = {rid: server.call(lambda rid=rid: _events(rid)) for rid in before}
    starts = server.agents.num_starts()

    forked = replace(run, resume_mode="resume_path", resume_from_path=str(tmp_path / "parent" / "global_step_3"))
    fork = run_life(forked, tmp_path / "fork", server.url, stop_after_step=5)
    after = server.rollouts()
    assert {rid: after.get(rid) for rid in before} == before
    assert {rid: server.call(lambda rid=rid: _events(rid)) for rid in before} == events
    started = Counter(server.agents.rows_started()[starts:])
    assert {row: started[row] for row in parent.saves[3].in_flight} == {4: 1, 5: 1, 8: 2, 9: 2}, "4 and 5 are half done"
    states = [saved_state(tmp_path / name, step) for name, step in (("parent", 3), ("fork", 5))]
    assert states[1].run_id != states[0].run_id
    assert states[1].parent_run_id == states[0].run_id
    tags = {record.metadata.model_extra[RUN_ID_KEY] for rid, record in after.items() if rid not in before}
    assert tags == {states[1].run_id}
    assert_continues(truth, parent, fork, until=5)

    of_fork = {rid: record for rid, record in after.items() if rid not in before}
    starts = server.agents.num_starts()
    again = run_life(run, tmp_path / "parent", server.url, stop_after_step=4)
    assert {rid: server.rollouts().get(rid) for rid in of_fork} == of_fork, "nor does the parent touch the fork's"
    assert server.agents.rows_started()[starts:] == [10, 10, 11, 11], "only what it pulls"
    assert_continues(truth, parent, again, until=4)


def _events(rollout_id: str) -> Any:
    from agentlightning.server.store import _events

    return {attempt: list(events) for attempt, events in _events[rollout_id].items()}


def test_fork_that_resumes_in_its_own_folder_adopts_its_own(server: AglServer, tmp_path: Path) -> None:
    """From its first save on a fork is a run like any other."""
    run = settings("24/2/6", rollout_n=2)
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    parent = kill_after(run, tmp_path / "parent", server, 3)
    forked = replace(run, resume_mode="resume_path", resume_from_path=str(tmp_path / "parent" / "global_step_3"))
    fork = kill_after(forked, tmp_path / "fork", server, 4)
    starts = server.agents.num_starts()
    again = run_life(run, tmp_path / "fork", server.url, stop_after_step=5)
    assert len(server.agents.starts) - starts == 2 * run.B
    assert_continues(truth, parent, fork, again, until=5)


def test_val_only_touches_nothing_in_flight(server: AglServer, tmp_path: Path) -> None:
    """A validation from the checkpoint adopts, creates and deletes nothing, and proves no life of a trainer."""
    run = settings("16/2/6", rollout_n=2)
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    first = kill_after(run, tmp_path, server, 2)
    ended = ids_of(server, 4)
    end(server, *ended)
    before = server.rollouts()
    proofs = (tmp_path / "agentlightning_alive.json").read_bytes()
    starts = len(server.agents.starts)
    only = replace(run, val_before_train=True, overrides=("trainer.val_only=true",))
    validated = run_life(only, tmp_path, server.url)
    assert validated.finished
    assert validated.steps == {}
    assert server.rollouts() == before
    assert server.agents.rows_started()[starts:] == [0, 1], "the rows of the validation"
    assert (tmp_path / "agentlightning_alive.json").read_bytes() == proofs
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert server.agents.num_starts(4) == 4, "ended when only a validation was there: run again"
    assert server.agents.num_starts(5) == 2


# --- hooks and configs ----------------------------------------------------------------------------------------------

HOOKS = '''
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import RolloutConfig

class Hooks(RolloutHooks):
    """Numbers the siblings it sees, and gives every second one a config of its own."""

    count = 0

    def on_enqueue(self, request):
        number, Hooks.count = Hooks.count, Hooks.count + 1
        changes = {
            "input": {**request.input, "number": number, "passes": request.input.get("passes", 0) + 1},
            "metadata": {"kind": "even" if number % 2 == 0 else "odd", "deep": {"number": [number, None]}},
        }
        if number % 2:
            changes["config"] = RolloutConfig(timeout_seconds=1000 + number)
        return request.model_copy(update=changes)
'''

REWARDING = '''
from agentlightning.hooks import RolloutHooks

class Hooks(RolloutHooks):
    """Posts the reward, from what the agent has left, once a rollout has succeeded."""

    def on_succeeded(self, rollout, events, store):
        seen = [event.event_type for found in events.values() for event in found]
        store.add_event(rollout.rollout_id, "0", "reward", {"value": 0.5, "source": "hook", "message": str(seen)})
'''


def with_hooks(run: RunSettings, path: Path, text: str, *overrides: str) -> RunSettings:
    """The run with a hook file."""
    path.write_text(text)
    return replace(run, overrides=(f"agentlightning.hooks={path}", *overrides))


def test_hooks_are_not_applied_a_second_time(server: AglServer, tmp_path: Path) -> None:
    """Inputs, configs and metadata that a hook changed per sibling come back as posted; new inputs pass it once."""
    run = with_hooks(settings("16/2/6", rollout_n=2), tmp_path / "hooks.py", HOOKS)
    begin(server, SiblingAgents())
    kill_after(run, tmp_path / "out", server, 2)
    posted = {rid: record for rid, record in server.rollouts().items() if rid in ids_of(server, 4, 5, 6, 7)}
    assert len({json.dumps(record.input) for record in posted.values()}) == 8, "each sibling has an input of its own"
    server.reset_store()
    run_life(run, tmp_path / "out", server.url, die_at=_on(server, "updated", 3, created := {}))
    again = {
        record.metadata.model_extra[REPLACES_KEY]: record
        for record in created.values()
        if REPLACES_KEY in record.metadata.model_extra
    }
    assert set(again) == set(posted)
    for old, record in again.items():
        assert record.input == posted[old].input
        assert record.input["passes"] == 1
        assert record.config == posted[old].config
        assert {**record.metadata.model_extra, REPLACES_KEY: None} == {
            **posted[old].metadata.model_extra,
            REPLACES_KEY: None,
        }
    new = [record.input for record in created.values() if REPLACES_KEY not in record.metadata.model_extra]
    assert [item["passes"] for item in new] == [1] * 4
    assert [item["number"] for item in new] == [0, 1, 2, 3], "the hook of this life saw only what this life pulled"


def _on(server: AglServer, point: str, step: int, seen: dict[str, Any]) -> Any:
    """For `die_at`: dies there; `seen` gets every rollout that the server held at some instant of the life."""

    def here(now: str, number: int) -> bool:
        seen.update(server.rollouts())
        return (now, number) == (point, step)

    choose = server.agents._choose

    def watching(*args: Any) -> Any:
        from agentlightning.server.store import _rollouts

        seen.update(_rollouts)
        return choose(*args)

    server.agents._choose = watching
    return here


def test_settings_of_the_resumed_run_apply_where_no_hook_changed_the_config(server: AglServer, tmp_path: Path) -> None:
    """A corrected timeout takes effect on re-created rollouts; a config that a hook set stays."""
    plain = settings("16/2/6", rollout_n=2)
    run = with_hooks(plain, tmp_path / "hooks.py", HOOKS, "agentlightning.rollout_timeout_seconds=100")
    begin(server, SiblingAgents(SiblingPlan(hold=dict.fromkeys((6, 7), 9))))
    kill_after(run, tmp_path / "out", server, 2)
    before = [server.rollouts()[rid].config.timeout_seconds for rid in ids_of(server, 6, 7)]
    assert before == [100, 1013, 100, 1015]
    corrected = with_hooks(plain, tmp_path / "hooks.py", HOOKS, "agentlightning.rollout_timeout_seconds=200")
    for step, timeout in ((3, 200), (4, 100)):
        server.reset_store()
        kill_after(corrected if timeout == 200 else run, tmp_path / "out", server, step)
        after = [server.rollouts()[rid].config.timeout_seconds for rid in ids_of(server, 6, 7)]
        assert after == [timeout, 1013, timeout, 1015]


@ALIVE
def test_reward_of_a_hook_lands_in_a_sibling_that_had_finished(server: AglServer, tmp_path: Path, alive: bool) -> None:
    """`on_succeeded` runs again for it, sees its events and posts the reward; training and the next file have it."""
    plan = SiblingPlan(hold={4: 5}, early={4: 1})
    run = with_hooks(settings("16/2/6", rollout_n=2), tmp_path / "hooks.py", REWARDING)
    begin(server, SiblingAgents(plan))
    kill_after(run, tmp_path / "out", server, 2)
    if not alive:
        server.reset_store()
    second = run_life(run, tmp_path / "out", server.url, stop_after_step=5)
    sibling = next(g for g in saved_state(tmp_path / "out", 4).carry_over if group_row(g) == 4).rollouts[0]
    assert sibling.finished is not None
    rewards = [event["data"] for event in sibling.finished.raw_events if event["event_type"] == "reward"]
    assert rewards[0] == {"value": 1.0}, "the agent's"
    assert {reward["value"] for reward in rewards[1:]} == {0.5}
    assert rewards[1]["message"] == "['model_request', 'reward']"
    assert len(rewards) >= 3, "one at each step, as agent-lightning calls the hook"
    trimmed = [event["data"] for event in sibling.finished.triplet_events if event["event_type"] == "reward"]
    assert trimmed[1:] == [{"value": 0.5, "source": "hook"}] * (len(rewards) - 1)
    assert second.steps[5].updated.count(4) == 2


def group_row(group: Any) -> int:
    """Row of a prompt group."""
    return row_of(group.rollouts[0].enqueued["input"])


# --- metrics and report ---------------------------------------------------------------------------------------------


def test_metrics_count_what_a_resume_did(server: AglServer, tmp_path: Path) -> None:
    """One group of each kind, with its siblings; the position of the input stream comes with every step."""
    run = settings("24/2/7", rollout_n=2, save_freq=3)
    plan = SiblingPlan(hold=dict.fromkeys((6, 7), 9), early={6: 1})
    begin(server, SiblingAgents(plan))
    with metrics_of() as (trainer_cls, metrics):
        run_life(run, tmp_path, server.url, die_at=("trained", 4), trainer_cls=trainer_cls)
    assert metrics[1] == {"num_buffered_inputs": 1, "num_in_flight_groups": 5, "input_epoch": 1}
    assert metrics[3] == metrics[1]
    prove_life_until_now(tmp_path)
    state = saved_state(tmp_path, 3)
    rows = [group_row(group) for group in state.carry_over]
    assert rows == [6, 7, 8, 9, 10]
    end(server, *ids_of(server, 10))  # in the gap
    assert ids_of(server, 8, 9) == [], "trained in step 4"
    with metrics_of() as (trainer_cls, metrics):
        second = run_life(run, tmp_path, server.url, stop_after_step=6, trainer_cls=trainer_cls)
    assert second.start == 3
    counts = {
        "num_restored_groups": 5,
        "num_adopted_rollouts": 3,  # of rows 6 and 7, running
        "num_reused_finished_rollouts": 1,  # of row 6, early
        "num_recreated_rollouts": 4,  # rows 8 and 9, deleted after the checkpoint
        "num_rerun_rollouts": 2,  # row 10
        "num_reclaimed_rollouts": 6,  # rows 11 and 12 of step 4, and row 10
    }
    assert metrics[4] == {"num_buffered_inputs": 1, "num_in_flight_groups": 5, "input_epoch": 1, **counts}
    (text,) = [text for _, text in second.log if text.startswith("In-flight rollouts of step 3: ")]
    first_id = state.carry_over[0].rollouts[0].rollout_id
    assert f"1 ({first_id}) finished before and reused" in text
    assert "3 (" in text.partition("adopted")[0]
    (restored,) = [text for _, text in second.log if text.startswith("Resuming the input stream")]
    assert f"{tmp_path / 'global_step_3'}, which latest_checkpointed_iteration.txt names: step 3, epoch 1, " in restored
    assert restored.endswith("1 buffered input and 5 prompt groups in flight (10 rollouts, 1 finished).")


def test_rerun_within_the_first_steps_is_counted(server: AglServer, tmp_path: Path) -> None:
    """A failure across the gap that shows only later counts as run again from then on."""
    run = settings("24/2/6")
    plan = SiblingPlan(hold={6: 5}, outcome={6: "failed"})
    begin(server, SiblingAgents(plan))
    kill_after(run, tmp_path, server, 2)
    with metrics_of() as (trainer_cls, metrics):
        run_life(run, tmp_path, server.url, stop_after_step=6, trainer_cls=trainer_cls)
    assert [metrics[step]["num_rerun_rollouts"] for step in (3, 4, 5)] == [0, 0, 1]


def test_epoch_of_the_inputs_is_counted_at_the_pull(server: AglServer, tmp_path: Path) -> None:
    """It runs ahead of the steps, as the loader does."""
    begin(server, SiblingAgents())
    with metrics_of() as (trainer_cls, metrics):
        life = run_life(settings("8/2/6", epochs=2), tmp_path, server.url, trainer_cls=trainer_cls)
    assert {step: values["input_epoch"] for step, values in metrics.items()} == life.epochs


def test_log_says_nothing_of_a_resume_where_there_was_none(
    server: AglServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A first start has no report and no counts of one."""
    begin(server, SiblingAgents())
    with caplog.at_level(logging.INFO), metrics_of() as (trainer_cls, metrics):
        life = run_life(settings("8/2/4"), tmp_path, server.url, stop_after_step=1, trainer_cls=trainer_cls)
    assert set(metrics[1]) == {"num_buffered_inputs", "num_in_flight_groups", "input_epoch"}
    assert not any("Resumed" in text or "In-flight rollouts of" in text for _, text in life.log)
