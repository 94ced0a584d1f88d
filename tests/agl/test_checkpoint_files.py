"""Lives on checkpoint folders as users report them: parts gone or cut, copied, linked, under another umask."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import DamagedStateError, StateWriteError
from agl_async_ckpt.storage.layout import FILE_NAME, LOADER_FILE_NAME, RUN_FILE_NAME, SEAL_NAME
from tests.rig.life import run_life
from tests.rig.record import Life
from tests.rig.runs import TRACKER, assert_continues, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings


def resumes(run: RunSettings, first: Life, folder: Path, server: AglServer, start: int) -> Life:
    """The next life starts from `start` and continues the stream to its end."""
    second = run_life(run, folder, server.url, stop_after_step=start + 1, pull_until=6)
    assert second.start == start
    assert second.weights == {"actor": start}
    assert_continues(uninterrupted(run, server), first, second)
    return second


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


LOADER_DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "truncated": _cut,
    "empty": _empty,
}


@pytest.mark.parametrize("damage", LOADER_DAMAGES)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_c22_step_without_a_whole_data_pt_is_never_resumed_from_row_0(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, damage: str, sealed: bool
) -> None:
    """With our file whole: by path refused as incomplete; an automatic resume takes the step before, and says so."""
    first, folder = saved
    step_dir = folder / "global_step_3"
    if not sealed:
        (step_dir / SEAL_NAME).unlink()
    LOADER_DAMAGES[damage](step_dir / LOADER_FILE_NAME)
    with pytest.raises(DamagedStateError, match=r"(?s)incomplete.*data\.pt"):
        run_life(replace(run, resume_mode="resume_path", resume_from_path=str(step_dir)), folder, server.url)
    second = resumes(run, first, folder, server, 2)
    assert any(LOADER_FILE_NAME in warning and "global_step_2" in warning for warning in second.warnings)


def test_c22_data_pt_that_was_altered_after_the_seal_is_refused(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """No crash leaves that, as the seal comes after the sync: an error that names the step before."""
    path = saved[1] / "global_step_3" / LOADER_FILE_NAME
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedStateError, match=r"(?s)altered after it was sealed.*global_step_2"):
        run_life(run, saved[1], server.url)


def test_c24_tracker_beyond_the_only_step_leads_to_that_step(
    run: RunSettings, server: AglServer, tmp_path: Path
) -> None:
    """The tracker says 9, only global_step_1 is there: no silent start from scratch."""
    first = run_life(run, tmp_path, server.url, stop_after_step=1)
    (tmp_path / TRACKER).write_text("9")
    second = resumes(run, first, tmp_path, server, 1)
    assert any("names step 9, which does not exist" in warning for warning in second.warnings)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_c25_files_have_the_mode_of_data_pt(run: RunSettings, server: AglServer, tmp_path: Path, mask: int) -> None:
    """Whoever may read VERL's files may read ours."""
    before = os.umask(mask)
    try:
        run_life(run, tmp_path, server.url, stop_after_step=1)
    finally:
        os.umask(before)
    step_dir = tmp_path / "global_step_1"
    paths = (step_dir / FILE_NAME, step_dir / SEAL_NAME, step_dir / LOADER_FILE_NAME, tmp_path / RUN_FILE_NAME)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o666 & ~mask}


def test_c25_linked_output_and_step_folders_stay_links(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """An output folder and a step folder that lead to another disk are followed, in saves and in resumes."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "step").mkdir()
    out_dir = tmp_path / "run"
    out_dir.symlink_to(tmp_path / "disk")

    def link_next(point: str, step: int) -> bool:
        if (point, step) == ("pulled", 2):
            (out_dir / "global_step_2").symlink_to(tmp_path / "disk" / "step")
        return (point, step) == ("saved", 2)

    first = run_life(run, out_dir, server.url, die_at=link_next)
    assert (tmp_path / "disk" / "step" / FILE_NAME).is_file()
    server.reset()
    resumes(run, first, out_dir, server, 2)
    assert out_dir.is_symlink()
    assert (out_dir / "global_step_2").is_symlink()


@pytest.mark.parametrize("tracker", ["kept", "missing", "of the source's last step"])
def test_copied_folder_resumes(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, tmp_path: Path, tracker: str
) -> None:
    """A checkpoint folder that was copied elsewhere resumes, with its tracker, without, and with one that misleads."""
    first, folder = saved
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(folder, copy)
    if tracker == "missing":
        (copy / TRACKER).unlink()
    if tracker == "of the source's last step":
        (copy / TRACKER).write_text("6")
    second = resumes(run, first, copy, server, 3)
    assert bool(second.warnings) == (tracker != "kept")
    assert (copy / TRACKER).read_text() == "4"


def test_single_step_that_was_copied_into_an_empty_folder_resumes(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, tmp_path: Path
) -> None:
    """Nothing but global_step_2: its seal proves it, and the folder becomes a run of its own."""
    first, folder = saved
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder / "global_step_2", copy / "global_step_2")
    second = resumes(run, first, copy, server, 2)
    assert any(TRACKER in warning for warning in second.warnings)
    assert (copy / RUN_FILE_NAME).read_text() != (folder / RUN_FILE_NAME).read_text()


def test_what_another_user_left_in_the_folder_ends_no_training(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old step and a leftover that this user may neither look into nor remove: warnings at most, and exact."""
    first, folder = saved
    foreign, leftover = folder / "global_step_1", folder / f".{FILE_NAME}.1.0123abcd.tmp"
    leftover.touch()

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("iterdir", "exists", "unlink"):
        real = getattr(Path, name)

        def guarded(path: Path, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            is_foreign = foreign in (path, path.parent) or path == leftover
            return (refused if is_foreign else real)(path, *args, **kwargs)

        monkeypatch.setattr(Path, name, guarded)
    second = resumes(replace(run, max_ckpt_to_keep=1), first, folder, server, 3)
    assert any(f"{leftover}, left behind" in text and "cannot be removed" in text for text in second.warnings)
    assert any(f"{foreign} cannot be cleaned up: Permission denied" in text for text in second.warnings)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("n" * 300, "File name too long"), ("link", "a link that leads nowhere"), ("file/run", "Not a")],
)
def test_output_folder_that_cannot_be_is_refused_by_name(
    run: RunSettings, server: AglServer, tmp_path: Path, name: str, reason: str
) -> None:
    """Before anything is trained, with the reason and what to do."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(StateWriteError, match=rf"(?s){name} cannot be written \({reason}.*trainer.default_local_dir"):
        run_life(run, tmp_path / name, server.url)
