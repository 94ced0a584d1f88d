"""A complete checkpoint at every instant, whatever VERL's retention counts; and no more models than the run keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.folder.steps import list_steps
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME, parse_step, step_name
from tests.rig import life as rig_life
from tests.rig.life import Death, build_trainer, close_trainer, quiet, run_life, stock_trainer
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.standins import WorkerGroup
from tests.yardstick.scene import (
    Interruption,
    Scene,
    alone,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)


def models(out_dir: Path, role: str = "actor") -> list[int]:
    """Steps whose model of a role is there."""
    return sorted(step for path in out_dir.glob(f"*/{role}") if (step := parse_step(path.parent)) is not None)


def complete(out_dir: Path) -> list[int]:
    """Steps that an exact resume is possible from."""
    return [info.step for info in list_steps(out_dir) if info.complete]


def saves_in_validation(base: type) -> type:
    """A trainer whose `_validate` saves the step, which the loop then saves again."""

    class SavesInValidation(base):
        def _validate(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._save_checkpoint()
            return super()._validate(*args, **kwargs)

    return SavesInValidation


@pytest.mark.parametrize(("keep", "point"), [(1, "pulled"), (2, "actor_saved"), (2, "save")])
def test_a_step_that_is_saved_twice_counts_once(keep: int, point: str, server: AglServer, tmp_path: Path) -> None:
    """Killed after the second save of step 2, and in the next step's save."""
    run = settings("12/2/4", max_ckpt_to_keep=keep, overrides=("trainer.test_freq=1",))
    scene = Scene(run, own_trainer=saves_in_validation)
    truth = alone(scene, server, tmp_path)
    account = interrupted(scene, server, tmp_path, Interruption(point, 3))
    assert account.lives[1].start == 2
    assert_resumed(truth, account)
    assert models(account.out_dir) == list(range(len(truth.steps) + 1 - keep, len(truth.steps) + 1))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_failed_counts_for_nothing(
    keep: int, server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 4 fails; `fit()` again on the same trainer object dies in that save."""
    run = settings("24/2/5", max_ckpt_to_keep=keep)
    truth = uninterrupted(run, server)
    ends: list[BaseException] = [OSError(5, "the disk is away"), Death("in the save of step 4")]
    recorder = rig_life.Recorder()
    with quiet():
        trainer = build_trainer(run, tmp_path, server.url, recorder=recorder)

        def saved(role: str, step: int) -> None:
            if step == 4:
                raise ends.pop(0)

        trainer.actor_rollout_wg.on_saved = saved
        for end in tuple(ends):
            with pytest.raises(type(end)):
                trainer.fit()
            assert 3 in complete(tmp_path)
        close_trainer(trainer)
    assert not ends
    first = rig_life.Life.from_events(recorder.events)
    second = run_life(run, tmp_path, server.url)
    assert second.start == 3
    assert_continues(truth, first, second)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("use_critic", [False, True])
def test_there_is_a_checkpoint_at_every_instant(keep: int, use_critic: bool, server: AglServer, tmp_path: Path) -> None:
    """As many complete ones as are kept; while one more is saved, as many models as by the trainer alone, or two."""
    run = settings("20/2/5", max_ckpt_to_keep=keep, use_critic=use_critic)

    def look(point: str, step: int) -> bool:
        if point == "saved":
            assert models(tmp_path) == complete(tmp_path) == list(range(max(1, step + 1 - keep), step + 1))
            assert not use_critic or models(tmp_path, "critic") == models(tmp_path)
        elif point != "loaded":
            beside = max(1, keep - 1) if point.endswith("_saved") else keep
            assert len(set(complete(tmp_path)) - {step}) == min(beside, step - 1)
            assert len(models(tmp_path)) <= max(2, keep), "no more room is needed than by the trainer alone"
        return False

    assert run_life(run, tmp_path, server.url, die_at=look).finished


def test_models_of_earlier_lives_go_as_well(server: AglServer, tmp_path: Path) -> None:
    """Three lives that keep two: with the trainer alone four models are left."""
    run = settings("24/2/5", max_ckpt_to_keep=2)
    for folder, trainer_cls, left in ((tmp_path / "alone", stock_trainer(), 6), (tmp_path / "ours", None, 2)):
        for step in (2, 4, 6):
            run_life(run, folder, server.url, trainer_cls=trainer_cls, stop_after_step=step)
        assert len(models(folder)) == left
    assert complete(tmp_path / "ours") == [5, 6]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.max_actor_ckpt_to_keep=0",),
        ("trainer.max_actor_ckpt_to_keep=-1",),
        ("trainer.max_actor_ckpt_to_keep=2.0",),
        ("trainer.max_actor_ckpt_to_keep=3",),
        ("trainer.max_critic_ckpt_to_keep=1",),
        ("trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=1"),
        ("trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=3"),
        ("trainer.max_actor_ckpt_to_keep=3", "+trainer.remove_previous_ckpt_in_save=true"),
        ("+trainer.remove_previous_ckpt_in_save=true",),
    ],
)
def test_numbers_mean_what_they_mean_to_the_trainer_alone(
    overrides: tuple[str, ...], server: AglServer, tmp_path: Path
) -> None:
    """The same models are left by the trainer alone, of actor and critic, and the settings are as they were."""
    overrides = tuple(name.lstrip("+") for name in overrides)
    run = settings("20/2/5", use_critic=True, overrides=overrides)
    left: list[tuple[list[int], list[int]]] = []
    for folder, trainer_cls in ((tmp_path / "alone", stock_trainer()), (tmp_path / "ours", None)):
        run_life(run, folder, server.url, trainer_cls=trainer_cls, stop_after_step=5)
        left.append((models(folder), models(folder, "critic")))
    assert left[0] == left[1]
    assert 5 in complete(tmp_path / "ours")
    assert run_life(run, tmp_path / "ours", server.url, stop_after_step=6).start == 5


def test_the_settings_are_put_back_after_each_save(server: AglServer, tmp_path: Path) -> None:
    """Also a key that was not there."""
    run = settings("20/2/5", overrides=("trainer.remove_previous_ckpt_in_save=true",))
    with quiet():
        trainer = build_trainer(run, tmp_path, server.url, die_at=lambda point, step: (point, step) == ("saved", 3))
        section = trainer.config.trainer
        before = dict(section)
        with pytest.raises(Death):
            trainer.fit()
        close_trainer(trainer)
    assert dict(section) == before


class NodeLocal(WorkerGroup):
    """Workers whose disk is another machine's: the driver sees no model."""

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Write below `node` instead of `out`."""
        super().save_checkpoint(local_path.replace("/out/", "/node/"), *args, **kwargs)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Read from there."""
        super().load_checkpoint(local_path.replace("/out/", "/node/"), *args, **kwargs)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_on_disks_of_other_machines_verl_goes_on_removing_models(
    keep: int, server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than the trainer alone has there at its peak, and always one whose save has finished."""
    monkeypatch.setattr(rig_life, "WorkerGroup", NodeLocal)
    out, node = tmp_path / "out", tmp_path / "node"
    scene_run = settings("20/2/5", max_ckpt_to_keep=keep, overrides=("trainer.test_freq=1",))

    def look(point: str, step: int) -> bool:
        assert len(models(node)) <= max(keep, 2)
        assert step == 1 or point == "loaded" or set(models(node)) & set(complete(out)) - {step}
        return False

    life = run_life(
        scene_run, out, server.url, trainer_cls=saves_in_validation(rig_life.extended_trainer()), die_at=look
    )
    assert life.finished
    assert not list(out.glob("global_step_*/actor"))
    assert run_life(scene_run, out, server.url).start == max(life.steps)


def test_a_model_that_is_saved_in_the_background_is_verls_to_remove(server: AglServer, tmp_path: Path) -> None:
    """As many as it keeps by itself; a step that is saved twice counts once."""
    run = settings("20/2/5", max_ckpt_to_keep=2, async_save=True, overrides=("trainer.test_freq=1",))
    trainer_cls = saves_in_validation(rig_life.extended_trainer())
    run_life(run, tmp_path, server.url, trainer_cls=trainer_cls, stop_after_step=4)
    assert models(tmp_path) == [3, 4]


def _link(out: Path, archive: Path) -> None:
    shutil.move(out / step_name(1), archive)
    (out / step_name(1)).symlink_to(archive)


def _link_of_the_model(out: Path, archive: Path) -> None:
    shutil.move(out / step_name(1) / "actor", archive)
    (out / step_name(1) / "actor").symlink_to(archive)


@pytest.mark.parametrize("move", [_link, _link_of_the_model])
def test_what_a_link_leads_to_stays(move: Callable[[Path, Path], None], server: AglServer, tmp_path: Path) -> None:
    """A step, or its model, that was moved to an archive."""
    run, out, archive = settings("20/2/5", max_ckpt_to_keep=1), tmp_path / "out", tmp_path / "archive"
    run_life(run, out, server.url, stop_after_step=1)
    move(out, archive)
    kept = sorted(path.name for path in archive.rglob("*"))
    run_life(run, out, server.url, stop_after_step=4)
    assert sorted(path.name for path in archive.rglob("*")) == kept
    assert complete(out) == [1, 4]


def test_folders_made_by_hand_stay(server: AglServer, tmp_path: Path) -> None:
    """A copy of a step under another name, files beside the models, a step that the extension did not save."""
    run = settings("20/2/5", max_ckpt_to_keep=1)
    run_life(run, tmp_path, server.url, stop_after_step=2)
    shutil.copytree(tmp_path / step_name(2), tmp_path / "global_step_2_best")
    (tmp_path / step_name(2) / "merged").mkdir()
    shutil.copytree(tmp_path / step_name(2) / "actor", tmp_path / step_name(0) / "actor")
    run_life(run, tmp_path, server.url, stop_after_step=4)
    assert (tmp_path / "global_step_2_best" / "actor").exists()
    assert (tmp_path / step_name(2) / "merged").exists()
    assert models(tmp_path) == [0, 4]


def test_the_step_that_is_resumed_from_by_its_path_stays(server: AglServer, tmp_path: Path) -> None:
    """The next start with the same settings begins there again."""
    run = settings("24/2/5", max_ckpt_to_keep=1)
    run_life(run, tmp_path, server.url, stop_after_step=2)
    named = settings(
        "24/2/5", max_ckpt_to_keep=1, resume_mode="resume_path", resume_from_path=f"{tmp_path}/global_step_2/"
    )
    for step in (5, 6):
        assert run_life(named, tmp_path, server.url, stop_after_step=step).start == 2
        assert models(tmp_path) == [2, step]
    run_life(run, tmp_path, server.url, stop_after_step=7)
    assert models(tmp_path) == [7]


def test_what_cannot_be_seen_is_not_removed(server: AglServer, tmp_path: Path) -> None:
    """A model that was moved away for the time of a save, and came back: the step is complete again."""
    run = settings("24/2/5", max_ckpt_to_keep=2)
    run_life(run, tmp_path, server.url, stop_after_step=3)
    model = tmp_path / step_name(3) / "actor"
    away = model.rename(tmp_path / "away")
    assert run_life(run, tmp_path, server.url, die_at=("saved", 3)).start == 2
    shutil.rmtree(model)
    away.rename(model)
    run_life(run, tmp_path, server.url, stop_after_step=4)
    model = tmp_path / step_name(3) / "actor"
    model.rename(tmp_path / "away")
    for step in (5, 6):
        run_life(run, tmp_path, server.url, stop_after_step=step)
    assert (tmp_path / step_name(3) / FILE_NAME).exists()
    assert (tmp_path / step_name(3) / SEAL_NAME).exists()
    (tmp_path / "away").rename(model)
    assert complete(tmp_path) == [3, 5, 6]


PASSING = [
    ".nfs0000000001",
    ".fuse_hidden0001",
    "model_world_size_1_rank_0.pt.uploading",
    ".cache/up/x.lock",
    "a.pt.part",
]


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("gone", ["while it saves", "later"])
def test_files_that_pass_through_a_model_folder_are_no_part_of_it(
    name: str, gone: str, server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An uploader's or a network file system's, with one checkpoint kept."""
    from agl_async_ckpt.folder import models as module

    run = settings("20/2/5", max_ckpt_to_keep=1)
    truth = uninterrupted(run, server)
    passing = tmp_path / step_name(2) / "actor" / name

    def put(point: str, step: int) -> bool:
        if (point, step) == ("actor_saved", 2):
            passing.parent.mkdir(parents=True, exist_ok=True)
            passing.write_text("passing")
        return (point, step) == ("saved", 2)

    if gone == "while it saves":
        sync_file = module.sync_file

        def sync_and_lose(path: Path) -> None:
            passing.unlink(missing_ok=True)
            sync_file(path)

        monkeypatch.setattr(module, "sync_file", sync_and_lose)
    first = run_life(run, tmp_path, server.url, die_at=put)
    assert first.died == "saved 2"
    passing.unlink(missing_ok=True)
    second = run_life(run, tmp_path, server.url)
    assert second.start == 2
    assert_continues(truth, first, second)


def test_a_file_that_vanishes_while_it_is_looked_at_is_no_error(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name: between the listing of the folder and the look at the file."""
    from agl_async_ckpt.folder import models as module

    run = settings("20/2/5", max_ckpt_to_keep=1)
    sync_file = module.sync_file

    def sync_and_lose(path: Path) -> None:
        (path.parent / "some_name").unlink(missing_ok=True)
        sync_file(path)

    def put(point: str, step: int) -> bool:
        if point == "actor_saved":
            (tmp_path / step_name(step) / "actor" / "some_name").write_text("passing")
        return (point, step) == ("saved", 3)

    monkeypatch.setattr(module, "sync_file", sync_and_lose)
    assert run_life(run, tmp_path, server.url, die_at=put).died == "saved 3"
    assert complete(tmp_path) == [3]


@pytest.mark.parametrize("use_critic", [False, True])
def test_a_run_with_an_hdfs_folder_trains_and_saves_from_scratch(
    use_critic: bool, server: AglServer, tmp_path: Path
) -> None:
    """VERL refuses to load with it; the local step folders hold the position, for a start without it."""
    run = settings("14/2/5", resume_mode="disable", use_critic=use_critic)
    scene = Scene(run).changed(overrides=("trainer.default_hdfs_dir=hdfs://x/y",))
    truth = alone(scene, server, tmp_path)
    account = extended(scene, server, tmp_path)
    assert_same(truth, account)
    assert complete(account.out_dir) == list(truth.steps)
    out = tmp_path / "resumed"
    first = run_life(scene.run, out, server.url, stop_after_step=2)
    second = run_life(settings("14/2/5", use_critic=use_critic), out, server.url)
    assert second.start == 2
    assert_continues(uninterrupted(settings("14/2/5", use_critic=use_critic), server), first, second)
