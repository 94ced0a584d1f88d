"""Which steps an output folder holds, and which of them are complete."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agl_async_ckpt.exceptions import CheckpointNotFoundError
from agl_async_ckpt.folder.seal import write_seal
from agl_async_ckpt.folder.steps import (
    TRACKER_NAME,
    StepInfo,
    TrackerProblem,
    inspect_step,
    list_steps,
    parse_step,
    read_tracker,
)
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, step_name
from tests.folder.made import make_step
from tests.storage.made import write


def look(step_dir: Path, full: bool = True) -> StepInfo:
    return inspect_step(step_dir, read_tracker(step_dir.parent), full=full)


@pytest.fixture
def step_dir(tmp_path: Path) -> Path:
    """A finished save of step 7, sealed and named by the tracker."""
    folder = make_step(tmp_path / "out", 7)
    write_seal(folder, use_critic=True, async_save=False)
    return folder


@pytest.mark.parametrize(
    ("path", "step"),
    [
        *(("global_step_5", 5), ("a/b/global_step_12/", 12), ("/a/global_step_0", 0), ("global_step_5//", 5)),
        *(("global_step_", None), ("global_step_-1", None), ("global_step_007", None), ("global_step_1_2", None)),
        *(("global_step_5.bak", None), ("xglobal_step_5", None), ("global_step_5/actor", None), ("", None)),
        *(("global_step_\u0665", None), ("global_step_5\n", None), ("/", None)),
    ],
)
def test_step_number_is_read_from_the_folder_name(path: str, step: int | None) -> None:
    """Only a folder that is named as VERL names it has a step."""
    assert parse_step(path) == step
    assert parse_step(Path(path)) == step
    if step is not None:
        assert parse_step(step_name(step)) == step


@pytest.mark.parametrize(
    ("data", "found"),
    [
        *((b"9", 9), (b"12\n", 12), (b" 0 ", 0), (b"", "empty"), (b"\n", "empty"), (b"\0\0", "nul"), (b"\0", "nul")),
        *((b"release", "release"), (b"release\n", "release"), (b"1\0", "torn"), (b"-1", "torn"), (b"1.5", "torn")),
        *(
            (b"1_0", "torn"),
            (b"\xff\xfe", "torn"),
            (b"9" * 5000, "torn"),
            ("\u0665".encode(), "torn"),
            (b"1 2", "torn"),
        ),
    ],
)
def test_tracker_is_read_or_told_apart(tmp_path: Path, data: bytes, found: int | str) -> None:
    """Empty, zeroed, a release, torn: each kind by name with the path, and never a ValueError."""
    (tmp_path / TRACKER_NAME).write_bytes(data)
    tracker = read_tracker(tmp_path)
    if isinstance(found, int):
        assert tracker == found
    else:
        assert isinstance(tracker, TrackerProblem)
        assert tracker.kind == found
        assert str(tmp_path) in tracker.message


def test_missing_tracker_is_none(tmp_path: Path) -> None:
    """In an empty folder, a missing one, and a file."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "none", tmp_path / "file"):
        assert read_tracker(folder) is None


def test_tracker_that_is_a_folder_is_unreadable(tmp_path: Path) -> None:
    """Named as such."""
    (tmp_path / TRACKER_NAME).mkdir()
    tracker = read_tracker(tmp_path)
    assert isinstance(tracker, TrackerProblem)
    assert tracker.kind == "unreadable"


def test_steps_are_listed_in_numeric_order(tmp_path: Path) -> None:
    """10 comes after 9; files and other folders are no steps."""
    for step in (10, 9, 100, 1):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "global_step_5").write_text("a file")
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / TRACKER_NAME).write_text("9")
    found = list_steps(tmp_path)
    assert [info.step for info in found] == [1, 9, 10, 100]
    assert [info.step for info in found if info.selected] == [9]
    assert not any(info.complete or info.has_state for info in found)
    assert list_steps(tmp_path / "none") == []
    assert list_steps(tmp_path / "global_step_5") == []


@pytest.mark.parametrize("full", [True, False])
def test_finished_save_is_complete(step_dir: Path, full: bool) -> None:
    """Sealed and selected; sealed and no longer selected; with a trailing slash."""
    info = look(step_dir, full)
    assert info.complete
    assert (info.step, info.has_state, info.selected, info.problems) == (7, True, True, ())
    assert info.trailer is not None
    assert info.seal is not None
    assert info.trailer.sha256 == info.seal.state_sha256
    (step_dir.parent / TRACKER_NAME).write_text("8")
    assert look(step_dir, full).complete
    assert inspect_step(f"{step_dir}/", 7, full=full).complete


