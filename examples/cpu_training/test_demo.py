"""The parts of the demo that its result depends on, without training: `pytest examples/cpu_training`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("wrapt")
if sys.platform != "linux":
    pytest.skip("needs prctl", allow_module_level=True)

from cpu_training import processes as processes_module  # noqa: E402
from cpu_training.processes import Processes  # noqa: E402
from cpu_training.recording import EVENTS_FILE, EventReader  # noqa: E402
from cpu_training.services import DemoError, choose_port  # noqa: E402
from cpu_training.verdict import Step, judge, surviving_steps  # noqa: E402

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
        {**base, "event": "trained", "rows": 4, "seconds": 1.0},
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
