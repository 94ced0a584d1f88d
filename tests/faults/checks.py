"""What must hold after a save was killed, refused or cut off. Each check returns problems, in words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from agl_async_ckpt.exceptions import AsyncCheckpointError, CheckpointNotFoundError
from agl_async_ckpt.folder.steps import inspect_step, read_tracker
from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage.commit import load_state
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, step_name
from tests.faults.calls import Call
from tests.faults.children import Ended
from tests.faults.subjects import Subject
from tests.golden.sample import assert_same


def problems_after(subject: Subject, ended: Ended, *, power_cut: bool = False) -> list[str]:
    """Everything that must hold in the folder once a save has ended in any way, and at the next start.

    - Each step's input file is one of the states that were committed there, or absent where none had been published.
    - A tracker that names a step names one that is whole, unless VERL wrote it over a fault and the save said so.
    - The next start takes the step it would have taken before the save, or the saved one; the latter if the save
      returned. Weights, position and the rest of the stream are those of that step.
    - Nothing is left behind that is named like a temporary file.

    Args:
        subject: What was saved.
        ended: How the save ended.
        power_cut: What was not durable is lost: VERL's tracker may then name a step that it did not finish.
    """
    found = torn_reads(subject)
    tracker = read_tracker(subject.folder)
    if isinstance(tracker, int) and not (power_cut and not ended.returned) and ended.error is None:
        info = inspect_step(subject.folder / step_name(tracker), tracker)
        # A step that is saved again is rebuilt in place: until its new data.pt is there the tracker's old word is void.
        if not info.complete and not (tracker == subject.step == subject.before):
            found.append(f"the tracker names step {tracker}, which is not complete: {info.problems}")
    try:
        value = subject.start()
    except Exception as error:
        return [*found, f"the next start fails: {type(error).__name__}: {error}"]
    found += value.problems
    allowed = {subject.step} if ended.returned else {subject.before, subject.step}
    if subject.before == subject.step:
        allowed.add(subject.step - 1)  # saved again in place: the one before it has to do
        if ended.returned:
            allowed = {subject.step}
    if value.step not in allowed:
        found.append(f"the next start begins at step {value.step}, not at one of {sorted(allowed)}")
    found += [f"{path.relative_to(subject.folder)} is left behind" for path in leftovers(subject.folder)]
    return found


class Judge:
    """`problems_after`, once for each content that the folder is found with: most crash points leave the same.

    Attributes:
        num_states: How many different contents it has seen.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._seen: dict[tuple[str, bool], list[str]] = {}

    @property
    def num_states(self) -> int:
        """How many different contents it has seen."""
        return len(self._seen)

    def problems(self, ended: Ended) -> list[str]:
        """As `problems_after`."""
        key = (_digest(self._subject.folder), ended.returned)
        if key not in self._seen:
            self._seen[key] = problems_after(self._subject, ended)
        return self._seen[key]


_OF_ONE_WRITER = re.compile(r"\.[0-9]+\.[0-9a-f]{8}\.tmp$")


def _digest(folder: Path) -> str:
    """Over every name and byte in a folder; the process number and the random part of a temp file's name aside."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = _OF_ONE_WRITER.sub(".tmp", path.relative_to(folder).as_posix())
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{path.is_dir()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def torn_reads(subject: Subject) -> list[str]:
    """Whether each step's input file is, whole, one of the states that were committed there."""
    found: list[str] = []
    for step, states in subject.known.items():
        path = subject.folder / step_name(step)
        was_published = step != subject.step or subject.before == subject.step
        try:
            state = load_state(path)
        except CheckpointNotFoundError:
            if was_published and not (step != subject.step and subject.removes_older and _is_complete(subject)):
                found.append(f"the input file of step {step} is gone")
        except (AsyncCheckpointError, OSError) as error:
            found.append(f"the input file of step {step} is torn: {error}")
        else:
            if not any(same(state, known) for known in states):
                found.append(f"the input file of step {step} holds a state that was never saved")
    return found


def _is_complete(subject: Subject) -> bool:
    return inspect_step(subject.folder / step_name(subject.step), read_tracker(subject.folder)).complete


def same(one: InputState, other: InputState) -> bool:
    """Whether two states are equal, in every part and type."""
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


def leftovers(folder: Path) -> list[Path]:
    """Temporary files, of ours or anyone's."""
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def undurable(calls: Sequence[Call], folder: Path) -> list[str]:
    """What a power cut could undo, judged by the order of the calls of a save that returned.

    - A file is synced after its last write, before it is renamed to its place or, if it has none but its own, at all.
    - A folder is synced after the last file or folder that was created in it or renamed into it.
    - The names that are ours are never written in place, and never taken away to be put back.
    - When the seal takes its name, everything else is durable: its presence proves the rest.
    - When VERL's tracker or `data.pt` is created, the models are: a tracker that is on disk names a whole step.

    Calls that failed did not happen; an fsync that failed once proves nothing any more, whatever a second one says.
    """
    found: list[str] = []
    doubtful: set[str] = set()
    dirty_files: dict[str, str] = {}
    dirty_folders: dict[str, str] = {}
    removed: set[str] = set()

    def pending(but: str = "") -> list[str]:
        return sorted(path for path in (*dirty_files, *dirty_folders) if path != but)

    for call in calls:
        path = call.paths[0]
        if call.failed:
            if call.name in ("fsync", "fdatasync"):
                doubtful.add(path)
            continue
        name = Path(path).name
        if call.creates or call.truncates:
            if name in (FILE_NAME, SEAL_NAME):
                found.append(f"{name} is written in place ({call.at})")
            if name == "data.pt":
                unsynced = [p for p in pending() if any(f"/{role}" in p.removeprefix(str(folder)) for role in _MODELS)]
                found += [f"{p} is not durable when data.pt is written" for p in unsynced]
            dirty_files[path] = call.at
            if call.creates:
                dirty_folders[str(Path(path).parent)] = call.at
        elif call.name in ("write", "pwrite64", "writev", "ftruncate"):
            dirty_files[path] = call.at
        elif call.name in ("fsync", "fdatasync"):
            if path in doubtful:
                found.append(f"{Path(path).name} is taken for durable after an fsync of it failed ({call.at})")
            dirty_files.pop(path, None)
            dirty_folders.pop(path, None)
        elif call.name in ("mkdir", "mkdirat"):
            dirty_folders[str(Path(path).parent)] = call.at
        elif call.name in ("rename", "renameat", "renameat2"):
            target = call.paths[-1]
            if path in dirty_files:
                found.append(f"{Path(target).name} gets content that is not durable ({call.at})")
                dirty_files[target] = dirty_files.pop(path)
            if target in removed and Path(target).name != SEAL_NAME:
                found.append(f"{Path(target).name} was taken away before it was put back ({call.at})")
            if Path(target).name == SEAL_NAME:
                inside = [p for p in pending() if p != str(Path(target).parent)]
                found += [f"{p} is not durable when the step is sealed" for p in inside]
            dirty_folders[str(Path(target).parent)] = call.at
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            dirty_files.pop(path, None)
            dirty_folders.pop(path, None)
            removed.add(path)
    return [*found, *(f"{path} is not durable when the save returns" for path in pending())]


_MODELS = ("actor", "critic")
