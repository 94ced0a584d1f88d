"""A power cut takes away what was not durable: never a save that returned, never the checkpoint before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_async_ckpt.storage.layout import LOADER_FILE_NAME, TRACKER_NAME, step_name
from tests.faults.calls import Call
from tests.faults.checks import problems_after
from tests.faults.children import Ended, run_child
from tests.faults.disks import CUTS, FILE_SYSTEMS, Disk, why_no_mounts, with_private_mounts
from tests.faults.figures import Count
from tests.faults.subjects import Subject
from tests.faults.test_crash_points import changes, trace

SubjectNamed = Callable[[str], Subject]


@pytest.fixture(params=sorted(FILE_SYSTEMS))
def file_system(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One that can be mounted here."""
    reason = why_no_mounts(request.param, tmp_path / "attempt")
    if reason is not None:
        pytest.skip(reason)
    return request.param


def cut(subject: Subject, disk: Disk, call: Call | None, how: str, flush_first: tuple[str, ...] = ()) -> list[str]:
    """Save on a disk, lose the power before a call or, without one, after the save; what does not hold afterwards.

    Args:
        flush_first: Names in the output folder that happen to reach the disk by themselves before the cut, as the
            kernel writes back in no promised order.
    """
    subject.reset()
    disk.sync()
    ended = run_child(subject.save, inject=f"{call.name}:signal=SIGKILL:when={call.nth}" if call else None)
    if call is None and not ended.returned:
        return [f"the save failed: {ended.error}"]
    for name in flush_first:
        path = subject.folder / name
        if path.exists():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    disk.cut_power(how)
    disk.unmount()
    disk.mount()
    where = f"power cut ({how}) " + (f"before {call.at}" if call else "after the save")
    return [f"{where}: {problem}" for problem in problems_after(subject, ended, power_cut=True)]


@pytest.mark.parametrize("name", ["trainer next", "trainer again", "trainer keep_one"])
def test_power_cut_never_undoes_a_save_that_returned(
    name: str, file_system: str, subject_named: SubjectNamed, tmp_path: Path, count: Count
) -> None:
    """Step, tracker, data.pt, seal, model and our file are there after the journal's recovery, and load."""
    subject = subject_named(name)

    def cut_each() -> list[str]:
        disk = Disk(file_system, tmp_path / "image", subject.folder)
        disk.mount()
        return [problem for how in CUTS for problem in cut(subject, disk, None, how)]

    problems = with_private_mounts(cut_each)
    assert not problems, "\n".join(problems)
    count("power cuts", len(CUTS))


@pytest.mark.usefixtures("tracing")
def test_power_cut_in_a_save_costs_at_most_the_save(
    file_system: str, subject_named: SubjectNamed, tmp_path: Path, count: Count
) -> None:
    """Before every call that changes something; the last synced state, or the same with the journal written out."""
    subject = subject_named("trainer next")
    calls = [call for call in trace(subject) if changes(call)]

    def cut_each() -> list[str]:
        disk = Disk(file_system, tmp_path / "image", subject.folder)
        disk.mount()
        hows = list(CUTS)
        return [
            problem
            for number, call in enumerate(calls)
            for problem in cut(subject, disk, call, hows[number % len(hows)])
        ]

    problems = with_private_mounts(cut_each)
    assert not problems, "\n".join(problems)
    assert len(calls) >= 30
    count("power cuts", len(calls))


@pytest.mark.usefixtures("tracing")
def test_tracker_that_reached_the_disk_early_names_a_whole_step(
    file_system: str, subject_named: SubjectNamed, tmp_path: Path, count: Count
) -> None:
    """VERL writes its tracker and data.pt in place: the kernel may write these back before the models' files.

    The cut comes after VERL's save and before ours is finished, when nothing but the tracker names the step.
    """
    subject = subject_named("trainer next")
    calls = trace(subject)
    written = next(n for n, call in enumerate(calls) if call.name == "write" and TRACKER_NAME in call.paths[0])
    late = [call for call in calls[written + 1 :] if changes(call)]

    def cut_each() -> list[str]:
        disk = Disk(file_system, tmp_path / "image", subject.folder)
        disk.mount()
        early = (TRACKER_NAME, f"{step_name(subject.step)}/{LOADER_FILE_NAME}")
        return [problem for call in late for problem in cut(subject, disk, call, "nothing flushed", early)]

    problems = with_private_mounts(cut_each)
    assert not problems, "\n".join(problems)
    assert len(late) >= 5
    count("power cuts", len(late))


def test_disk_loses_what_was_not_synced(file_system: str, tmp_path: Path) -> None:
    """The instrument itself: after the cut a synced file is whole, one that was only written is not."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def act() -> tuple[bytes, bool]:
        disk = Disk(file_system, tmp_path / "image", folder)
        disk.mount()
        (folder / "synced").write_bytes(b"whole")
        disk.sync()
        (folder / "written").write_bytes(b"in the page cache")
        disk.cut_power("nothing flushed")
        disk.unmount()
        disk.mount()
        return (folder / "synced").read_bytes(), (folder / "written").exists()

    assert with_private_mounts(act) == (b"whole", False)


def test_ended_is_what_the_parent_is_told() -> None:
    """The other instrument: a child's result and its error come back; a kill is no error."""
    assert run_child(lambda: [1]) == Ended(False, None, False, [1])
    failed = run_child(lambda: int("x"))
    assert failed.error is not None
    assert failed.error.startswith("ValueError: invalid literal")
    assert run_child(lambda: os.kill(os.getpid(), 9)).killed
