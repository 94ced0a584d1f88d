"""What the extension relies on in VERL's trainer, its config, and torchdata's loader state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.main_ppo import create_rl_sampler
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from agl_async_ckpt.agl import internals
from agl_async_ckpt.codec.loader_state import pass_has_ended, rows_yielded
from agl_async_ckpt.exceptions import ActivationError, StateMismatchError
from agl_async_ckpt.storage import layout
from tests.contract import broken
from tests.rig.bare import bare_trainer
from tests.rig.settings import RunSettings, compose_config

NUM_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def verl(what: str, used_in: str) -> str:
    return broken("verl", what, used_in=used_in)


def torchdata(what: str) -> str:
    return broken("torchdata", what, used_in="agl/internals/loader.py")


# --- config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "trainer.total_epochs",
        "trainer.val_only",
        "trainer.esi_redundant_time",
        "data.train_batch_size",
        "data.shuffle",
        "data.seed",
        "actor_rollout_ref.rollout.n",
        "ray_kwargs.ray_init",
        "agentlightning.async_rollout.enabled",
        "agentlightning.async_rollout.async_train_batch_size",
    ],
)
def test_config_has_the_keys_that_are_read(key: str, tmp_path: Path) -> None:
    """In the composed default config; what is read with a default is not listed."""
    config = compose_config(RunSettings(n=4, B=1, A=2), tmp_path, "http://127.0.0.1:1")
    parent, _, name = key.rpartition(".")
    assert name in OmegaConf.select(config, parent), verl(f"the config has {key}", "agl/internals/trainer.py")


# --- save and load ------------------------------------------------------------------------------------------------


class WorkerGroup:
    """Stands for the workers that write and read a model."""

    def __init__(self, name: str, output_dir: Path, notes: list[Any]) -> None:
        self._name, self._output_dir, self._notes = name, output_dir, notes

    def _note(self, what: str, path: str) -> None:
        published = (self._output_dir / layout.TRACKER_NAME).exists()
        self._notes.append((what, Path(path).relative_to(self._output_dir).as_posix(), published))

    def save_checkpoint(self, local_path: str, remote_path: Any, global_step: int, max_ckpt_to_keep: Any) -> None:
        self._note("save", local_path)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        self._note("load", local_path)


def verl_trainer(tmp_path: Path, **trainer_settings: Any) -> Any:
    """VERL's trainer with its real save and load, and with nothing else."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(tmp_path),
                "default_hdfs_dir": None,
                "resume_mode": "auto",
                "resume_from_path": None,
                "del_local_ckpt_after_load": False,
                **trainer_settings,
            },
            "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}},
        }
    )
    trainer.notes = []
    trainer.actor_rollout_wg = WorkerGroup("actor", tmp_path, trainer.notes)
    trainer.critic_wg = WorkerGroup("critic", tmp_path, trainer.notes)
    trainer.use_critic = True
    trainer.global_steps = 0
    trainer.train_dataloader = StatefulDataLoader(list(range(6)), batch_size=2)
    return trainer


def saved(tmp_path: Path, step: int = 3) -> Path:
    trainer = verl_trainer(tmp_path)
    trainer.global_steps = step
    trainer._save_checkpoint()
    return tmp_path / layout.step_name(step)


def test_save_publishes_after_the_models(tmp_path: Path) -> None:
    """Names on disk, and the tracker as the last thing written."""
    trainer = verl_trainer(tmp_path)
    trainer.global_steps = 3
    trainer._save_checkpoint()
    assert trainer.notes == [("save", f"global_step_3/{name}", False) for name in layout.MODEL_FOLDERS], verl(
        "models are saved to actor/ and critic/ before the tracker is written", "storage/layout.py"
    )
    folder = internals.step_folder(trainer)
    assert folder == tmp_path / "global_step_3"
    assert (folder / layout.LOADER_FILE_NAME).exists(), verl("the loader state is data.pt", "storage/layout.py")
    assert (tmp_path / layout.TRACKER_NAME).read_text() == "3", verl(
        "the tracker holds the bare step", "folder/steps.py"
    )


def test_asynchronous_save_does_not_write_the_tracker(tmp_path: Path) -> None:
    """It comes with a later callback, and only then the step counts as saved."""
    trainer = verl_trainer(tmp_path)
    trainer.config.actor_rollout_ref.actor.checkpoint.async_save = True
    assert internals.saves_asynchronously(trainer)
    trainer.global_steps = 3
    trainer._save_checkpoint()
    assert not (tmp_path / layout.TRACKER_NAME).exists(), verl("async_save leaves the tracker alone", "folder/seal.py")


def test_load_follows_the_tracker(tmp_path: Path) -> None:
    """`auto` takes the step that the tracker names, sets the step number and loads both models."""
    saved(tmp_path)
    trainer = verl_trainer(tmp_path)
    trainer._load_checkpoint()
    assert trainer.global_steps == 3
    assert [note[:2] for note in trainer.notes] == [("load", f"global_step_3/{name}") for name in layout.MODEL_FOLDERS]


def test_load_takes_an_explicit_absolute_path(tmp_path: Path) -> None:
    """How the chosen folder is handed to VERL, whatever the tracker says."""
    folder = saved(tmp_path)
    saved(tmp_path, step=4)
    trainer = verl_trainer(tmp_path, resume_mode="resume_path", resume_from_path=str(folder))
    trainer._load_checkpoint()
    assert trainer.global_steps == 3, verl("resume_path decides", "agl/resume.py")


