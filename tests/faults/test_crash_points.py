"""Killed before any system call that touches a file, a save costs at most itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agl_async_ckpt.storage.layout import RUN_FILE_NAME
from tests.faults.calls import LOOKING, Call
from tests.faults.checks import Judge, undurable
from tests.faults.children import run_child
from tests.faults.figures import Count
from tests.faults.subjects import Subject

pytestmark = pytest.mark.usefixtures("tracing")

SubjectNamed = Callable[[str], Subject]

EVERY_CALL = ["writer next", "trainer next"]
CHANGES_ONLY = ["writer first", "writer again", "trainer first", "trainer again", "trainer keep_one"]
"""A kill before a call that only looks leaves what the kill before it has left; the subjects above show it."""


def trace(subject: Subject) -> list[Call]:
    """The calls of one undisturbed save."""
    subject.reset()
    ended = run_child(subject.save, trace_in=subject.folder)
    assert ended.returned, ended.error
    return ended.calls


def changes(call: Call) -> bool:
    """Whether a call changes a file or folder, or what is durable of it."""
    return call.name not in LOOKING and call.name != "close" and (call.name != "openat" or call.creates)


def kill_before(subject: Subject, call: Call, judge: Judge) -> list[str]:
    """Save, killed right before a call; what does not hold afterwards."""
    subject.reset()
    ended = run_child(subject.save, inject=f"{call.name}:signal=SIGKILL:when={call.nth}")
    if not ended.killed:
        return [f"{call.at} was not reached: {ended.error}"]
    return [f"killed before {call.at}: {problem}" for problem in judge.problems(ended)]


NUM_PARTS = 2
"""So that two processes share the work."""


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("name", EVERY_CALL + CHANGES_ONLY)
def test_killed_save_costs_at_most_itself(name: str, part: int, subject_named: SubjectNamed, count: Count) -> None:
    """No torn read, no lost checkpoint, nothing left behind after the next start, wherever the kill hits."""
    subject = subject_named(name)
    calls = trace(subject)
    if name in CHANGES_ONLY:
        calls = [call for call in calls if changes(call)]
    calls = calls[part::NUM_PARTS]
    judge = Judge(subject)
    problems = [problem for call in calls for problem in kill_before(subject, call, judge)]
    assert not problems, "\n".join(problems)
    assert len(calls) >= (50 if name in EVERY_CALL else 15)
    assert judge.num_states >= 6, "the kills leave all the same: they do not hit the save"
    count("crash points", len(calls))


@pytest.mark.parametrize("name", EVERY_CALL + CHANGES_ONLY)
def test_finished_save_is_durable_in_the_right_order(name: str, subject_named: SubjectNamed) -> None:
    """What is renamed is synced before, every new entry after; the models before the tracker, all before the seal.

    The calls of two saves are the same, one by one: a crash point means the same in every run.
    """
    subject = subject_named(name)
    calls = trace(subject)
    assert undurable(calls, subject.folder) == []
    assert Judge(subject).problems(run_child(lambda: None)) == []
    assert [(call.name, call.nth) for call in trace(subject)] == [(call.name, call.nth) for call in calls]


def test_kill_comes_before_the_call(subject_named: SubjectNamed) -> None:
    """What strace promises and all crash points rest on: the call that is named has had no effect."""
    subject = subject_named("writer first")
    (first, *_) = [call for call in trace(subject) if call.name == "mkdir"]
    subject.reset()
    assert run_child(subject.save, inject=f"mkdir:signal=SIGKILL:when={first.nth}").killed
    assert [path.name for path in subject.folder.iterdir()] == [RUN_FILE_NAME]