def test_kill_between_tracker_and_seal_is_complete(step_dir: Path) -> None:
    """The tracker is the last thing VERL writes: it proves the save as well as the seal does."""
    (step_dir / SEAL_NAME).unlink()
    assert look(step_dir).complete
    (step_dir / SEAL_NAME).write_text("torn")
    assert look(step_dir).complete


def test_kill_before_the_tracker_is_incomplete(step_dir: Path) -> None:
    """Neither seal nor tracker: the model may be half written."""
    (step_dir / SEAL_NAME).unlink()
    (step_dir.parent / TRACKER_NAME).write_text("6")
    info = look(step_dir)
    assert not info.complete
    assert "did not finish" in info.problems[0]
    assert "tracker" in info.problems[0]


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("data", [None, b"", b"PK\x03\x04torn", b"\0" * 500])
def test_missing_or_damaged_loader_file_makes_the_step_incomplete(
    step_dir: Path, data: bytes | None, sealed: bool
) -> None:
    """VERL would start at row 0 without data.pt, or die reading it."""
    if not sealed:
        (step_dir / SEAL_NAME).unlink()
    (step_dir / "data.pt").unlink()
    if data is not None:
        (step_dir / "data.pt").write_bytes(data)
    info = look(step_dir)
    assert not info.complete
    assert "data.pt" in info.problems[0]


@pytest.mark.parametrize("full", [True, False])
def test_input_state_that_is_missing_damaged_or_of_another_step_is_incomplete(step_dir: Path, full: bool) -> None:
    """With the reason."""
    path = step_dir / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    info = look(step_dir, full)
    assert info.has_state
    assert not info.complete
    assert "damaged" in info.problems[0]
    path.unlink()
    info = look(step_dir, full)
    assert not info.has_state
    assert not info.complete
    path.write_bytes(whole)
    other = step_dir.rename(step_dir.parent / "global_step_8")
    info = look(other, full)
    assert not info.complete
    assert f"{FILE_NAME} is of step 7" in info.problems


def test_altered_byte_needs_the_full_look(step_dir: Path) -> None:
    """A listing is cheap; a resume looks at every byte."""
    path = step_dir / FILE_NAME
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    assert look(step_dir, full=False).complete
    assert not look(step_dir, full=True).complete
    assert [info.complete for info in list_steps(step_dir.parent)] == [True]
    assert [info.complete for info in list_steps(step_dir.parent, full=True)] == [False]


def test_pruned_model_makes_the_step_incomplete(step_dir: Path) -> None:
    """Even while the tracker names it."""
    shutil.rmtree(step_dir / "actor")
    info = look(step_dir, full=False)
    assert not info.complete
    assert "actor/" in info.problems[0]


def test_background_save_is_proven_by_the_tracker_alone(tmp_path: Path) -> None:
    """The seal was written while the model was not yet there."""
    folder = make_step(tmp_path, 7)
    write_seal(folder, use_critic=False, async_save=True)
    assert look(folder).complete
    (tmp_path / TRACKER_NAME).unlink()
    info = look(folder)
    assert not info.complete
    assert "background" in info.problems[0]


def test_plain_checkpoint_has_no_state(step_dir: Path) -> None:
    """A step of the plain trainer is told apart from a damaged one."""
    (step_dir / FILE_NAME).unlink()
    (step_dir / SEAL_NAME).unlink()
    info = look(step_dir)
    assert (info.has_state, info.selected, info.complete, info.trailer, info.seal) == (False, True, False, None, None)


def test_folder_of_another_name_is_no_step(step_dir: Path) -> None:
    """Asked for explicitly."""
    with pytest.raises(CheckpointNotFoundError, match=r"global_step_<N>"):
        inspect_step(step_dir.parent, None)


def test_listing_changes_nothing(step_dir: Path) -> None:
    """Names, sizes and times stay."""
    write(step_dir / ".agentlightning_input.pt.1.00000000.tmp")
    before = sorted((path, path.lstat().st_mtime_ns) for path in step_dir.rglob("*"))
    list_steps(step_dir.parent, full=True)
    assert sorted((path, path.lstat().st_mtime_ns) for path in step_dir.rglob("*")) == before
