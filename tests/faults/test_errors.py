"""A call that fails makes the save fail, or fails for nothing; it never makes a checkpoint that is not one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.calls import ERRNOS, Call
from tests.faults.checks import Judge, undurable
from tests.faults.children import run_child
from tests.faults.figures import Count
from tests.faults.subjects import Subject
from tests.faults.test_crash_points import changes, trace

pytestmark = pytest.mark.usefixtures("tracing")

SubjectNamed = Callable[[str], Subject]

FAMILIES = (
    ("ENOSPC", "EDQUOT", "EFBIG"),
    ("EIO", "EOVERFLOW", "EMLINK", "EBUSY", "EPERM", "ENOLCK"),
    ("EACCES", "EROFS"),
    ("EMFILE", "ENFILE", "ENOMEM"),
    ("EINTR",),
)
"""Errors that Python and the code treat alike."""


def every_error(calls: list[Call]) -> Iterator[tuple[Call, str]]:
    """Each call that changes something with each error that it can return, the others with one, in turn."""
    turn = 0
    for call in calls:
        errnos = ERRNOS[call.name]
        if changes(call):
            yield from ((call, errno) for errno in errnos)
        else:
            turn += 1
            yield call, errnos[turn % len(errnos)]


def an_error_of_each_family(calls: list[Call]) -> Iterator[tuple[Call, str]]:
    """Each call that changes something with one error of each family, in turn, the others with one, in turn."""
    turn = 0
    for call in calls:
        errnos = ERRNOS[call.name]
        families = (
            [[errno for errno in errnos if errno in family] for family in FAMILIES] if changes(call) else [errnos]
        )
        for family in families:
            if family:
                turn += 1
                yield call, family[turn % len(family)]


def fail(subject: Subject, call: Call, errno: str, judge: Judge) -> list[str]:
    """Save while a call fails; what does not hold afterwards.

    A save that returns although a call failed must be complete and durable all the same.
    """
    subject.reset()
    inject = f"{call.name}:error={errno}:when={call.nth}"
    ended = run_child(subject.save, inject=inject)
    found = judge.problems(ended)
    if ended.killed:
        found = [*found, "the save crashed"]
    elif ended.returned:
        subject.reset()
        again = run_child(subject.save, inject=inject, trace_in=subject.folder)
        found = [*found, *undurable(again.calls, subject.folder)]
    return [f"{errno} at {call.at} ({ended.error or 'returned'}): {problem}" for problem in found]


CASES = [("writer next", every_error, 80), ("trainer next", an_error_of_each_family, 60)]
NUM_PARTS = 3
"""So that two processes share the work."""


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize(("name", "choose", "at_least"), CASES, ids=[name.replace(" ", "-") for name, *_ in CASES])
def test_error_of_any_call_costs_at_most_the_save(
    name: str,
    choose: Callable[[list[Call]], Iterator[tuple[Call, str]]],
    at_least: int,
    part: int,
    subject_named: SubjectNamed,
    count: Count,
) -> None:
    """Nothing is swallowed; a tracker that names N means a whole N, else the checkpoint before resumes exactly."""
    subject = subject_named(name)
    cases = list(choose(trace(subject)))[part::NUM_PARTS]
    judge = Judge(subject)
    problems = [problem for call, errno in cases for problem in fail(subject, call, errno, judge)]
    assert not problems, "\n".join(problems)
    assert len(cases) >= at_least
    count("injected errors", len(cases))


def test_error_says_what_was_not_published(subject_named: SubjectNamed) -> None:
    """A full disk while the input file is written: a StateWriteError with path and number."""
    subject = subject_named("trainer next")
    write = next(call for call in trace(subject) if call.name == "write" and "agentlightning_input.pt" in call.paths[0])
    subject.reset()
    ended = run_child(subject.save, inject=f"write:error=ENOSPC:when={write.nth}")
    assert ended.is_os_error
    assert ended.error is not None
    assert ended.error.startswith(f"StateWriteError: {subject.folder}/global_step_3/agentlightning_input.pt")
    assert "No space left on device" in ended.error