def test_load_of_nothing_leaves_the_trainer_as_it_is(tmp_path: Path) -> None:
    """`disable` does not look at the folder; `auto` in an empty one starts from scratch."""
    saved(tmp_path)
    for trainer in (verl_trainer(tmp_path, resume_mode="disable"), verl_trainer(tmp_path / "empty")):
        trainer._load_checkpoint()
        assert (trainer.global_steps, trainer.notes) == (0, [])


def test_load_dies_of_a_torn_tracker_even_for_an_explicit_path(tmp_path: Path) -> None:
    """Why the output folder is pointed elsewhere for that call; if VERL gets tolerant, that can go."""
    folder = saved(tmp_path)
    (tmp_path / layout.TRACKER_NAME).write_text("")
    trainer = verl_trainer(tmp_path, resume_mode="resume_path", resume_from_path=str(folder))
    with pytest.raises(ValueError, match="invalid literal for int"):
        trainer._load_checkpoint()


# --- loader -------------------------------------------------------------------------------------------------------


def loader(num_workers: int = 0, *, sampler: Any = None, num_rows: int = 10) -> Any:
    """Five batches of two rows each, as VERL makes its loader."""
    return StatefulDataLoader(
        list(range(num_rows)), batch_size=2, num_workers=num_workers, drop_last=True, sampler=sampler
    )


def holder(stateful_loader: Any) -> Any:
    """A trainer as far as the loader goes."""
    return bare_trainer(train_dataloader=stateful_loader, _train_dataloader_iter=None)


def rest(trainer: Any) -> list[list[int]]:
    return [batch.tolist() for batch in trainer._train_dataloader_iter or iter(trainer.train_dataloader)]


def test_loader_state_that_waits_is_read_without_opening_an_iterator() -> None:
    """`next_iter_state` holds what was loaded until `iter` takes it up."""
    first, second = loader(), holder(loader())
    next(iter(first))
    assert internals.loaded_loader_state(second) is None
    second.train_dataloader.load_state_dict(first.state_dict())
    waiting = internals.loaded_loader_state(second)
    assert waiting is not None, torchdata("a loaded state waits in next_iter_state")
    assert rows_yielded(waiting) == 2
    iter(second.train_dataloader)
    assert internals.loaded_loader_state(second) is None


@NUM_WORKERS
def test_loader_state_counts_the_rows_that_were_handed_out(num_workers: int) -> None:
    """From the keys of its single- and multi-process states, at each position of a pass."""
    trainer = holder(loader(num_workers))
    iterator = iter(trainer.train_dataloader)
    for position in range(6):
        state = internals.loader_state(trainer)
        assert rows_yielded(state) == 2 * position, torchdata("the state tells how many rows were yielded")
        assert not pass_has_ended(state)
        assert internals.is_exhausted(trainer, state) == (position == 5)
        next(iterator, None)
    assert pass_has_ended(internals.loader_state(trainer))
    assert internals.is_exhausted(trainer, internals.loader_state(trainer)), torchdata(
        "the state tells that a pass has ended"
    )


@NUM_WORKERS
@pytest.mark.parametrize("position", [0, 1, 4])
def test_loader_continues_at_a_restored_state(num_workers: int, position: int) -> None:
    """Exactly behind the batches that were handed out when the state was taken."""
    before = loader(num_workers)
    iterator = iter(before)
    handed_out = [next(iterator).tolist() for _ in range(position)]
    state = before.state_dict()
    trainer = holder(loader(num_workers))
    internals.restore_loader(trainer, state)
    assert handed_out + rest(trainer) == rest(holder(loader(num_workers))), torchdata("a state continues its pass")


def test_loader_state_of_another_number_of_workers_is_refused() -> None:
    """At the restore, and not at the first pull; `state_for_workers` makes it fit."""
    state = loader(2).state_dict()
    with pytest.raises(StateMismatchError, match="does not fit this run's loader"):
        internals.restore_loader(holder(loader(0)), state)


def test_reset_loader_begins_a_new_pass() -> None:
    """Also after a state was loaded that nothing has consumed: `next_iter_state` is where torchdata keeps it."""
    before = loader()
    next(iter(before))
    trainer = holder(loader())
    trainer.train_dataloader.load_state_dict(before.state_dict())
    assert trainer.train_dataloader.next_iter_state is not None, torchdata("a loaded state waits in next_iter_state")
    internals.reset_loader(trainer)
    assert rest(trainer) == rest(holder(loader())), torchdata("a reset loader begins at its first row")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", [1, None])
def test_samplers_of_verl_can_be_put_back(shuffle: bool, seed: int | None) -> None:
    """Both are accepted, and continue in the same order: the state holds the generator, seeded or not."""
    data = OmegaConf.create({"shuffle": shuffle, "seed": seed, "sampler": None})
    before = holder(loader(sampler=create_rl_sampler(data, list(range(10)))))
    internals.require_stateful_sampler(before)
    first = iter(before.train_dataloader)
    next(first)
    trainer = holder(loader(sampler=create_rl_sampler(data, list(range(10)))))
    internals.restore_loader(trainer, internals.loader_state(before))
    assert rest(trainer) == [batch.tolist() for batch in first]


def test_sampler_without_a_state_is_refused_by_its_class_name() -> None:
    """torchdata would fast-forward it silently."""

    class Stateless(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(torch.randperm(10).tolist())

        def __len__(self) -> int:
            return 10

    with pytest.raises(ActivationError, match=r"The training sampler .*Stateless has no state"):
        internals.require_stateful_sampler(holder(loader(sampler=Stateless())))
