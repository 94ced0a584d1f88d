"""The suite itself is put to the test: writers with a known fault are convicted by the checks that acquit ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl_async_ckpt.storage.layout import LOADER_FILE_NAME, TRACKER_NAME, step_name
from tests.faults import broken
from tests.faults.calls import Call
from tests.faults.checks import problems_after, undurable
from tests.faults.children import Ended, run_child
from tests.faults.disks import Disk, why_no_mounts, with_private_mounts
from tests.faults.figures import Count
from tests.faults.subjects import Subject
from tests.faults.test_crash_points import changes
from tests.faults.test_power_cuts import cut

SubjectNamed = Callable[[str], Subject]
Break = Callable[[], None]


class Broken:
    """A subject whose save goes through a broken writer; all else is the subject's own."""

    def __init__(self, subject: Subject, break_it: Break) -> None:
        self._subject = subject
        self._break_it = break_it

    def __getattr__(self, name: str) -> object:
        return getattr(self._subject, name)

    def save(self) -> None:
        """Break the writer, in this process, then save."""
        self._break_it()
        self._subject.save()


def _traced(subject: Subject) -> list[Call]:
    subject.reset()
    return run_child(subject.save, trace_in=subject.folder).calls


def by_kill(subject: Subject) -> Iterator[str]:
    """Killed before each change."""
    for call in filter(changes, _traced(subject)):
        subject.reset()
        yield from problems_after(
            subject, run_child(subject.save, inject=f"{call.name}:signal=SIGKILL:when={call.nth}")
        )


def by_error(subject: Subject) -> Iterator[str]:
    """Each write, fsync and rename fails once."""
    for call in _traced(subject):
        if call.name in ("write", "fsync", "rename"):
            subject.reset()
            inject = f"{call.name}:error=ENOSPC:when={call.nth}"
            ended = run_child(subject.save, inject=inject, trace_in=subject.folder)
            yield from problems_after(subject, ended)
            if ended.returned:
                yield from undurable(ended.calls, subject.folder)


def by_order(subject: Subject) -> Iterator[str]:
    """The order of the calls of one save."""
    yield from undurable(_traced(subject), subject.folder)


def by_power_cut(subject: Subject, image: Path) -> Iterator[str]:
    """On ext4, which writes a name and its content back at different times: after the save, then before each change."""
    calls = [call for call in _traced(subject) if changes(call)]
    disk = Disk("ext4", image, subject.folder)
    disk.mount()
    yield from cut(subject, disk, None, "log flushed")
    yield from cut(subject, disk, None, "nothing flushed")
    for call in calls:
        yield from cut(subject, disk, call, "log flushed")


def by_early_tracker(subject: Subject, image: Path) -> Iterator[str]:
    """The tracker and data.pt reach the disk by themselves, then the power goes, before the save has ended."""
    calls = _traced(subject)
    written = next(n for n, call in enumerate(calls) if call.name == "write" and TRACKER_NAME in call.paths[0])
    disk = Disk("ext4", image, subject.folder)
    disk.mount()
    early = (TRACKER_NAME, f"{step_name(subject.step)}/{LOADER_FILE_NAME}")
    yield from cut(subject, disk, calls[written + 1], "nothing flushed", early)


CASES: list[tuple[Break, str, Callable[[Subject], Iterator[str]], str]] = [
    (broken.in_place, "writer again", by_kill, "is torn"),
    (broken.in_place, "writer next", by_order, "written in place"),
    (broken.no_fsync, "writer next", by_order, "content that is not durable"),
    (broken.late_fsync, "writer next", by_order, "content that is not durable"),
    (broken.no_folder_fsync, "writer next", by_order, "not durable when the save returns"),
    (broken.unlink_then_rename, "writer again", by_kill, "is gone"),
    (broken.unlink_then_rename, "writer again", by_order, "taken away before"),
    (broken.swallowed_errors, "writer next", by_error, ""),
    (broken.fsync_tried_twice, "writer next", by_error, "after an fsync of it failed"),
    (broken.tracker_first, "writer next", by_kill, "the tracker names step 3, which is not complete"),
    (broken.nothing_of_verls_synced, "trainer next", by_order, "data.pt is not durable when the step is sealed"),
    (broken.models_not_synced, "trainer next", by_order, "is not durable when data.pt is written"),
]


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("break_it", "name", "by", "words"), CASES, ids=[f"{case[0].__name__}-{case[2].__name__}" for case in CASES]
)
def test_broken_writer_is_caught(
    break_it: Break,
    name: str,
    by: Callable[[Subject], Iterator[str]],
    words: str,
    subject_named: SubjectNamed,
    count: Count,
) -> None:
    """By what it does when it is killed or refused, or by the order of its calls: no mount is needed."""
    subject: Subject = Broken(subject_named(name), break_it)  # type: ignore[assignment]
    assert any(words in problem for problem in by(subject))
    count("broken writers caught", 1)


POWER_CASES: list[tuple[Break, str, Callable[[Subject, Path], Iterator[str]]]] = [
    (broken.no_fsync, "writer next", by_power_cut),
    (broken.late_fsync, "writer next", by_power_cut),
    (broken.nothing_of_verls_synced, "trainer next", by_power_cut),
    (broken.models_not_synced, "trainer next", by_early_tracker),
]


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(
    ("break_it", "name", "by"), POWER_CASES, ids=[f"{case[0].__name__}-{case[2].__name__}" for case in POWER_CASES]
)
def test_broken_writer_is_caught_by_a_power_cut(
    break_it: Break,
    name: str,
    by: Callable[[Subject, Path], Iterator[str]],
    subject_named: SubjectNamed,
    tmp_path: Path,
    count: Count,
) -> None:
    """What it did not sync is really gone."""
    reason = why_no_mounts("ext4", tmp_path / "attempt")
    if reason is not None:
        pytest.skip(reason)
    subject: Subject = Broken(subject_named(name), break_it)  # type: ignore[assignment]
    found = with_private_mounts(lambda: next(by(subject, tmp_path / "image"), None))
    assert found is not None
    count("broken writers caught", 1)


def test_shipped_writer_is_acquitted(subject_named: SubjectNamed) -> None:
    """The same checks find nothing where nothing is broken: they do not convict at random."""
    subject: Subject = Broken(subject_named("writer next"), lambda: None)  # type: ignore[assignment]
    assert problems_after(subject, run_child(subject.save)) == []
    assert problems_after(subject, Ended(killed=False)) == []
