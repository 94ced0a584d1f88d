"""Who looks at a folder while a trainer saves into it sees the old file or the new one."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from agl_async_ckpt.exceptions import CheckpointNotFoundError
from agl_async_ckpt.folder.steps import inspect_step, list_steps, read_tracker
from agl_async_ckpt.storage.commit import load_state
from agl_async_ckpt.storage.files import remove_files
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, step_name
from tests.faults.checks import same
from tests.faults.figures import Count
from tests.faults.subjects import STEP, WriterSubject, writer_state
from tests.rig.processes import fork

NUM_ROUNDS = 60


def write_on(folder: Path, done: Path) -> None:
    """Save step 3 over and over with two contents, then new steps, and remove an old one's input as retention does."""
    for number in range(NUM_ROUNDS):
        WriterSubject.write(folder, writer_state(STEP, ("old", "new")[number % 2]))
        if number % 3 == 0:
            step = 10 + number
            WriterSubject.write(folder, writer_state(step, "new"))
            remove_files(folder / step_name(step - 3), (SEAL_NAME, FILE_NAME))
    done.write_text("done")


def read_on(folder: Path, done: Path) -> tuple[int, list[str]]:
    """Read everything in a loop until the writer is done; how often, and what was torn."""
    known = {version: writer_state(STEP, version) for version in ("old", "new")}
    num_reads, seen, problems = 0, Counter[str](), list[str]()
    while not done.exists() and len(problems) < 5:
        tracker = read_tracker(folder)
        if not isinstance(tracker, int):
            problems.append(f"tracker: {tracker}")
        for info in list_steps(folder):
            if info.trailer is None and info.has_state:
                problems += [f"list_steps: {info.problems}"]
        inspect_step(folder / step_name(STEP), tracker)
        state = load_state(folder / step_name(STEP))
        versions = [version for version, other in known.items() if same(state, other)]
        if versions:
            seen[versions[0]] += 1
        else:
            problems.append("step 3 holds a state that was never saved")
        with suppress(CheckpointNotFoundError):  # between two looks retention may have removed it
            for info in list_steps(folder, full=True)[-2:]:
                load_state(info.path)
        num_reads += 5
    if len(seen) < 2:
        problems.append(f"the reader saw {dict(seen)} only: nothing changed beside it")
    return num_reads, problems


def test_readers_beside_a_writer_see_whole_files(tmp_path: Path, count: Count) -> None:
    """Old or new, in every function that reads; the tracker, published by us, always names a step."""
    subject = WriterSubject("again", tmp_path)
    done, told = tmp_path / "done", tmp_path / "told"
    children = [
        fork(lambda: write_on(subject.folder, done)),
        fork(lambda: told.write_text(json.dumps(read_on(subject.folder, done)))),
    ]
    try:
        results = [read_on(subject.folder, done)]
        os.waitpid(children[1], 0)
        results.append(json.loads(told.read_text()))
    finally:
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    assert done.exists(), "the writer failed"
    problems = [problem for _, found in results for problem in found]
    assert not problems, "\n".join(problems)
    count("reads", sum(num_reads for num_reads, _ in results))
