"""The parts of the demo that its result depends on, without training: `pytest examples/cpu_training`."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cpu_training import processes as processes_module
from cpu_training.demo import parse_arguments
from cpu_training.hook_values import HOOKS, answer_of, hook_file, reward_of, trained_rows
from cpu_training.moments import PLACES, REACHED, STARTED, USUAL_S, Life, Moment, draw
from cpu_training.preemption import Preemption, look
from cpu_training.processes import Processes
from cpu_training.recording import EVENTS_FILE, EventReader, rows_of_update
from cpu_training.rows import compare
from cpu_training.services import DemoError, choose_port
from cpu_training.settings import RUNS_DIR
from cpu_training.verdict import Step, judge, surviving_steps

STREAM = list(range(100, 130))


def step(number: int, pulled: list[int], trained: list[int], in_flight: list[int], buffered: list[int]) -> Step:
    """A step of life 1 with the fields that the verdict looks at."""
    return Step(1, number, 1, pulled, trained, buffered, in_flight, rows=4, seconds=1.0)


def exact_lineage() -> list[Step]:
    """Three steps of an uninterrupted run with B=2, A=5 whose second input is slow."""
    return [
        step(1, [100, 101, 102, 103, 104], [100, 102], [101, 103, 104], [105]),
        step(2, [105, 106], [103, 104], [101, 105, 106], [107]),
        step(3, [107, 108], [101, 105], [106, 107, 108], [109]),
    ]


def test_judge_holds_for_an_uninterrupted_run() -> None:
    """What is in flight and buffered at the end counts as kept."""
    verdict = judge(exact_lineage(), STREAM)
    assert verdict.holds
    assert verdict.trained_once == [100, 101, 102, 103, 104, 105]
    assert (verdict.in_flight, verdict.buffered) == ([106, 107, 108], [109])


def test_judge_names_lost_inputs_and_those_read_in_their_place() -> None:
    """A resume that drops the inputs in flight and buffered loses them and reads as many ahead."""
    resumed = Step(2, 3, 1, [108, 109, 110, 111, 112], [108, 109], [113], [110, 111, 112], rows=4, seconds=1.0)
    verdict = judge([*exact_lineage()[:2], resumed], STREAM)
    assert not verdict.holds
    assert verdict.lost == [101, 105, 106, 107]
    assert verdict.ahead == [110, 111, 112, 113]
    assert verdict.repeated == []
    assert verdict.lost_where == {
        101: "in flight at step 2",
        105: "in flight at step 2",
        106: "in flight at step 2",
        107: "buffered at step 2",
    }


def test_judge_names_repeated_inputs() -> None:
    """An input trained in two surviving steps is repeated, and the one it displaced is lost."""
    steps = exact_lineage()
    steps[2] = step(3, [107, 108], [101, 104], [106, 107, 108], [109])
    verdict = judge(steps, STREAM)
    assert (verdict.lost, verdict.repeated, verdict.ahead) == ([105], [104], [])
    assert not verdict.holds


def test_judge_does_not_hold_when_only_the_order_of_pulling_differs() -> None:
    """Nothing lost and nothing repeated is not enough: the promise covers the order too."""
    steps = exact_lineage()
    steps[0] = step(1, [101, 100, 102, 103, 104], [100, 102], [101, 103, 104], [105])
    verdict = judge(steps, STREAM)
    assert (verdict.lost, verdict.repeated, verdict.same_pull_order) == ([], [], False)
    assert not verdict.holds


def test_judge_refuses_a_lineage_with_a_gap() -> None:
    """A missing step means that the record is incomplete, so nothing can be said."""
    with pytest.raises(ValueError, match="without a gap"):
        judge(exact_lineage()[1:], STREAM)


def events_of(number: int, life: int, trained: list[int], *, complete: bool = True) -> list[dict[str, Any]]:
    """The recorded events of one step."""
    base = {"life": life, "step": number}
    events = [
        {**base, "event": "pulled", "epoch": 1, "inputs": trained, "buffered": []},
        {**base, "event": "completed", "inputs": trained, "in_flight": []},
        {**base, "event": "trained", "update": [{"input": i, "rows": [{}]} for i in trained], "seconds": 1.0},
    ]
    return events if complete else events[:2]


def test_surviving_steps_leave_out_what_a_resume_throws_away() -> None:
    """Steps after the checkpoint and the step in which the driver died don't count."""
    events = [
        {"event": "loaded", "life": 1, "step": 0},
        *events_of(1, 1, [1]),
        *events_of(2, 1, [2]),
        *events_of(3, 1, [3], complete=False),
        {"event": "loaded", "life": 2, "step": 1},
        *events_of(2, 2, [20]),
    ]
    assert [(each.life, each.step, each.trained) for each in surviving_steps(events)] == [(1, 1, [1]), (2, 2, [20])]


