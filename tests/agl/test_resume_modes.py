"""Where a start resumes from, and what it makes of what lies there: the table of the resume order, and its edges."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    DamagedStateError,
    ForeignFormatError,
    MissingStateError,
    StateFormatError,
    StateMismatchError,
    StateWriteError,
    UnsupportedVersionError,
)
from agl_async_ckpt.storage.layout import LOCK_FILE_NAME
from tests.rig.agents import AgentTable
from tests.rig.life import run_life, stock_trainer
from tests.rig.record import Life, lineage, rows_pulled
from tests.rig.runs import TRACKER, assert_continues, rewind, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

FILE = "agentlightning_input.pt"
SEAL_NAME = "agentlightning_seal.json"


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> digest of every file below a folder, but for the lock, which names whoever asked last."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK_FILE_NAME
    }


def refused(run: RunSettings, out_dir: Path | str, server: AglServer, error: type[Exception], match: str) -> None:
    """The start raises before the first step, with nothing changed in the output folder and nothing enqueued."""
    before, enqueued = tree(Path(out_dir)), len(server.rollouts())
    with pytest.raises(error, match=match):
        run_life(run, out_dir, server.url)
    assert tree(Path(out_dir)) == before
    assert len(server.rollouts()) == enqueued


def by_path(run: RunSettings, path: Path | str) -> RunSettings:
    """The same run, resumed from an explicit path."""
    return replace(run, resume_mode="resume_path", resume_from_path=str(path))


# --- choosing the folder ------------------------------------------------------------------------------------------


def test_automatic_resume_follows_the_tracker(run: RunSettings, saved: tuple[Life, Path], server: AglServer) -> None:
    """The tracker selects the step, weights and inputs alike."""
    first, folder = saved
    second = run_life(run, folder, server.url)
    assert second.start == 3
    assert second.weights == {"actor": 3}
    assert_continues(uninterrupted(run, server), first, second)


def test_explicit_resume_goes_back_to_an_older_step(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """resume_path to step 1 of the same folder discards steps 2 and 3."""
    first, folder = saved
    second = run_life(by_path(run, folder / "global_step_1"), folder, server.url)
    assert second.start == 1
    assert_continues(uninterrupted(run, server), first, second)


def test_explicit_resume_into_another_folder_leaves_the_parent_alone(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, tmp_path: Path
) -> None:
    """A fork continues the stream in its own folder, under its own run id; the parent's folder stays as it is."""
    first, folder = saved
    before = tree(folder)
    second = run_life(by_path(run, folder / "global_step_2"), tmp_path / "fork", server.url)
    assert tree(folder) == before
    assert_continues(uninterrupted(run, server), first, second)
    parent, fork = (json.loads((path / "agentlightning_run.json").read_text()) for path in (folder, tmp_path / "fork"))
    assert fork["run_id"] != parent["run_id"]
    assert fork["parent_run_id"] == parent["run_id"]
    third = run_life(run, tmp_path / "fork", server.url)
    assert third.start == max(second.saves)
    assert third.steps == {}


