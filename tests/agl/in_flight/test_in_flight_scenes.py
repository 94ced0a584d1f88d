"""In-flight rollouts on real processes: the real server, gateway, controller, agents and trainer, killed with SIGKILL.

Only GPU work is a stand-in. Each scene puts agents where it wants them by gates, so nothing depends on timing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rig.processes import start_process, wait_until
from tests.rig.record import lineage
from tests.scenes.account import assert_trained_what_agents_did
from tests.scenes.meddler import Meddler
from tests.scenes.stage import Stage, StageMaker

pytestmark = pytest.mark.slow

ENDS = ["ask", "reward"]


def ids_of(events: list[dict[str, Any]]) -> list[str]:
    """Rollout ids of agents' notes."""
    return [event["rollout_id"] for event in events]


def trained_ids(handle_or_life: Any, *rows: int) -> set[str]:
    """Ids of the rollouts that a life has trained for some rows."""
    return {
        rollout["rollout_id"]
        for step in handle_or_life.steps.values()
        for rollout in step.rollouts
        if rollout["input"]["index"] in rows
    }


def half_done(stage: Stage, *rows: int, held: str = "held") -> dict[str, list[list[str]]]:
    """A plan: of each row the first half of the siblings ends, the second answers and then waits at a gate."""
    n = stage.settings.rollout_n
    starts = [ENDS] * (n // 2) + [["ask", f"gate:{held}", "reward"]] * (n - n // 2) + [ENDS]
    return {f"row{row}": list(starts) for row in rows}


def test_rollback_past_trained_groups_continues_from_the_checkpoint(make_stage: StageMaker) -> None:
    """Checkpoint 2, death at the end of step 4: what was in flight at 2, trained and deleted since, comes back."""
    with make_stage("12/2/4", rollout_n=2, save_freq=2, total_steps=5) as stage:
        truth = stage.truth(5)
        # The siblings of rows 4 and 5 stand on both sides of the save of step 2.
        stage.plan(**half_done(stage, 4, 5), row3=[["gate:step 2", *ENDS], ["gate:step 2", *ENDS], ENDS])
        first = stage.start_life(die_at=("save", 4))
        first.wait_seen(ids_of(stage.wait_agents(1, "end", 4) + stage.wait_agents(1, "end", 5)))
        stage.open("step 2")
        first.wait_reached("saved", 2)
        stage.open("held")
        before = first.wait_killed()
        assert before.saves[2]["in_flight"] == [4, 5]
        assert {4, 5} <= {row for step in (3, 4) for row in before.steps[step].trained}
        on_server = stage.services.rollouts()
        assert not [rid for rid in trained_ids(before, 4, 5) if rid in on_server]

        second = stage.start_life().wait_end()
        assert second.start == 2
        stage.check(truth, before, second)
        assert_trained_what_agents_did([before, second], stage.agents())
        counts = second.resume_metrics
        assert counts["num_restored_groups"] == 2
        assert counts["num_reused_finished_rollouts"] == 2
        assert counts["num_recreated_rollouts"] == 2
        # Generated once: the finished siblings. Twice: those that ended after the checkpoint.
        assert [len(stage.agents("start", row)) for row in (4, 5)] == [3, 3]
        # What the lost steps had created and not trained is gone from the server.
        orphans = set(before.posted_ids) - {rid for step in before.steps.values() for rid in ids_of(step.rollouts)}
        assert orphans
        assert not orphans & set(stage.services.rollouts())


@pytest.mark.parametrize("in_flight", ["keep", "regenerate"])
def test_server_restart_while_agents_live_on(make_stage: StageMaker, in_flight: str) -> None:
    """agl-server is killed and started again, the controller and its agents live on: old ids are never used again."""
    extension = {"in_flight": in_flight}
    with make_stage("8/2/4", rollout_n=2, total_steps=3, extension=extension) as stage:
        truth = stage.truth(3)
        plan = {**half_done(stage, 2, 3, 4, 5), "row1": [["gate:step 1", *ENDS]]}
        plan["row3"][0] = ["ask", "later:late"]  # finished, but its reward has not come when the server dies
        stage.plan(**plan)
        first = stage.start_life()
        first.wait_seen(ids_of(stage.wait_agents(1, "end", 2) + stage.wait_agents(1, "end", 3)))
        stage.open("step 1")
        first.wait_reached("enqueued", 2)
        stage.wait_agents(1, "at gate", 5)
        before = first.kill()
        stage.services.kill_server()
        stage.services.start_server()
        assert stage.services.rollouts() == {}

        handle = stage.start_life()
        handle.wait_reached("enqueued", 2)
        stage.open("held", "late")
        second = handle.wait_end()
        # What the old agents post under their ids finds nobody.
        assert stage.wait_agents(1, "late reward")[0]["status"] == 404
        stage.check(truth, before, second)
        assert_trained_what_agents_did([before, second], stage.agents())
        old = set(before.posted_ids)
        assert not old & set(stage.services.rollouts())
        kept = {rid for rid in ids_of(stage.agents("end")) if rid in old} & trained_ids(second, 2, 3)
        counts = second.resume_metrics
        if in_flight == "keep":
            assert len(kept) == 1
            assert (counts["num_reused_finished_rollouts"], counts["num_recreated_rollouts"]) == (1, 3)
        else:
            assert not kept
            assert (counts["num_reused_finished_rollouts"], counts["num_recreated_rollouts"]) == (0, 4)
        replaced = {request["metadata"].get("replaces") for request in second.posted} - {None}
        assert len(replaced) == counts["num_recreated_rollouts"]
        assert replaced <= old


@pytest.mark.parametrize("adopt", ["all", "finished_before_death"])
def test_vanished_model_host_does_not_hold_up_the_resume(make_stage: StageMaker, tmp_path: Path, adopt: str) -> None:
    """The host of the model accepts a request and never answers: the resumed run waits `drain_wait_s`, once."""
    log = tmp_path / "host.log"
    host = start_process("-m", "tests.scenes.chat", log=log, stdout=subprocess.PIPE)
    try:
        address = host.stdout.readline().decode().strip()
        extension = {"adopt": adopt, "drain_wait_s": 2.0}
        with make_stage("8/2/4", total_steps=4, extension=extension) as stage:
            truth = stage.truth(4)
            stage.plan(
                row2=[["gate:vanished", *ENDS], ENDS], row3=[["gate:resumed", *ENDS]], row5=[["gate:resumed", *ENDS]]
            )
            first = stage.start_life(model_address=address)
            first.wait_reached("enqueued", 2)
            stage.wait_agents(1, "at gate", 2)
            stage.wait_agents(1, "at gate", 3)
            first.wait_seen(ids_of(stage.wait_agents(1, "end", 4)))
            host.send_signal(signal.SIGSTOP)
            stage.open("vanished")
            stage.wait_agents(1, "ask", 2)
            wait_until(lambda: stage.services.get("/proxy/state")["inflight"] == 1, "a request that hangs")
            before = first.kill()

            handle = stage.start_life()
            handle.wait_reached("registered", 2)
            stage.open("resumed")
            second = handle.wait_end()
            assert stage.services.get("/proxy/state")["inflight"] >= 1
            stage.check(truth, before, second)
            assert_trained_what_agents_did([second], stage.agents())
            trained = [row for step in lineage(before, second).values() for row in step.trained]
            hanging = ids_of(stage.agents("ask", 2))[0]
            if adopt == "all":
                # Nobody can tell that this request will never be answered; it is in flight still, and not lost.
                assert 2 not in trained
                assert second.saves[4]["in_flight"].count(2) == 1
                assert hanging in {rollout["rollout_id"] for rollout in second.saves[4]["rollouts"]}
            else:
                assert trained.count(2) == 1
                assert trained_ids(second, 2).isdisjoint({hanging})
            went_on = [(level, text) for level, text in second.log if "went to the dead trainer's endpoint" in text]
            assert [level for level, _ in went_on] == ["WARNING", "INFO", "INFO"]
            assert all(" with 1 model requests " in text for _, text in went_on)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()


def test_fork_leaves_the_rollouts_of_the_living_parent_alone(make_stage: StageMaker, tmp_path: Path) -> None:
    """A resume by path into another folder, while the parent runs: the parent's rollouts stay as they are."""
    with make_stage("8/2/4", rollout_n=2, total_steps=3) as stage:
        truth = stage.truth(3)
        stage.plan(**half_done(stage, 2, 3, 4, 5), row1=[["gate:step 1", *ENDS]] * 2 + [ENDS])
        parent = stage.start_life()
        parent.wait_seen(ids_of(stage.wait_agents(1, "end", 2) + stage.wait_agents(1, "end", 3)))
        stage.open("step 1")
        parent.wait_reached("enqueued", 2)
        parent.wait_seen(ids_of(stage.wait_agents(1, "end", 4) + stage.wait_agents(1, "end", 5)))
        stage.wait_agents(1, "at gate", 4)
        stage.wait_agents(1, "at gate", 5)
        stage.wait_started()
        rollouts = stage.services.rollouts()
        assert len(rollouts) == 8
        # Nobody asks a model of a life that has ended: the gateway would try it for 13 s.
        later = [["gate:parent", *ENDS]]
        stage.plan(default=["gate:fork", *ENDS], row6=later, row7=later)
        fork_dir = stage.folder / "fork"
        by_path = {"resume_mode": "resume_path", "resume_from_path": f"{stage.out_dir}/global_step_1/"}
        # Its first start dies early; the second begins at the parent's checkpoint again, and clears up after the first.
        early = stage.start_life(out_dir=fork_dir, die_at=("enqueued", 2), **by_path).wait_killed()
        assert set(early.posted_ids) <= set(stage.services.rollouts())
        handle = stage.start_life(out_dir=fork_dir, **by_path)
        handle.wait_reached("enqueued", 2)
        stage.open("fork")
        fork = handle.wait_end()
        after = stage.services.rollouts()
        assert not set(early.posted_ids) & set(after)
        assert {rid: after.get(rid) for rid in rollouts} == rollouts
        run_ids = [json.loads((d / "agentlightning_run.json").read_text()) for d in (stage.out_dir, fork_dir)]
        assert run_ids[1]["parent_run_id"] == run_ids[0]["run_id"] != run_ids[1]["run_id"]
        tags = {request["metadata"]["agl_async_ckpt_run_id"] for request in fork.posted}
        assert tags == {run_ids[1]["run_id"]}
        assert fork.resume_metrics["num_reclaimed_rollouts"] == len(early.posted_ids)
        assert fork.resume_metrics["num_adopted_rollouts"] == 0
        stage.check(truth, parent.life, early, fork)
        assert_trained_what_agents_did([fork], stage.agents())

        # The parent's own resume finds its rollouts, and leaves alone what the fork has left in flight.
        left_by_fork = set(after) & set(fork.posted_ids)
        assert left_by_fork
        before = parent.kill()
        handle = stage.start_life()
        handle.wait_reached("enqueued", 2)
        stage.open("held", "parent")
        second = handle.wait_end()
        stage.check(truth, before, second)
        assert_trained_what_agents_did([second], stage.agents())
        assert left_by_fork <= set(stage.services.rollouts())


def test_finished_siblings_are_never_generated_again(make_stage: StageMaker) -> None:
    """12/2/4 with n=4, half of the siblings finished at the kill, server restarted: their tokens are kept."""
    with make_stage("12/2/4", rollout_n=4, total_steps=4) as stage:
        truth = stage.truth(4)
        stage.plan(**half_done(stage, 2, 3, 4, 5), row1=[["gate:step 1", *ENDS]] * 4)
        first = stage.start_life()
        first.wait_seen(ids_of(stage.wait_agents(2, "end", 2) + stage.wait_agents(2, "end", 3)))
        stage.open("step 1")
        first.wait_reached("enqueued", 2)
        for row in (2, 3, 4, 5):
            stage.wait_agents(2, "at gate", row)
        before = first.kill()
        stage.services.kill_server()
        stage.services.start_server()
        finished = {row: ids_of(stage.agents("end", row)) for row in (2, 3)}

        # A second kill, in the step after the first, with the server restarted again: the tokens are of the first life.
        middle = stage.start_life(die_at=("enqueued", 2)).wait_killed()
        stage.services.kill_server()
        stage.services.start_server()
        stage.open("held")
        third = stage.start_life().wait_end()

        stage.check(truth, before, middle, third)
        assert_trained_what_agents_did([before, third], stage.agents())
        for row in (2, 3):
            # Of each life: four in the first, and the two unfinished ones in each of the others.
            assert len(stage.agents("start", row)) <= 4 + 2 + 2
            assert set(finished[row]) < trained_ids(third, row)
            assert len(trained_ids(third, row)) == 4
        generated = {event["rollout_id"]: event["life"] for event in stage.agents("answer")}
        assert {generated[rid] for row in (2, 3) for rid in finished[row]} == {"life-2"}  # life 1 pulled the truth
        assert third.resume_metrics["num_reused_finished_rollouts"] == 4
        assert third.resume_metrics["num_recreated_rollouts"] == 4


@pytest.mark.parametrize("in_flight", ["keep", "regenerate"])
def test_what_ended_without_a_trainer_is_run_again(make_stage: StageMaker, in_flight: str) -> None:
    """Agents fail, swallow errors and end while no trainer is there: none of it is trained, nor what failed before."""
    with make_stage("4/1/3", rollout_n=4, total_steps=3, extension={"in_flight": in_flight}) as stage:
        truth = stage.truth(3)
        again = ["gate:resumed", *ENDS]
        stage.plan(
            row0=[["gate:step 1", *ENDS]] * 4 + [["gate:never"]],
            row1=[
                ["ask", "exit:3"],  # failed before the checkpoint
                ["gate:dead", "ask-once:1.5", "reward"],  # fails because no model is there
                ["gate:dead", "ask-swallow:1.5", "reward"],  # looks like a clean success with reward 0
                ["gate:dead", "ask-swallow:1.5", *again[:1], "reward"],  # the same, but ends under the next trainer
                again,
            ],
            row2=[
                again,  # outlives the trainer and finishes under the next
                ["ask", "gate:dead", "reward"],  # had its tokens, but ended unwatched
                ["ask", "later:late"],  # finished before the checkpoint; its reward comes after the resume
                ["ask", "gate:step 2", "exit:4"],  # failed after the checkpoint, under the eyes of the trainer
                again,
            ],
            row3=[["gate:never"]],
        )
        first = stage.start_life()
        early = stage.wait_agents(1, "end", 1) + stage.wait_agents(1, "end", 2)
        first.wait_seen(ids_of(early))
        stage.open("step 1")
        first.wait_reached("enqueued", 2)
        stage.open("step 2")
        witnessed = ids_of(stage.wait_agents(1, "end", 2, code=4))
        first.wait_seen(witnessed)
        stage.wait_proof(stage.services.rollouts()[witnessed[0]]["status"]["updated_at"])
        before = first.kill()
        assert before.saves[1]["in_flight"] == [1, 2]
        stage.open("dead")
        lost = {
            **dict.fromkeys(ids_of(stage.agents("start", 1, number=1)), "failed"),
            **dict.fromkeys(ids_of(stage.agents("start", 1, number=2)), "succeeded"),
            **dict.fromkeys(ids_of(stage.agents("start", 2, number=1)), "succeeded"),
        }
        stage.wait_states(lost)
        swallowed = ids_of(stage.wait_agents(1, "at gate", 1, gate="resumed"))

        handle = stage.start_life()
        handle.wait_reached("enqueued", 2)
        stage.open("late")
        late = stage.wait_agents(1, "late reward")
        assert late[0]["status"] == 200
        stage.open("resumed")
        second = handle.wait_end()
        stage.check(truth, before, second)
        assert_trained_what_agents_did([second], stage.agents())
        rollouts = {rollout["rollout_id"]: rollout for step in second.steps.values() for rollout in step.rollouts}
        failed = {*ids_of(stage.agents("end", 1, code=3)), *witnessed}
        assert len(failed) == 2
        assert not {*lost, *swallowed, *failed} & set(rollouts)
        assert {rollout["rollout_state"] for rollout in rollouts.values()} == {"succeeded"}
        assert rollouts[late[0]["rollout_id"]]["final_reward"] == late[0]["value"]
        assert set(ids_of(stage.agents("start", 2, number=0))) <= set(rollouts)
        counts = second.resume_metrics
        num_kept = 1 if in_flight == "keep" else 0
        assert counts["num_reused_finished_rollouts"] == num_kept
        assert counts["num_adopted_rollouts"] == 3 - num_kept
        assert (counts["num_rerun_rollouts"], counts["num_recreated_rollouts"]) == (6, 0)


def test_rollouts_of_others_stay_and_leftovers_go(make_stage: StageMaker) -> None:
    """Leftovers of this run are reclaimed, if it is allowed; rollouts of another run id, or of none, never change."""
    with make_stage("8/2/4", rollout_n=2, total_steps=2) as stage:
        truth = stage.truth(2)
        agent = {"agent_class": "tests.scenes.agent:SceneAgent", "env_map": {"SCENE_INPUT": "input"}}
        stage.plan(
            row90=[["gate:never"]],
            row91=[["reward"]],
            val=[["gate:validated", *ENDS]] * 2 + [ENDS],
            row2=[["gate:held", *ENDS]],
            row3=[["gate:held", *ENDS]],
        )
        metadata: list[dict[str, Any]] = [{"agl_async_ckpt_run_id": "another"}, {}, {"agl_async_ckpt_run_id": None}]
        foreign_ids = [
            item["rollout_id"]
            for item in stage.services.call(
                "POST",
                "/api/rollouts",
                [
                    {"input": {"index": row}, "config": {"local": agent}, "metadata": data}
                    for data in metadata
                    for row in (90, 91)
                ],
            )
        ]
        stage.wait_agents(3, "at gate", 90)
        stage.wait_started()
        stage.wait_states(dict.fromkeys(ids_of(stage.wait_agents(3, "end", 91)), "succeeded"))

        def foreign() -> dict[str, Any]:
            rollouts = stage.services.rollouts()
            return {rid: (rollouts.get(rid), stage.services.events(rid)) for rid in foreign_ids}

        untouched = foreign()

        def ours() -> dict[str, dict[str, Any]]:
            return {rid: rollout for rid, rollout in stage.services.rollouts().items() if rid not in foreign_ids}

        # Killed in the validation before training: its rollouts are left over, and no checkpoint exists.
        validating = stage.start_life(val_before_train=True)
        stage.wait_agents(2, "at gate", who="val")
        lives = [validating.kill()]
        validation = set(ours())
        assert len(validation) == 2
        lives.append(stage.start_life(die_at=("saved", 1)).wait_killed())
        assert not validation & set(ours())
        stage.open("validated")
        in_flight = {rollout["rollout_id"] for rollout in lives[-1].saves[1]["rollouts"]}
        assert in_flight <= set(ours())

        # Killed right after it has enqueued: nobody has started these.
        stage.wait_agents(2, "at gate", 2)
        stage.wait_agents(2, "at gate", 3)
        stage.wait_started()
        stage.services.hold_controller()
        lives.append(stage.start_life(die_at=("enqueued", 2)).wait_killed())
        queued = {rid for rid, rollout in ours().items() if rollout["status"]["state"] == "queuing"}
        assert queued == set(lives[-1].posted_ids)
        assert len(queued) == 4
        before = ours()
        lives.append(stage.start_life(extension={"reclaim": False}, die_at=("registered", 2)).wait_killed())
        assert ours() == before
        lives.append(stage.start_life(die_at=("registered", 2)).wait_killed())
        assert ours() == {rid: before[rid] for rid in in_flight}
        stage.services.release_controller()

        val_only = ("trainer.val_only=true",)
        lives.append(stage.start_life(val_before_train=True, overrides=val_only).wait_end())
        assert ours() == {rid: before[rid] for rid in in_flight}
        assert not [request for request in lives[-1].posted if request.get("is_train", True)]

        stage.open("held")
        lives.append(stage.start_life().wait_end())
        stage.check(truth, *lives)
        assert foreign() == untouched


def test_death_with_the_gateway_paused(make_stage: StageMaker) -> None:
    """Killed during the update, so that agents are refused until the next trainer comes: the patient one is adopted."""
    with make_stage("8/2/5", total_steps=3) as stage:
        truth = stage.truth(3)
        stage.plan(
            row2=[["gate:dead", *ENDS]],  # waits until the gateway opens
            row3=[["gate:dead", "ask-once", "reward"], ENDS],  # fails at once
            row4=[["gate:dead", "ask-swallow", "reward"], ENDS],  # takes the refusal for an answer
        )
        first = stage.start_life(die_at=("updated", 2))
        for row in (2, 3, 4):
            stage.wait_agents(1, "at gate", row)
        before = first.wait_killed()
        assert before.saves[1]["in_flight"] == [2, 3, 4]
        assert stage.services.get("/proxy/state")["paused"]
        stage.open("dead")
        stage.wait_agents(1, "ask", 2)
        stage.wait_states(
            {
                ids_of(stage.agents("start", 2))[0]: "running",
                ids_of(stage.agents("start", 3))[0]: "failed",
                ids_of(stage.agents("start", 4))[0]: "succeeded",
            }
        )
        second = stage.start_life().wait_end()
        stage.check(truth, before, second)
        assert_trained_what_agents_did([before, second], stage.agents())
        assert [len(stage.agents("start", row)) for row in (2, 3, 4)] == [1, 2, 2]
        assert second.resume_metrics["num_adopted_rollouts"] == 1
        assert second.resume_metrics["num_rerun_rollouts"] == 2


HOOKS = '''
import json, os
from pathlib import Path
from agentlightning.hooks import RolloutHooks

FOLDER = Path(__file__).parent

class SceneHooks(RolloutHooks):
    """Changes input, config and metadata of each sibling; rewards by what it put into the metadata."""

    def on_enqueue(self, request):
        calls = FOLDER / "enqueued.txt"
        with calls.open("a") as file:
            file.write(f"{request.input['index']}\\n")
        variant = calls.read_text().splitlines().count(str(request.input["index"]))
        config = request.config.model_copy(deep=True)
        config.local.env_map["SCENE_EXTRA"] = f"extra {variant}"
        new_input = {**request.input, "variant": variant, "none": None, "nested": [{"text": "\u00e4", "empty": []}]}
        return request.model_copy(update={"input": new_input, "config": config, "metadata": {"variant": variant}})

    def on_succeeded(self, rollout, events, store):
        variant = rollout.metadata.model_dump()["variant"]
        assert any(event.event_type == "model_request" for event in events["0"])
        store.add_event(rollout.rollout_id, "0", "reward", {"value": variant / 64, "source": "hook"})
'''


def test_hooks_are_not_applied_again_and_reward_served_rollouts(make_stage: StageMaker) -> None:
    """What on_enqueue made of each sibling comes back as it was; on_succeeded rewards those served too."""
    with make_stage("8/2/4", rollout_n=2, total_steps=3) as stage:
        truth = stage.truth(3)
        hooks = stage.folder / "hooks.py"
        hooks.write_text(HOOKS)
        with_hooks = {"overrides": (f"agentlightning.hooks={hooks}",)}
        stage.plan(
            default=["ask"],
            row1=[["gate:step 1", "ask"]],
            **{f"row{row}": [["ask"], ["ask", "gate:held"], ["ask"]] for row in (2, 3, 4, 5)},
        )
        first = stage.start_life(**with_hooks)
        finished = ids_of(stage.wait_agents(1, "end", 2) + stage.wait_agents(1, "end", 3))
        first.wait_seen(finished)
        stage.open("step 1")
        first.wait_reached("enqueued", 2)
        stage.wait_agents(1, "at gate", 5)
        before = first.kill()
        stage.services.kill_server()
        stage.services.start_server()
        calls = (stage.folder / "enqueued.txt").read_text().split()
        assert (calls.count("2"), calls.count("3")) == (2, 2)
        posted = {request["rollout_id"]: request for request in before.posted}

        # The checkpoint after the resume holds the same requests again; so a second restart is exact as well.
        middle = stage.start_life(die_at=("registered", 2), **with_hooks).wait_killed()
        stage.services.kill_server()
        stage.services.start_server()
        second = stage.start_life(**with_hooks).wait_end()
        stage.open("held")
        stage.check(truth, before, middle, second)

        calls = (stage.folder / "enqueued.txt").read_text().split()
        assert (calls.count("2"), calls.count("3")) == (2, 2)
        again = [request for life in (middle, second) for request in life.posted if "replaces" in request["metadata"]]
        assert len(again) == 4
        for request in again:
            original = posted[request["metadata"]["replaces"]]
            same = {**request, "rollout_id": original["rollout_id"]}
            same["metadata"] = {key: value for key, value in request["metadata"].items() if key != "replaces"}
            assert json.dumps(same, sort_keys=True) == json.dumps(original, sort_keys=True)
        samples = [sample for step in second.steps.values() for sample in step.samples]
        assert {sample["rollout_id"] for sample in samples} >= set(finished)
        variants = {event["rollout_id"]: event["input"]["variant"] for event in stage.agents("start")}
        for sample in samples:
            assert sample["reward"] == variants[sample["rollout_id"]] / 64
        extras = {event["rollout_id"]: event["env"] for event in stage.agents("start")}
        assert all(extras[rid] == f"extra {variant}" for rid, variant in variants.items())
        assert {rollout["input"]["none"] for step in second.steps.values() for rollout in step.rollouts} == {None}


@pytest.mark.parametrize("reclaim", [True, False])
def test_second_death_before_the_first_save_costs_nothing(make_stage: StageMaker, reclaim: bool) -> None:
    """A resumed trainer dies before it has saved: the next one resumes from the same checkpoint, alike."""
    with make_stage("8/2/4", rollout_n=2, total_steps=3, extension={"reclaim": reclaim}) as stage:
        truth = stage.truth(3)
        stage.plan(
            row1=[["gate:step 1", *ENDS]] * 2 + [ENDS],
            row2=[["gate:dead", "ask-once:1.5", "reward"]] * 2 + [["gate:second", *ENDS]] * 2 + [ENDS],
            row3=[["gate:fail", "exit:5"]] * 2 + [["gate:second", *ENDS]] * 2 + [ENDS],
            row4=[["gate:second", *ENDS]],
            row5=[["gate:second", *ENDS]],
        )
        first = stage.start_life(die_at=("saved", 1))
        for row in (2, 3):
            stage.wait_agents(2, "at gate", row)
        stage.open("step 1")
        lives = [first.wait_killed()]
        stage.open("dead")
        stage.wait_states(dict.fromkeys(ids_of(stage.agents("start", 2)), "failed"))

        # The second life runs row 2 again and adopts row 3, which fails before its eyes, and which it runs again.
        second = stage.start_life()
        stage.wait_agents(4, "start", 2)
        stage.open("fail")
        stage.wait_agents(4, "start", 3)
        stage.wait_proof(time.time())
        lives.append(second.kill())

        handle = stage.start_life()
        handle.wait_reached("enqueued", 2)
        stage.open("second")
        third = handle.wait_end()
        lives.append(third)
        stage.check(truth, *lives)
        assert_trained_what_agents_did(lives, stage.agents())
        states = {rollout["rollout_state"] for step in third.steps.values() for rollout in step.rollouts}
        assert states == {"succeeded"}
        assert third.resume_metrics["num_rerun_rollouts" if not reclaim else "num_recreated_rollouts"] >= 2
        if not reclaim:
            assert set(lives[1].posted_ids) <= set(stage.services.rollouts())


def test_controller_restart_runs_the_adopted_again(make_stage: StageMaker) -> None:
    """The controller dies with the trainer and is back after the resume: what was adopted is run again."""
    with make_stage("8/2/4", total_steps=3) as stage:
        truth = stage.truth(3)
        stage.plan(row2=[["ask", "gate:orphan", "reward"], ENDS], row3=[["ask", "gate:orphan", "reward"], ENDS])
        first = stage.start_life(die_at=("saved", 1))
        for row in (2, 3):
            stage.wait_agents(1, "at gate", row)
        before = first.wait_killed()
        stage.services.kill_controller()
        second = stage.start_life()
        second.wait_reached("enqueued", 2)
        stage.services.start_controller()
        # The agents that lost their controller finish, and post under ids that nobody waits for.
        stage.wait_agents(2, "start", 2)
        stage.open("orphan")
        after = second.wait_end()
        stage.check(truth, before, after)
        assert after.resume_metrics["num_adopted_rollouts"] == 2
        assert after.resume_metrics["num_rerun_rollouts"] == 2
        states = {rollout["rollout_state"] for step in after.steps.values() for rollout in step.rollouts}
        assert states == {"succeeded"}


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_server_that_answers_wrongly_is_named_and_costs_nothing(make_stage: StageMaker) -> None:
    """401, 409, 500, 404 and no JSON at a resume: an error with URL and rollout; then the run goes on."""
    with make_stage("8/2/4", total_steps=3, extension={"server_wait_s": 1.0}) as stage:
        truth = stage.truth(3)
        stage.plan(**{f"row{row}": [["gate:held", *ENDS]] for row in (2, 3, 4, 5)})
        first = stage.start_life(die_at=("saved", 1))
        for row in (2, 3):
            stage.wait_agents(1, "at gate", row)
        lives = [first.wait_killed()]
        in_flight = ids_of(stage.agents("at gate"))
        checkpoint = files_of(stage.out_dir / "global_step_1")
        rollouts = stage.services.rollouts()

        def resume_fails(*words: str, **changes: Any) -> None:
            handle = stage.start_life(**changes)
            text = handle.wait_error()
            lives.append(handle.life)
            error = text[text.rindex("agl_async_ckpt.exceptions.ServerError") :]
            assert [word for word in words if word not in error] == [], error
            assert files_of(stage.out_dir / "global_step_1") == checkpoint
            assert set(stage.services.rollouts()) >= set(rollouts)

        resume_fails(stage.services.url, "401", "agl_key", overrides=("agentlightning.agl_key=wrong",))
        with Meddler(stage.services.url) as meddler:
            url = {"base_url": meddler.url}
            for rule, answer, words in [
                (r"GET /api/rollouts\?.*", (500, "{}"), ["500", "list of rollouts"]),
                (r"GET /api/rollouts\?.*", (200, "<html>"), ["JSON", "list of rollouts"]),
                (r"GET /api/rollouts\?.*", (200, '{"detail": "busy"}'), ["JSON", "list of rollouts"]),
                (r"GET /proxy/state", (409, "{}"), ["409", "gateway"]),
                (rf"GET /api/rollouts/{in_flight[0]}", (500, "{}"), ["500", in_flight[0]]),
                (rf"GET /api/rollouts/{in_flight[0]}", (200, "{"), ["JSON", in_flight[0]]),
                (rf"GET /api/rollouts/{in_flight[0]}", (404, "{}"), ["404", in_flight[0]]),
            ]:
                meddler.rules = {rule: answer}
                resume_fails(meddler.url, *words, **url)
            meddler.rules = {}
        resume_fails(meddler.url, "not reachable", **url)

        handle = stage.start_life()
        handle.wait_reached("enqueued", 2)
        stage.open("held")
        lives.append(handle.wait_end())
        stage.check(truth, *lives)