def row_of(hook: str, input_id: int, **changed: Any) -> dict[str, Any]:
    """A recorded row of an input as the hook would have it, with fields that it leaves open or that are changed."""
    (given,) = trained_rows(hook, input_id)
    return {"prompt": [1, input_id], "response": [9], "mask": [1], "log_probs": [-1.0], **given, **changed}


def trained(life: int, number: int, rows: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events of an update, and one that says nothing of rows."""
    update = [{"input": input_id, "rows": each} for input_id, each in rows.items()]
    return [
        {"event": "trained", "life": life, "step": number, "update": update},
        {"event": "saving", "life": life, "step": number},
    ]


def update_of(hook: str, life: int, number: int, inputs: list[int]) -> list[dict[str, Any]]:
    """The events of an update that is as it has to be."""
    return trained(life, number, {i: [row_of(hook, i)] for i in inputs})


@pytest.mark.parametrize("hook", HOOKS)
def test_rows_are_compared_by_input_in_every_life(hook: str) -> None:
    """In whatever step; an update that a resume threw away counts too, an input of one run alone does not."""
    alone = [*update_of(hook, 1, 1, [1, 2]), *update_of(hook, 1, 2, [3, 4])]
    events = [*update_of(hook, 1, 1, [2, 4]), *update_of(hook, 1, 2, [1]), *update_of(hook, 2, 2, [1, 5])]
    compared = compare(hook, events, alone)
    assert compared.holds
    assert (compared.num_rows, compared.num_rows_after_resume, compared.num_inputs) == (4, 1, 3)
    assert "4 compared" in str(compared)


@pytest.mark.parametrize("field", ["prompt", "response", "mask", "log_probs", "score"])
@pytest.mark.parametrize("hook", HOOKS)
def test_row_that_differs_is_named(hook: str, field: str) -> None:
    """With the field; a hook that only rewards leaves the answer to chance."""
    changed = row_of(hook, 1, **{field: "another"})
    compared = compare(hook, trained(2, 7, {1: [changed], 2: [row_of(hook, 2)]}), update_of(hook, 1, 1, [1, 2]))
    if hook == "reward" and field not in ("prompt", "score"):
        assert compared.holds
    else:
        (problem,) = compared.problems
        assert not compared.holds
        assert problem.startswith(f"life 2, step 7, input 1: {field} another, of the trainer alone")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("num_rows", [0, 2])
def test_rows_that_are_missing_or_too_many_are_named(hook: str, num_rows: int) -> None:
    """An input trained without its row, or with the sampled one beside the hook's."""
    compared = compare(hook, trained(1, 1, {1: [row_of(hook, 1)] * num_rows}), update_of(hook, 1, 1, [1]))
    assert compared.problems == [f"life 1, step 1, input 1: {num_rows} rows, of the trainer alone 1"]


def test_rows_that_the_hook_did_not_give_are_named_in_both_runs() -> None:
    """Two runs that are equally wrong are wrong; so is an input that the other run has not trained."""
    wrong = {i: [row_of("reward", i, score=2.0)] for i in (1, 2)}
    compared = compare("reward", trained(1, 1, wrong), trained(1, 1, {1: wrong[1]}))
    assert compared.problems == [
        "the trainer alone, life 1, step 1, input 1: score 2.0, of the hook 0.125",
        "life 1, step 1, input 2: score 2.0, of the hook 0.25",
    ]


@pytest.mark.parametrize("events", [[], update_of("trace", 1, 1, [3])])
def test_comparison_of_nothing_does_not_hold(events: list[dict[str, Any]]) -> None:
    """Two runs without an input in common show nothing."""
    compared = compare("trace", events, update_of("trace", 1, 1, [1]))
    assert (compared.problems, compared.num_rows, compared.holds) == ([], 0, False)


def test_update_is_recorded_without_padding_and_by_input() -> None:
    """Left padding of prompts, right padding of responses; a group whose rows were dropped has none."""
    import torch

    batch = SimpleNamespace(
        batch={
            "prompts": torch.tensor([[0, 0, 5], [6, 7, 8]]),
            "responses": torch.tensor([[11, 12, 0, 0], [13, 14, 15, 16]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]),
            "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]),
            "token_level_scores": torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.25]], dtype=torch.bfloat16),
        },
        non_tensor_batch={"data_id_list": ["a", "b"]},
    )
    assert rows_of_update(batch, {"b": 3, "a": 4, "c": 5}) == [
        {
            "input": 3,
            "rows": [
                {
                    "prompt": [6, 7, 8],
                    "response": [13, 14, 15, 16],
                    "mask": [1, 0, 1, 1],
                    "log_probs": None,
                    "score": 0.25,
                }
            ],
        },
        {
            "input": 4,
            "rows": [{"prompt": [5], "response": [11, 12], "mask": [1, 1], "log_probs": None, "score": 0.5}],
        },
        {"input": 5, "rows": []},
    ]
    batch.batch["rollout_log_probs"] = torch.tensor([[-1.0, -0.5, 0.0, 0.0], [-0.25, 0.0, -2.0, -3.0]])
    assert [group["rows"][0]["log_probs"] for group in rows_of_update(batch, {"a": 4, "b": 3})] == [
        [-1.0, -0.5],
        [-0.25, 0.0, -2.0, -3.0],
    ]


