"""What the extension relies on in agent-lightning's trainer, one test per behaviour.

The supported versions keep all of it; a new one that does not fails here, with the place to look at. The other parts:
test_contracts_loop (its loop), _rollouts (rollout managers), _server (agl-server, controllers), _verl (VERL,
torchdata), _start (Ray); test_protocols compares names and signatures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomllib
import torch
from agentlightning.verl import trainer as trainer_module
from agentlightning.verl.dataset import LoadedDataset
from omegaconf import OmegaConf

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.internals import start
from tests.contract import agl
from tests.rig.bare import bare_trainer, enqueued

Trainer: Any = trainer_module.AgentLightningRayPPOTrainer
REPO_DIR = Path(__file__).parents[3]


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["agentlightning", "verl", "torchdata"])
def test_installed_version_is_one_that_is_declared(package: str) -> None:
    """What the tests ran with is what pyproject.toml claims to support."""
    from importlib.metadata import version

    from packaging.requirements import Requirement

    extra = tomllib.loads((REPO_DIR / "pyproject.toml").read_text())["project"]["optional-dependencies"]["agl"]
    [requirement] = [item for item in map(Requirement, extra) if item.name == package]
    assert requirement.specifier.contains(version(package)), f"{package} {version(package)} is not {requirement}"


# --- the trainer class --------------------------------------------------------------------------------------------


def test_trainer_class_is_where_the_swap_looks_for_it() -> None:
    """Module and class name, and VERL's trainer as its base."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert trainer_module.__name__ == start.TRAINER_MODULE
    assert issubclass(vars(trainer_module)[start.TRAINER_CLASS], RayPPOTrainer)


# --- pulling ------------------------------------------------------------------------------------------------------


def pulling_trainer(batches: list[list[int]], *, carried: int = 0, size: int = 3) -> Any:
    rollouts = [enqueued(f"group {i}", f"{i}.{sibling}") for i in range(carried) for sibling in range(2)]
    settings = {"agentlightning": {"async_rollout": {"async_train_batch_size": size}}}
    return bare_trainer(
        is_async=True,
        epoch=1,
        config=OmegaConf.create(settings),
        _carry_over_rollouts=rollouts,
        _train_dataloader_iter=None,
        train_dataloader=[{"index": np.array(batch)} for batch in batches],
    )


def pull(trainer: Any) -> list[int]:
    return trainer._next_train_batch_dict_for_rollout()["index"].tolist()


def test_pull_takes_what_the_carry_over_leaves_room_for() -> None:
    """A minus the groups in flight, counted by data_id; the rest of the loader batch is the buffer."""
    trainer = pulling_trainer([[0, 1], [2, 3], [4, 5]], carried=2, size=5)
    assert pull(trainer) == [0, 1, 2], agl("a pull takes A - groups in flight", "agl/life.py")
    assert trainer._train_dataloader_buf["index"].tolist() == [3], agl(
        "the unused tail of a loader batch is _train_dataloader_buf", "agl/internals/trainer.py"
    )


def test_pull_begins_with_the_buffer() -> None:
    """A restored tail comes first; None and absent mean that there is none."""
    trainer = pulling_trainer([[0, 1], [2, 3]])
    internals.set_buffered_batch(trainer, {"index": np.array([8, 9])})
    assert pull(trainer) == [8, 9, 0], agl("a pull begins with _train_dataloader_buf", "agl/internals/trainer.py")
    trainer = pulling_trainer([[0, 1, 2]])
    internals.set_buffered_batch(trainer, None)
    assert pull(trainer) == [0, 1, 2], agl("_train_dataloader_buf = None means no tail", "agl/internals/trainer.py")


@pytest.mark.parametrize(
    "columns",
    [
        [np.array([6, 7]), np.array([8.5])],
        [np.array([True]), np.array([8])],
        [np.array(["2024-01-01"], dtype="M8[D]"), np.array([None], dtype=object)],
        [torch.tensor([1]), torch.tensor([2.5])],
        [torch.tensor([1], dtype=torch.int32), torch.tensor([2])],
        [[1], ["a", None]],
        [[1], np.array([2, 3])],
    ],
    ids=lambda columns: " and ".join(str(getattr(column, "dtype", "list")) for column in columns),
)
def test_pull_joins_columns_as_ours_do(columns: list[Any]) -> None:
    """By the kind of the first, with the types of numbers that numpy and torch find for both."""
    trainer = pulling_trainer([])
    trainer.train_dataloader = [{"x": column} for column in columns]
    pulled = trainer._next_train_batch_dict_with_size(sum(map(len, columns)))["x"]
    ours = internals.joined_column(columns)
    assert type(pulled) is type(ours), agl("a pull joins by the kind of the first column", "agl/internals/trainer.py")
    assert getattr(pulled, "dtype", None) == getattr(ours, "dtype", None), agl(
        "a pull joins with torch.cat and numpy.concatenate", "agl/internals/trainer.py"
    )
    assert list(pulled) == list(ours)
    with pytest.raises(TypeError):
        internals.joined_column([torch.ones(1), np.ones(1)])


def test_pull_counts_an_epoch_at_the_end_of_the_loader() -> None:
    """And opens a new iterator; one that is set already is used as it is."""
    trainer = pulling_trainer([[0, 1], [2, 3]], size=4)
    trainer._train_dataloader_iter = iter(trainer.train_dataloader[1:])
    assert pull(trainer) == [2, 3, 0, 1], agl("a pull uses the iterator that is set", "agl/internals/trainer.py")
    assert trainer.epoch == 2, agl("a pull adds 1 to epoch when the loader has ended", "agl/save.py")


def test_pull_of_nothing_raises() -> None:
    """Why restored groups are admitted up to A - 1 only."""
    with pytest.raises(ValueError, match="must be > 0"):
        pull(pulling_trainer([[0, 1, 2]], carried=3, size=3))


# --- data sets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "infos", [[{"index": 5}, {"index": 0}, {"index": 7}], [{"other": 1}] * 3], ids=["index", "none"]
)
def test_index_of_a_row_is_that_of_its_extra_info(infos: list[Any]) -> None:
    """So that it can be told from where rows are stored, without the data set's own code."""
    dataset = LoadedDataset([{"q": "?", "extra_info": info} for info in infos])
    positions = range(len(infos))
    assert internals.index_values(dataset, positions) == [dataset[position]["index"] for position in positions], agl(
        "LoadedDataset takes index from extra_info, or 0", "agl/internals/dataset.py"
    )


def test_index_of_a_data_set_of_ones_own_is_not_asked_for() -> None:
    """Its code may draw from the trainer's generators."""

    class Own(LoadedDataset):
        def __getitem__(self, item: int) -> Any:
            raise AssertionError("a row was read")

    assert internals.index_values(Own([{"extra_info": {"index": 0}}]), [0]) is None
    assert internals.index_values(range(3), [0]) is None
