"""The seal says whether what a finished save held is still there."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    DamagedStateError,
    StateWriteError,
    UnsupportedVersionError,
)
from agl_async_ckpt.folder import seal
from agl_async_ckpt.folder.models import is_model_file
from agl_async_ckpt.folder.seal import read_seal, seal_problems, write_seal
from agl_async_ckpt.storage import files
from agl_async_ckpt.storage.container import read_trailer, verify
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, TRACKER_NAME
from tests.folder.made import make_step
from tests.storage.made import archive, write


@pytest.fixture
def step_dir(tmp_path: Path) -> Path:
    """A finished save of step 7 with actor and critic, sealed."""
    folder = make_step(tmp_path / "out", 7)
    write_seal(folder, use_critic=True, async_save=False)
    return folder


def edit(step_dir: Path, **changes: Any) -> None:
    values = json.loads((step_dir / SEAL_NAME).read_text())
    (step_dir / SEAL_NAME).write_text(json.dumps({**values, **changes}))


def check_seal(step_dir: Path, *, hashes: bool = True) -> list[str]:
    """Compare a step with its seal."""
    try:
        found = read_seal(step_dir)
        trailer = (verify if hashes else read_trailer)(step_dir / FILE_NAME)
    except AsyncCheckpointError as error:
        return [str(error)]
    return seal_problems(found, step_dir, trailer, hashes=hashes)


def test_sealed_step_has_no_problems(step_dir: Path) -> None:
    """By both modes, and after the output folder was moved."""
    assert check_seal(step_dir) == []
    assert check_seal(step_dir, hashes=False) == []
    moved = step_dir.parent.rename(step_dir.parent.parent / "moved")
    assert check_seal(moved / "global_step_7") == []


def test_seal_states_what_was_saved(step_dir: Path) -> None:
    """Sizes, digests and model files, by relative name."""
    found = read_seal(step_dir)
    assert (found.global_step, found.run_id, found.use_critic, found.async_save) == (7, "run-1", True, False)
    assert found.state_bytes == (step_dir / FILE_NAME).stat().st_size
    assert found.loader_bytes == (step_dir / "data.pt").stat().st_size
    assert found.model_files == {
        "actor/huggingface/config.json": 29,
        "actor/model_0.pt": 16,
        "critic/model_0.pt": 17,
    }
    values = json.loads((step_dir / SEAL_NAME).read_text())
    assert (values["format"], values["format_version"]) == ("agl-async-ckpt seal", 1)


def test_missing_seal_is_a_save_that_did_not_finish(step_dir: Path) -> None:
    """Said in words."""
    (step_dir / SEAL_NAME).unlink()
    assert "did not finish" in check_seal(step_dir)[0]
    with pytest.raises(CheckpointNotFoundError):
        read_seal(step_dir)


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [(FILE_NAME, FILE_NAME), ("data.pt", "data.pt"), ("actor/model_0.pt", "actor/"), ("critic/model_0.pt", "critic/")],
)
def test_lost_or_shortened_file_is_named(step_dir: Path, name: str, text: str, hashes: bool) -> None:
    """Gone, emptied, truncated, or a folder now; the other files are not blamed."""
    path = step_dir / name
    data = path.read_bytes()
    for change in (path.unlink, lambda: path.write_bytes(b""), lambda: path.write_bytes(data[:-3]), path.mkdir):
        if change == path.mkdir:
            path.unlink()
        change()
        problems = check_seal(step_dir, hashes=hashes)
        assert len(problems) == 1
        assert text in problems[0]


def test_altered_content_of_the_same_size_is_seen_by_hashing(step_dir: Path) -> None:
    """data.pt and the input state; the cheap mode looks at sizes only."""
    path = step_dir / "data.pt"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert check_seal(step_dir, hashes=False) == []
    assert "altered" in check_seal(step_dir)[0]


def test_input_state_of_another_save_breaks_the_seal(step_dir: Path) -> None:
    """Whole, of the same step, but not the one that was sealed."""
    size = (step_dir / FILE_NAME).stat().st_size
    write(step_dir / FILE_NAME, archive(b"y" * 300))
    assert (step_dir / FILE_NAME).stat().st_size == size
    for hashes in (True, False):
        assert "not the file that was sealed" in check_seal(step_dir, hashes=hashes)[0]


def test_pruned_model_breaks_the_seal(step_dir: Path) -> None:
    """Retention removes actor/ and critic/ and leaves the rest."""
    shutil.rmtree(step_dir / "actor")
    shutil.rmtree(step_dir / "critic")
    problems = check_seal(step_dir, hashes=False)
    assert [problem.split(" files")[0] for problem in problems] == ["2 of 2", "1 of 1"]
    assert all("retention" in problem for problem in problems)


def test_files_added_later_do_not_break_the_seal(step_dir: Path) -> None:
    """A user may keep notes or a merged model beside it."""
    (step_dir / "actor" / "merged.safetensors").write_text("more")
    (step_dir / "notes.txt").write_text("more")
    assert check_seal(step_dir) == []


def test_model_that_the_driver_cannot_see_says_nothing(tmp_path: Path) -> None:
    """On node-local disks the driver sees no model: the rest is sealed."""
    folder = make_step(tmp_path, 7)
    shutil.rmtree(folder / "actor")
    shutil.rmtree(folder / "critic")
    write_seal(folder, use_critic=True, async_save=False)
    assert read_seal(folder).model_files == {}
    assert check_seal(folder) == []


def test_background_save_seals_no_model(tmp_path: Path) -> None:
    """With async_save the model files are still growing."""
    folder = make_step(tmp_path, 7)
    write_seal(folder, use_critic=False, async_save=True)
    (folder / "actor/model_0.pt").write_text("the whole model, later")
    assert read_seal(folder).async_save
    assert check_seal(folder) == []


def test_seal_copied_from_another_step_is_refused(tmp_path: Path) -> None:
    """Step and digest tell."""
    first, second = make_step(tmp_path, 7), make_step(tmp_path, 8)
    write_seal(first, use_critic=True, async_save=False)
    shutil.copy(first / SEAL_NAME, second / SEAL_NAME)
    assert f"{SEAL_NAME} is of step 7" in check_seal(second)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0" * 100, b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000),
        *(b'{"format": "agl-async-ckpt seal"}', b'{"format": "other", "format_version": 1}'),
        b'{"format": "agl-async-ckpt seal", "format_version": true}',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_unreadable_seal_is_one_problem(step_dir: Path, data: bytes) -> None:
    """Never an exception of the parser."""
    (step_dir / SEAL_NAME).write_bytes(data)
    problems = check_seal(step_dir)
    assert len(problems) == 1
    assert "cannot be read" in problems[0]
    with pytest.raises(DamagedStateError):
        read_seal(step_dir)


@pytest.mark.parametrize(
    "changes",
    [
        *({"global_step": "7"}, {"global_step": True}, {"run_id": 1}, {"use_critic": 1}, {"async_save": None}),
        *({"loader_bytes": 1.0}, {"state_sha256": None}, {"model_files": []}, {"model_files": {"actor/x": "1"}}),
        *({"model_files": {"../../etc/passwd": 1}}, {"model_files": {"/etc/passwd": 1}}),
    ],
    ids=repr,
)
def test_seal_with_a_wrong_field_cannot_be_read(step_dir: Path, changes: dict[str, Any]) -> None:
    """Types are exact, and model files stay inside the step."""
    edit(step_dir, **changes)
    assert "cannot be read" in check_seal(step_dir)[0]


def test_seal_of_a_newer_version_is_refused_and_extra_fields_are_ignored(step_dir: Path) -> None:
    """As with the input state."""
    edit(step_dir, novelty=[1])
    assert check_seal(step_dir) == []
    edit(step_dir, format_version=2)
    with pytest.raises(UnsupportedVersionError, match=r"version 2.*version 1"):
        read_seal(step_dir)
    assert "version 2" in check_seal(step_dir)[0]


def test_seal_folder_and_oversize_are_problems(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded, and a folder of that name is no seal."""
    monkeypatch.setattr(seal, "_MAX_SEAL_BYTES", 50)
    assert "longer than 50 bytes" in check_seal(step_dir)[0]
    (step_dir / SEAL_NAME).unlink()
    (step_dir / SEAL_NAME).mkdir()
    assert "cannot be read" in check_seal(step_dir)[0]