@pytest.mark.parametrize("name", HOOKS)
def test_hook_posts_what_the_comparison_expects(name: str) -> None:
    """As agent-lightning loads it; the request that replaces the sampled one has the same prompt."""
    hooks = pytest.importorskip("agentlightning.hooks").load_hooks(str(hook_file(name)))
    schemas = pytest.importorskip("agentlightning.schemas")
    request = hooks.on_enqueue(schemas.RolloutCreate(input={"input_id": 11, "slow": False}))
    assert request.input == {"input_id": 11, "slow": False, "judged": True}

    choice = {"index": 0, "token_ids": [9], "logprobs": {"content": [{"token": "9", "logprob": -1.0}]}}
    response = {"prompt_token_ids": [1, 2], "choices": [choice]}
    data = {"request": {"model": "auto"}, "response": response, "http_status": 200}
    sampled = SimpleNamespace(event_type="model_request", data=data)
    rollout = SimpleNamespace(rollout_id="r", input=request.input, status=SimpleNamespace(last_attempt_id="0"))
    posted: list[tuple[Any, ...]] = []
    store = SimpleNamespace(add_event=lambda *event: posted.append(event))
    hooks.on_succeeded(rollout, {"0": [sampled]}, store)

    *traces, reward = posted
    assert reward == ("r", "0", "reward", {"value": reward_of(11)})
    assert len(traces) == (name == "trace")
    for *place, corrected in traces:
        assert place == ["r", "0", "model_request"]
        tokens, log_probs = answer_of(11)
        (new,) = corrected["response"]["choices"]
        assert corrected["response"]["prompt_token_ids"] == [1, 2]
        assert new["token_ids"] == tokens
        assert [each["logprob"] for each in new["logprobs"]["content"]] == log_probs
    assert data["response"]["choices"] == [choice]


def test_event_reader_leaves_an_unfinished_line_for_later(tmp_path: Path) -> None:
    """A reader that looks while a line is being written gets it whole the next time."""
    file = tmp_path / EVENTS_FILE
    reader = EventReader(tmp_path)
    assert reader.new() == []
    line = json.dumps({"event": "a"}) + "\n"
    file.write_text(line + line[:5])
    assert len(reader.new()) == 1
    file.write_text(line + line)
    assert reader.new() == [{"event": "a"}]
    assert reader.new() == []