@pytest.mark.parametrize("form", ["absolute", "relative", "slash", "dots", "relative slash"])
def test_explicit_path_may_have_any_form(
    run: RunSettings,
    saved: tuple[Life, Path],
    server: AglServer,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """Relative paths, a trailing slash and `..` name the same folder; VERL alone cannot read the slash."""
    first, folder = saved
    monkeypatch.chdir(folder.parent)
    path = {
        "absolute": f"{folder}/global_step_2",
        "relative": "run/global_step_2",
        "slash": f"{folder}/global_step_2/",
        "dots": f"{folder}/../run/global_step_2",
        "relative slash": "./run/global_step_2//",
    }[form]
    second = run_life(by_path(run, path), folder, server.url, stop_after_step=3)
    assert second.start == 2
    assert_continues(uninterrupted(run, server), first, second, until=3)


def test_relative_output_folder_resumes(
    run: RunSettings, server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trainer.default_local_dir may be relative, as in VERL's default."""
    monkeypatch.chdir(tmp_path)
    first = run_life(run, "checkpoints/run", server.url, stop_after_step=2)
    second = run_life(run, "checkpoints/run", server.url)
    assert second.start == 2
    assert_continues(uninterrupted(run, server), first, second)


def test_disabled_resume_starts_at_the_first_row(run: RunSettings, saved: tuple[Life, Path], server: AglServer) -> None:
    """resume_mode=disable ignores the checkpoints and writes over them as it reaches their steps."""
    _, folder = saved
    again = run_life(replace(run, resume_mode="disable"), folder, server.url)
    assert again.start == 0
    assert_continues(uninterrupted(run, server), again)


def test_start_without_a_checkpoint_begins(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """An output folder that does not exist yet, or is empty, is a new run, without a warning."""
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "not" / "there"):
        life = run_life(run, folder, server.url, stop_after_step=1)
        assert life.start == 0
        assert life.warnings == []


def test_death_before_the_first_save_starts_over(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """Nothing was saved, so nothing is to be resumed; the run id of the folder stays."""
    run_life(run, tmp_path, server.url, die_at=("trained", 1))
    run_id = (tmp_path / "agentlightning_run.json").read_text()
    second = run_life(run, tmp_path, server.url)
    assert second.start == 0
    assert json.loads((tmp_path / "agentlightning_run.json").read_text())["run_id"] == json.loads(run_id)["run_id"]
    assert_continues(uninterrupted(run, server), second)


@pytest.mark.parametrize("point", ["save", "actor_saved"])
def test_death_within_the_first_save_starts_over(
    run: RunSettings, server: AglServer, tmp_path: Path, point: str
) -> None:
    """The first save never finished, so no checkpoint is lost: the next start begins at the first row by itself."""
    run_life(run, tmp_path, server.url, die_at=(point, 1))
    second = run_life(run, tmp_path, server.url)
    assert second.start == 0
    assert_continues(uninterrupted(run, server), second)


@pytest.mark.parametrize("copied", [False, True])
def test_first_save_that_a_power_cut_left_in_part(
    run: RunSettings, server: AglServer, tmp_path: Path, copied: bool
) -> None:
    """The tracker can be on the disk and `data.pt` not; the missing seal tells. A copied folder may be a mere part."""
    out = tmp_path / "out"
    run_life(run, out, server.url, stop_after_step=1)
    (out / "global_step_1" / SEAL_NAME).unlink()
    data = out / "global_step_1" / "data.pt"
    data.write_bytes(data.read_bytes()[:100])
    if copied:
        shutil.copytree(out, tmp_path / "copy")
        refused(run, tmp_path / "copy", server, StateMismatchError, "global_step_1")
        return
    server.reset()
    second = run_life(run, out, server.url)
    assert second.start == 0
    assert any("never finished" in warning for warning in second.warnings)
    assert_continues(uninterrupted(run, server), second)


@pytest.mark.parametrize("path", ["", "global_step_9", "run", "run/global_step_3/actor", "run/global_step_x"])
def test_path_that_is_no_checkpoint_is_refused(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, path: str
) -> None:
    """The error says what a checkpoint folder looks like, and lists those nearby."""
    _, folder = saved
    target = str(folder.parent / path) if path else ""
    refused(by_path(run, target), folder, server, CheckpointNotFoundError, r"global_step_<N>")


@pytest.mark.parametrize("text", ["", "\0\0", "release", "9", "-1", "3.0", "2\n3"])
def test_tracker_that_cannot_be_followed_leads_to_the_newest_step(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, text: str
) -> None:
    """Never a silent start from scratch; a warning, the newest complete step, and a tracker that is right."""
    first, folder = saved
    (folder / TRACKER).write_text(text)
    second = run_life(run, folder, server.url, stop_after_step=4)
    assert second.start == 3
    assert any(TRACKER in warning for warning in second.warnings)
    assert_continues(uninterrupted(run, server), first, second, until=4)
    assert (folder / TRACKER).read_text() == "4"


def test_tracker_is_repaired_before_the_first_step(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """A death right after the load leaves a tracker that VERL itself can follow."""
    _, folder = saved
    (folder / TRACKER).unlink()
    run_life(run, folder, server.url, die_at=("loaded", 3))
    assert (folder / TRACKER).read_text() == "3"


# --- the table of the resume order --------------------------------------------------------------------------------


def test_checkpoint_of_the_plain_trainer_is_resumed_as_verl_does(server: AglServer, tmp_path: Path) -> None:
    """Steps 1 and 2 by the plain trainer: a warning says what is lost, VERL's behaviour, then exact again."""
    run = settings("24/2/5")
    first = run_life(run, tmp_path, server.url, trainer_cls=stock_trainer(), stop_after_step=2)
    plain = run_life(run, rewind(tmp_path, tmp_path / "plain", 2), server.url, trainer_cls=stock_trainer())
    second = run_life(run, tmp_path, server.url, stop_after_step=4)
    assert len(second.warnings) == 1
    assert "cannot be reconstructed" in second.warnings[0]
    assert [second.pulls[n] for n in (3, 4)] == [plain.pulls[n] for n in (3, 4)]
    third = run_life(run, tmp_path, server.url)
    assert third.warnings == []
    assert third.restored is not None
    assert third.restored.in_flight == second.saves[4].in_flight
    pulled = rows_pulled({n: step for n, step in lineage(first, second, third).items() if n > 2})
    assert pulled == rows_pulled({n: step for n, step in plain.steps.items() if n > 2})[: len(pulled)]


def test_missing_file_of_a_run_that_wrote_them_is_an_error(server: AglServer, tmp_path: Path) -> None:
    """Steps 1 and 2 by the plain trainer, 3 and 4 by ours: 2 resumes with a warning, 3 without its file never."""
    run = settings("24/2/5")
    run_life(run, tmp_path, server.url, trainer_cls=stock_trainer(), stop_after_step=2)
    run_life(run, tmp_path, server.url, stop_after_step=4)
    (tmp_path / "global_step_3" / FILE).unlink()
    refused(by_path(run, tmp_path / "global_step_3"), tmp_path, server, MissingStateError, "global_step_3")
    second = run_life(by_path(run, tmp_path / "global_step_2"), tmp_path, server.url, stop_after_step=3)
    assert second.start == 2
    assert any("cannot be reconstructed" in warning for warning in second.warnings)


def test_synchronous_checkpoints_are_byte_identical(server: AglServer, tmp_path: Path) -> None:
    """Synchronous training writes, and resumes from, the same files with and without the extension."""
    run = settings("12/4/0", async_mode=False, shuffle=True, epochs=3)
    lives: dict[str, list[Life]] = {}
    trees: list[dict[str, str]] = []
    for name, trainer in (("stock", stock_trainer()), ("ours", None)):
        folder = tmp_path / name
        lives[name] = [
            run_life(run, folder, server.url, trainer_cls=trainer, stop_after_step=2),
            run_life(run, folder, server.url, trainer_cls=trainer, stop_after_step=3),
            run_life(run, folder, server.url, trainer_cls=trainer),
        ]
        trees.append(tree(folder))
    assert trees[0] == trees[1]
    assert trees[0]
    assert [life.steps for life in lives["stock"]] == [life.steps for life in lives["ours"]]


def test_asynchronous_checkpoint_is_not_resumed_synchronously(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """Rows in the tail and in flight would be skipped: refused, with the counts."""
    first, folder = saved
    position = first.saves[3]
    assert position.in_flight
    refused(
        replace(run, async_mode=False),
        folder,
        server,
        StateMismatchError,
        rf"(?s)buffered inputs:\s+{len(position.buffered)}\n.*in flight:\s+{len(position.in_flight)}\n",
    )


def test_switched_off_extension_skips_and_says_so(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """enabled=false is the plain trainer, with a warning that counts what is skipped."""
    _, folder = saved
    off = replace(run, extension={"enabled": False})
    plain = run_life(run, rewind(folder, folder.parent / "plain", 3), server.url, trainer_cls=stock_trainer())
    second = run_life(off, folder, server.url)
    assert second.pulls == plain.pulls
    assert any("2 prompt groups in flight" in warning for warning in second.warnings)
    assert not (folder / f"global_step_{max(second.saves)}" / FILE).exists()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _foreign(path: Path) -> None:
    import torch

    path.unlink()
    torch.save({"buffer": [1, 2]}, path)


DAMAGES: dict[str, tuple[Callable[[Path], None], type[Exception]]] = {
    "truncated": (_truncate, DamagedStateError),
    "flipped": (_flip, DamagedStateError),
    "empty": (_empty, DamagedStateError),
    "directory": (_directory, AsyncCheckpointError),
    "foreign": (_foreign, ForeignFormatError),
}


@pytest.mark.parametrize("async_mode", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_by_path_in_any_mode(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, damage: str, async_mode: bool
) -> None:
    """Named explicitly, a file that cannot be used is one clear error with its path; nothing is changed."""
    _, folder = saved
    step_dir = folder / "global_step_3"
    function, error = DAMAGES[damage]
    function(step_dir / FILE)
    refused(replace(by_path(run, step_dir), async_mode=async_mode), folder, server, error, str(step_dir))


def test_unfinished_newest_step_gives_way_to_the_one_before(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """An automatic resume takes the newest step that is complete, and warns: a re-save that was killed looks so."""
    first, folder = saved
    (folder / "global_step_3" / SEAL_NAME).unlink()
    (folder / "global_step_3" / "data.pt").unlink()
    second = run_life(run, folder, server.url)
    assert second.start == 2
    assert any("global_step_3" in warning for warning in second.warnings)
    assert_continues(uninterrupted(run, server), first, second)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_step_is_an_error(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, damage: str
) -> None:
    """Damage is not what a crash leaves behind: refused, with the path and the newest complete step."""
    _, folder = saved
    function, error = DAMAGES[damage]
    function(folder / "global_step_3" / FILE)
    refused(run, folder, server, error, "(?s)global_step_3.* checkpoint: .*global_step_2; resume from it")


def test_no_complete_step_is_an_error_that_lists_each(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """Steps that exist and cannot be used never lead to a start from scratch."""
    _, folder = saved
    for step in (1, 2, 3):
        _truncate(folder / f"global_step_{step}" / FILE)
    refused(run, folder, server, StateMismatchError, r"(?s)global_step_1: .*global_step_2: .*global_step_3: ")


def test_file_of_another_step_is_refused(run: RunSettings, saved: tuple[Life, Path], server: AglServer) -> None:
    """A file copied in from another step would pair inputs with foreign weights."""
    _, folder = saved
    shutil.copy(folder / "global_step_2" / FILE, folder / "global_step_3" / FILE)
    refused(by_path(run, folder / "global_step_3"), folder, server, AsyncCheckpointError, "global_step_3")


def test_file_of_a_newer_version_is_refused(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both format versions."""
    from agl_async_ckpt.storage import commit, trailer

    state = commit.load_state(saved[1] / "global_step_3")
    modules = [module for module in (trailer, commit) if hasattr(module, "FORMAT_VERSION")]
    assert modules
    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "FORMAT_VERSION", 99)
        commit.commit_state(state, saved[1] / "global_step_3")
    refused(by_path(run, saved[1] / "global_step_3"), saved[1], server, UnsupportedVersionError, r"(?s)99")


def test_reset_keeps_the_generators(run: RunSettings, saved: tuple[Life, Path], server: AglServer) -> None:
    """on_mismatch=reset drops the position, not the driver's generators: they are put back with step and weights."""
    from agl_async_ckpt.storage.commit import load_state

    states: list[Any] = []

    def at_first_pull(point: str, step: int) -> bool:
        if point == "pulled":
            states.append(random.getstate())
        return point == "pulled"

    kept = load_state(saved[1] / "global_step_3").rng_state
    assert kept is not None
    random.seed(99)
    run_life(replace(run, seed=9, extension={"on_mismatch": "reset"}), saved[1], server.url, die_at=at_first_pull)
    assert states == [kept.python]


# --- saves --------------------------------------------------------------------------------------------------------


def test_c28_step_numbers_agree_everywhere(run: RunSettings, saved: tuple[Life, Path], server: AglServer) -> None:
    """The step in the file is that of its folder and of the tracker; the first resumed step is the next."""
    from agl_async_ckpt.storage.commit import load_state

    _, folder = saved
    assert (folder / TRACKER).read_text() == "3"
    assert load_state(folder / "global_step_3").global_step == 3
    assert list(run_life(run, folder, server.url, stop_after_step=4).steps) == [4]


def test_file_loads_with_weights_only(saved: tuple[Life, Path]) -> None:
    """Anybody can look into it with plain torch."""
    import torch

    content = torch.load(saved[1] / "global_step_3" / FILE, weights_only=True)
    assert "loader_state" in content


def test_state_in_the_file_is_the_trainers_position(saved: tuple[Life, Path]) -> None:
    """Epoch, tail and groups in flight, in their order, as the trainer held them at the save."""
    from agl_async_ckpt.storage.commit import load_state

    life, folder = saved
    for step in (1, 2, 3):
        state = load_state(folder / f"global_step_{step}")
        position = life.saves[step]
        assert state.epoch == position.epoch
        assert [group.rollouts[0].enqueued["input"]["index"] for group in state.carry_over] == list(position.in_flight)
        buffered = [] if state.buffered_batch is None else list(state.buffered_batch["index"])
        assert buffered == list(position.buffered)


def test_failed_write_keeps_the_previous_checkpoint(
    run: RunSettings, saved: tuple[Life, Path], server: AglServer
) -> None:
    """A step folder that cannot be written stops the save before VERL starts; step 3 stays selected and exact."""
    first, folder = saved
    (folder / "global_step_4").write_text("in the way")
    with pytest.raises(StateWriteError, match="global_step_4"):
        run_life(run, folder, server.url)
    assert (folder / TRACKER).read_text() == "3"
    (folder / "global_step_4").unlink()
    server.agents = AgentTable()
    second = run_life(run, folder, server.url)
    assert second.start == 3
    assert_continues(uninterrupted(run, server), first, second)


def test_retention_keeps_the_newest_resumable(server: AglServer, tmp_path: Path) -> None:
    """With one model kept, every death after a save resumes from that save."""
    run = settings("24/2/5", max_ckpt_to_keep=1, use_critic=True)
    truth = uninterrupted(run, server)
    lives = [run_life(run, tmp_path, server.url, stop_after_step=step) for step in (2, 4, 5)]
    lives.append(run_life(run, tmp_path, server.url))
    assert [life.start for life in lives] == [0, 2, 4, 5]
    assert_continues(truth, *lives)


def test_c30_async_save_without_a_tracker_is_never_resumed_silently(server: AglServer, tmp_path: Path) -> None:
    """Async_save on a backend that never writes the tracker: our file is there, and the next start is refused."""
    run = settings("24/2/5", async_save=True)
    run_life(run, tmp_path, server.url, stop_after_step=3)
    assert not (tmp_path / TRACKER).exists()
    assert (tmp_path / "global_step_3" / FILE).exists()
    refused(run, tmp_path, server, StateMismatchError, r"(?s)global_step_3: .*tracker")


def test_c30_async_save_resumes_once_the_tracker_came(server: AglServer, tmp_path: Path) -> None:
    """With the tracker written later, as Megatron's callback does, the resume is exact."""
    run = settings("24/2/5", async_save=True)
    first = run_life(run, tmp_path, server.url, stop_after_step=3)
    (tmp_path / TRACKER).write_text("3")
    second = run_life(run, tmp_path, server.url)
    assert second.start == 3
    assert_continues(uninterrupted(run, server), first, second)


def test_c31_hdfs_folder_is_refused_by_verl(run: RunSettings, server: AglServer, tmp_path: Path) -> None:
    """VERL cannot load from HDFS, and says so before the first step; the extension leaves that as it is."""
    hdfs = replace(run, overrides=("trainer.default_hdfs_dir=hdfs://x/y",))
    with pytest.raises(NotImplementedError, match="hdfs"):
        run_life(hdfs, tmp_path, server.url)


def test_errors_are_what_a_caller_would_catch() -> None:
    """A user who knows only builtins catches them all."""
    assert issubclass(StateFormatError, ValueError)
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