@pytest.mark.parametrize("missing", [FILE_NAME, "data.pt"])
def test_step_without_its_files_is_not_sealed(step_dir: Path, missing: str) -> None:
    """A seal over nothing would prove nothing; the old seal is not the new one's business."""
    (step_dir / SEAL_NAME).unlink()
    (step_dir / missing).unlink()
    with pytest.raises(StateWriteError, match=SEAL_NAME):
        write_seal(step_dir, use_critic=False, async_save=False)
    assert not (step_dir / SEAL_NAME).exists()


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_seal_that_could_not_be_written_leaves_no_trace(
    step_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Atomic like the input state."""
    (step_dir / SEAL_NAME).unlink()

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, name, fail)
        with pytest.raises(StateWriteError, match="No space") as caught:
            write_seal(step_dir, use_critic=False, async_save=False)
    assert caught.value.errno == errno.ENOSPC
    assert not [path for path in step_dir.iterdir() if "seal" in path.name]


@pytest.mark.parametrize("async_save", [False, True])
def test_seal_syncs_what_verl_did_not(step_dir: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool) -> None:
    """Models and their folders, data.pt, tracker and output folder before the seal; the step folder after it.

    Models that are still being written are left alone.
    """
    log: list[str] = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        log.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(files.os, "fsync", spy)
    write_seal(step_dir, use_critic=True, async_save=async_save)
    log[-2] = "temp" if SEAL_NAME in log[-2] else log[-2]
    models = ["model_0.pt", "actor", "config.json", "huggingface", "model_0.pt", "critic", "global_step_7"]
    assert log == [*([] if async_save else models), "data.pt", TRACKER_NAME, "out", "temp", "global_step_7"]


def test_loader_state_that_is_not_whole_is_not_sealed(step_dir: Path) -> None:
    """torch overlooks an error of its last write; a seal over a torn data.pt would prove nothing."""
    (step_dir / SEAL_NAME).unlink()
    data = (step_dir / "data.pt").read_bytes()
    (step_dir / "data.pt").write_bytes(data[:-10])
    with pytest.raises(StateWriteError, match=r"data\.pt is not whole"):
        write_seal(step_dir, use_critic=False, async_save=False)
    assert not (step_dir / SEAL_NAME).exists()


def test_model_that_cannot_be_listed_is_not_sealed(step_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal without the model files would take any model for the right one."""
    (step_dir / SEAL_NAME).unlink()
    scandir = os.scandir

    def fail(path: Any) -> Any:
        if str(path).endswith("actor"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StateWriteError, match="Input/output"):
        write_seal(step_dir, use_critic=False, async_save=False)
    assert not (step_dir / SEAL_NAME).exists()


@pytest.mark.parametrize(
    "name",
    [
        "actor/model_world_size_8_rank_0.pt",
        "actor/lora_train_meta.json",
        "actor/huggingface/model-00001-of-00002.safetensors",
        "actor/huggingface/custom.py",
        "critic/dist_ckpt/__0_0.distcp",
        "critic/dist_ckpt/.metadata",
        "actor/weights.part1",
        "actor/temp",
    ],
)
def test_file_of_a_backend_is_a_model_file(name: str) -> None:
    """What FSDP, Megatron, torch's distributed checkpoints and a huggingface export write."""
    assert is_model_file(name)


@pytest.mark.parametrize(
    "name",
    [
        "actor/.nfs000000000345",
        "actor/.fuse_hidden00000a",
        "actor/model.pt.uploading",
        "actor/.cache/huggingface/upload/x.lock",
        "actor/huggingface/__pycache__/custom.pyc",
        "critic/dist_ckpt/.metadata.tmp",
        "actor/model.pt.tmp.1f2e-33",
        "actor/notes~",
    ],
)
def test_passing_file_is_no_model_file(name: str) -> None:
    """Neither in the seal, nor where an older seal lists it."""
    assert not is_model_file(name)
