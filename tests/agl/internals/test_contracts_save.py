"""Contract: where in its save VERL asks the training loader for its state, which is where the models are synced."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_async_ckpt.agl import internals
from agl_async_ckpt.storage.layout import LOADER_FILE_NAME, TRACKER_NAME
from tests.rig.life import Death, build_trainer, close_trainer, quiet, stock_trainer
from tests.rig.runs import settings, verl_version
from tests.rig.standins import WorkerGroup


@pytest.mark.parametrize("use_critic", [False, True])
def test_verl_takes_the_loader_state_between_models_and_tracker(tmp_path: Path, use_critic: bool) -> None:
    """Models are written, data.pt and tracker are not; the loader's own method shows again afterwards."""
    run = settings("14/2/5", use_critic=use_critic)
    seen: list[tuple[list[str], bool, bool]] = []
    with quiet():
        trainer = build_trainer(run, tmp_path, "http://127.0.0.1:9", trainer_cls=stock_trainer())
        trainer.global_steps = 1
        step_dir = internals.step_folder(trainer)

        def look() -> None:
            models = sorted(path.name for path in step_dir.iterdir() if any(path.iterdir()))
            seen.append((models, (step_dir / LOADER_FILE_NAME).exists(), (tmp_path / TRACKER_NAME).exists()))

        with internals.once_models_are_written(trainer, look):
            trainer._save_checkpoint()
        trainer.train_dataloader.state_dict()
        close_trainer(trainer)
    models = ["actor", "critic"] if use_critic else ["actor"]
    assert seen == [(models, False, False)], f"VERL {verl_version()} saves in another order"
    assert (step_dir / LOADER_FILE_NAME).exists()
    assert (tmp_path / TRACKER_NAME).read_text() == "1"


def test_error_at_that_place_keeps_the_step_unnamed(tmp_path: Path) -> None:
    """A model that cannot be synced ends the save before VERL's tracker names the step."""
    with quiet():
        trainer = build_trainer(settings("14/2/5"), tmp_path, "http://127.0.0.1:9", trainer_cls=stock_trainer())
        trainer.global_steps = 1

        def fail() -> None:
            raise Death

        with pytest.raises(Death), internals.once_models_are_written(trainer, fail):
            trainer._save_checkpoint()
        close_trainer(trainer)
    assert not (tmp_path / TRACKER_NAME).exists()
    assert "state_dict" not in vars(trainer.train_dataloader)


@pytest.mark.parametrize("number", [2, 3])
def test_verl_keeps_the_newest_entries_of_its_own_list(tmp_path: Path, number: int) -> None:
    """By the number of each save; no number and 0 remove nothing, and count what follows all the same."""
    group = WorkerGroup("actor")
    for step, keep in enumerate((None, 0, -1, None), start=1):
        group.save_checkpoint(str(tmp_path / str(step)), None, step, max_ckpt_to_keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4"], f"VERL {verl_version()}"
    group.save_checkpoint(str(tmp_path / "5"), None, 5, max_ckpt_to_keep=number)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["3", "4", "5"][-number:], (
        f"VERL {verl_version()} counts its saves in another way (agl/internals/saved_models.py)"
    )
