"""Disks that are really full, limits that are really hit, writes that move less than they were given."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_async_ckpt.storage.layout import LOADER_FILE_NAME
from tests.faults.checks import Judge
from tests.faults.children import run_child
from tests.faults.disks import mount_tmpfs, why_no_mounts, with_private_mounts
from tests.faults.figures import Count
from tests.faults.subjects import Subject

SubjectNamed = Callable[[str], Subject]

SUBJECTS = ["writer next", "trainer next"]
FEW_BYTES = 64 * 1024


def size_of(subject: Subject) -> int:
    """Bytes of the largest file that the save writes."""
    subject.reset()
    assert run_child(subject.save).returned
    new = subject.folder / f"global_step_{subject.step}"
    return max(path.stat().st_size for path in new.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", SUBJECTS)
def test_full_disk_costs_at_most_the_save(name: str, subject_named: SubjectNamed, tmp_path: Path, count: Count) -> None:
    """Whatever room is left: an error, the checkpoint before resumes; with room again, the same save succeeds."""
    reason = why_no_mounts("tmpfs", tmp_path / "attempt")
    if reason is not None:
        pytest.skip(reason)
    subject = subject_named(name)
    rooms = [*range(0, 8), 12]

    def fill_each() -> list[str]:
        found: list[str] = []
        mount_tmpfs(subject.folder, 8 << 20)
        judge = Judge(subject)
        for room in rooms:
            for saves_again in (False, True):
                subject.reset()
                ballast = subject.folder / "ballast"
                fill(ballast, leave=room * os.sysconf("SC_PAGE_SIZE"))
                ended = run_child(subject.save)
                where = f"with room for {room} pages ({ended.error or 'returned'})"
                ballast.unlink()
                if room == 0 and ended.returned:
                    found.append(f"{where}: nothing failed")
                if saves_again:
                    ended = run_child(subject.save)
                    where += ", then with enough"
                    found += [] if ended.returned else [f"{where}: {ended.error}"]
                found += [f"{where}: {problem}" for problem in judge.problems(ended)]
        return found

    problems = with_private_mounts(fill_each)
    assert not problems, "\n".join(problems)
    count("full disks", 2 * len(rooms))


def fill(path: Path, leave: int) -> None:
    """Write a file until `leave` bytes are left."""
    with path.open("wb", buffering=0) as file:
        room = os.statvfs(path.parent)
        file.write(bytes(room.f_bavail * room.f_frsize - leave))


@pytest.mark.parametrize("name", SUBJECTS)
def test_file_size_limit_costs_at_most_the_save(name: str, subject_named: SubjectNamed, count: Count) -> None:
    """RLIMIT_FSIZE: the write that crosses it moves a part, the next one fails."""
    subject = subject_named(name)
    largest = size_of(subject)
    limits = sorted({0, 1, *range(0, largest, max(1, largest // 8)), largest - 1})
    judge = Judge(subject)
    problems: list[str] = []
    for limit in limits:
        subject.reset()

        def save(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            subject.save()

        ended = run_child(save)
        problems += [f"limit {limit} ({ended.error or 'returned'}): {problem}" for problem in judge.problems(ended)]
        if ended.returned:
            problems.append(f"limit {limit}: nothing failed")
    assert not problems, "\n".join(problems)
    count("full disks", len(limits))


@pytest.mark.parametrize("missing", [1, 7, 700])
def test_loader_state_that_torch_tears_is_never_sealed(missing: int, subject_named: SubjectNamed, count: Count) -> None:
    """The save must not return, though VERL names the step; the checkpoint before it resumes.

    torch.save of 2.11 returns with 7 bytes missing if the file size limit refuses just them: its stream is closed
    without a look at the result. Where that happens depends on the content, so it is played here.
    """
    import torch

    subject = subject_named("trainer next")
    shipped = torch.save

    def torn(content: object, file: object, *args: object, **kwargs: object) -> None:
        shipped(content, file, *args, **kwargs)
        if str(file).endswith(LOADER_FILE_NAME):
            os.truncate(str(file), Path(str(file)).stat().st_size - missing)

    def save() -> None:
        torch.save = torn
        subject.save()

    ended = run_child(save)
    assert ended.error is not None
    assert "data.pt is not whole" in ended.error
    assert Judge(subject).problems(ended) == []
    count("full disks", 1)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("most", [1, 7, 4096])
def test_short_writes_are_gone_on_with(name: str, most: int, subject_named: SubjectNamed, count: Count) -> None:
    """write(2) may move less than it is given; the file is whole all the same."""
    subject = subject_named(name)
    num_bytes = size_of(subject)
    subject.reset()
    least = max(most, num_bytes // 2000)  # a thousand calls show as much as a million
    write = os.write

    def save() -> None:
        os.write = lambda fd, data: write(fd, memoryview(data)[:least])
        subject.save()

    ended = run_child(save)
    assert ended.returned, ended.error
    assert Judge(subject).problems(ended) == []
    count("short writes", 1)