def test_choose_port_says_what_to_do_when_the_port_is_taken() -> None:
    """The message names the port and the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DemoError, match=rf"Port {port} .*--port"):
            choose_port(port)


def test_arguments_keep_the_single_kill_at_its_fixed_place() -> None:
    """Without --kills and --seed the demo is what it was: one kill, after the step given or three before the end."""
    plan = parse_arguments([]).plan
    assert (plan.kills, plan.kill_after_step) == (1, 5)
    args = parse_arguments(["--steps", "12", "--kill-after-step", "7", "--kills", "1"])
    assert (args.plan.kills, args.plan.kill_after_step, args.name) == (1, 7, "protected")


def test_arguments_for_random_kills() -> None:
    """Several kills come at random moments, and so does one with a seed; the seed is known even if none was given."""
    args = parse_arguments(["--kills", "3", "--seed", "5"])
    assert (args.plan.kills, args.plan.kill_after_step, args.plan.seed, args.name) == (3, None, 5, "kills")
    assert (parse_arguments(["--seed", "5"]).plan.kills, parse_arguments(["--seed", "5"]).plan.kill_after_step) == (
        1,
        None,
    )
    seeds = {parse_arguments(["--kills", "2"]).plan.seed for _ in range(5)}
    assert len(seeds) > 1


def test_arguments_for_a_stop() -> None:
    """In the step in which the other run is killed, under a name of its own."""
    args = parse_arguments(["--preempt"])
    assert (args.plan.preempt, args.plan.kill_after_step, args.name) == (True, 5, "preempt")
    assert not parse_arguments([]).plan.preempt


def test_arguments_for_a_hook() -> None:
    """It goes with every other option, and into the name."""
    assert parse_arguments([]).hook is None
    for argv, name in [
        ([], "protected-trace-hook"),
        (["--stock"], "stock-trace-hook"),
        (["--preempt"], "preempt-trace-hook"),
        (["--restart-server"], "protected-restart-server-trace-hook"),
        (["--kills", "2"], "kills-trace-hook"),
    ]:
        args = parse_arguments(["--hook", "trace", *argv])
        assert (args.hook, args.name) == ("trace", name)
        alone = args.plan.uninterrupted()
        assert (alone.kills, alone.kill_after_step, alone.preempt) == (0, None, False)
        assert alone.num_inputs == args.plan.num_inputs


def stopped(events: list[tuple[str, int, float]], *, exit_code: int = 75, rollouts_left: int = 0) -> Preemption:
    """A life with these events (name, step, time) that got a signal in step 5 at time 100; it has no checkpoint."""
    happened = [{"event": name, "step": number, "time": at, "seconds": 4.0} for name, number, at in events]
    return look(
        happened,
        step=5,
        signalled=100.0,
        ended=120.0,
        exit_code=exit_code,
        output_dir=Path("/nowhere"),
        rollouts_left=rollouts_left,
    )


def test_stop_is_measured_from_the_signal() -> None:
    """Rest of the step, save, end of the driver."""
    preemption = stopped([("trained", 4, 95.0), ("trained", 5, 103.0), ("saving", 5, 103.5), ("saved", 5, 104.0)])
    assert (preemption.to_step_end_s, preemption.save_s, preemption.to_exit_s) == (3.0, 1.0, 16.0)
    assert preemption.problems == ["the checkpoint of step 5 is not complete"]
    assert "20.0 s after the signal" in str(preemption)


def test_stop_that_was_not_as_promised_is_named() -> None:
    """Another exit code, a step too many, a second save, rollouts that are left."""
    events = [("trained", 5, 103.0), ("saved", 5, 104.0), ("saved", 5, 105.0), ("trained", 6, 110.0)]
    assert stopped(events, exit_code=1, rollouts_left=2).problems == [
        "the exit code is 1, not 75",
        "it trained on to step 6",
        "step 5 was saved 2 times",
        "the checkpoint of step 5 is not complete",
        "2 rollouts are left on the server",
    ]
    assert "step 5 was saved 0 times" in stopped([]).problems


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kills", "0"], "--kills must be 1 or more, got 0"),
        (["--kills", "2", "--stock"], "for the protected run"),
        (["--seed", "1", "--stock"], "for the protected run"),
        (["--kills", "2", "--kill-after-step", "4"], "leave out --kills and --seed"),
        (["--kills", "2", "--steps", "4"], "--steps must be 5 or more"),
        (["--preempt", "--seed", "4"], "leave out --kills, --seed and --stock"),
        (["--preempt", "--stock"], "leave out --kills, --seed and --stock"),
        (["--hook", "none"], "invalid choice: 'none'"),
        (["--kill-after-step", "0"], "--kill-after-step must be from 3"),
    ],
    ids=" ".join,
)
def test_arguments_that_do_not_go_together(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with exit code 2 and what to do."""
    with pytest.raises(SystemExit) as refused:
        parse_arguments(argv)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def place_of(moment: Moment) -> str:
    """The place that a moment aims at."""
    (place,) = [place for place, events in PLACES.items() if moment.after in events]
    return place


@pytest.mark.parametrize("seed", range(20))
def test_moments_are_spread_over_places_and_steps(seed: int) -> None:
    """Each place comes up before one is repeated, each kill has its own part of the run, and the seed decides."""
    moments = draw(8, 16, seed)
    assert sorted(map(place_of, moments[:4])) == sorted(map(place_of, moments[4:])) == sorted(PLACES)
    assert [(moment.step - 1) // 2 for moment in moments] == list(range(8))
    assert all(0.0 <= moment.share < 1.0 for moment in moments)
    assert draw(8, 16, seed) == moments != draw(8, 16, seed + 1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_kills", "last"), [(1, 5), (3, 8), (20, 8)])
def test_every_moment_can_be_reached_from_every_checkpoint(num_kills: int, last: int, seed: int) -> None:
    """Its step is one that the life trains, and for a save one that is saved, however many kills there are."""
    for moment in draw(num_kills, last, seed):
        for resumed_from in range(0, last, 3):
            step = moment.step_of_life(resumed_from, last)
            assert resumed_from < step <= last
            assert moment.after != "saving" or step % 3 == 0 or step == last


def happening(life: Life, name: str, time: float, **values: int) -> None:
    """Give the life one event."""
    life.add({"event": name, "time": time, **values})


def test_a_kill_waits_for_its_event_in_its_step() -> None:
    """It is due a share of the usual time after it, which is the time that the run itself has shown."""
    life = Life(1000.0, dict(USUAL_S))
    moment = Moment("completed", step=2, share=0.5)
    for name, at, number in [("loaded", 1001.0, 0), ("pulled", 1002.0, 1), ("completed", 1003.0, 1)]:
        happening(life, name, at, step=number)
        assert life.due(moment, 8) is None
    happening(life, "trained", 1007.0, step=1)
    happening(life, "pulled", 1010.0, step=2)
    happening(life, "completed", 1011.0, step=2)
    assert life.due(moment, 8) == 1011.0 + 0.5 * 4.0
    assert life.end(1012.34) == {"hit": "in the training of step 2", "seconds_after_start": 12.3, "resumed_from": 0}


def test_a_kill_in_a_save_comes_in_the_next_one_after_the_checkpoint_resumed_from() -> None:
    """A life that begins beyond the step that was meant is killed in the first save it can be."""
    life = Life(0.0, dict(USUAL_S))
    moment = Moment("saving", step=2, share=0.0)
    happening(life, "loaded", 1.0, step=3)
    happening(life, "saving", 2.0, step=6)
    assert life.due(moment, 8) == 2.0
    assert life.end(2.0)["hit"] == "in the save of step 6"


def test_a_kill_at_a_start_needs_no_event() -> None:
    """It may come before the trainer has said anything."""
    life = Life(50.0, dict(USUAL_S))
    assert life.due(Moment(STARTED, step=6, share=0.2), 8) == 50.0 + 0.2 * USUAL_S[STARTED]
    assert life.end(53.0) == {"hit": "while Ray started", "seconds_after_start": 3.0, "resumed_from": None}


def test_a_life_with_nothing_left_to_train_is_killed_once_it_has_loaded() -> None:
    """A kill after the last save leaves a run that is done; a campaign goes on all the same."""
    life = Life(0.0, dict(USUAL_S))
    happening(life, "loaded", 1.0, step=8)
    assert life.due(Moment("pulled", step=2, share=0.5), 8) == 1.0


def test_every_recorded_event_can_be_named_as_the_place_of_a_kill() -> None:
    """Whatever the recorder wrote last, the kill can be reported; each aim has a usual time."""
    source = (Path(processes_module.__file__).parent / "recording.py").read_text()
    train = (Path(processes_module.__file__).parent / "train.py").read_text()
    recorded = set(re.findall(r"record\(\s*\"(\w+)\"", source + train))
    assert recorded == set(REACHED) - {STARTED}
    assert {event for events in PLACES.values() for event in events} == set(USUAL_S)


PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
time.sleep(60)
"""
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[bytes], int]]:
    """Start a process that starts another one in a session of its own; gives both pids."""

    def start_in(processes: Processes, child: str) -> tuple[subprocess.Popen[bytes], int]:
        log = tmp_path / f"{time.monotonic_ns()}.log"
        command = [sys.executable, "-c", PARENT.format(child=child)]
        process = processes.start(command, env={}, log=log, cwd=tmp_path)
        while not log.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.02)
        return process, int(log.read_text())

    return start_in


def test_kill_and_sweep_takes_orphans_along_and_spares_the_rest(start: Callable[..., Any]) -> None:
    """What the killed process had started is gone; what the spared one has started lives."""
    with Processes() as processes:
        victim, orphan = start(processes, SLEEPER)
        spared, child_of_spared = start(processes, SLEEPER)
        processes.kill_and_sweep(victim, spare=[spared.pid], patience_s=0.0)
        assert not psutil.pid_exists(orphan)
        assert spared.poll() is None
        assert psutil.pid_exists(child_of_spared)


def test_kill_and_sweep_kills_first_what_cannot_wait(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies before its driver: the rest of a save must not be written while the driver is waited for."""
    with Processes() as processes:
        victim, orphan = start(processes, SLEEPER)
        first = psutil.Process(orphan)
        order: list[str] = []

        def noting(name: str, send: Callable[..., None]) -> Callable[..., None]:
            return lambda *arguments: (order.append(name), send(*arguments))[1]

        monkeypatch.setattr(victim, "kill", noting("driver", victim.kill))
        monkeypatch.setattr(first, "send_signal", noting("trainer", first.send_signal))
        processes.kill_and_sweep(victim, spare=[], patience_s=0.0, first=first)
        assert order == ["trainer", "driver"]
        assert not psutil.pid_exists(orphan)
        assert victim.poll() is not None


def test_processes_are_gone_after_the_block_also_stubborn_orphans(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lost its parent and ignores SIGTERM is ended too, and signal handlers are put back."""
    monkeypatch.setattr(processes_module, "TERMINATE_WAIT_S", 0.3)
    handler = signal.getsignal(signal.SIGINT)
    with Processes() as processes:
        parent, stubborn = start(processes, STUBBORN)
        parent.kill()
        parent.wait()
        assert psutil.pid_exists(stubborn)
    assert not psutil.pid_exists(stubborn)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)  # three and a half minutes on two idle cores
def test_updates_of_a_killed_run_with_a_hook_are_those_of_the_trainer_alone() -> None:
    """Two real trainings, with the hook that replaces traces: every row that both have trained is the same."""
    name = "test-trace-hook"
    demo = Path(processes_module.__file__).with_name("demo.py")
    command = [sys.executable, str(demo), "--hook", "trace", "--steps", "5", "--name", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=800)
        finally:
            process.terminate()  # then it ends all that it has started
    assert process.returncode == 0, output
    result = json.loads((RUNS_DIR / name / "verdict.json").read_text())
    assert (result["holds"], result["rows"]["holds"], result["rows"]["problems"]) == (True, True, [])
    assert result["rows"]["num_rows_after_resume"] > 0
    shutil.rmtree(RUNS_DIR / name)
