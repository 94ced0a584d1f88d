"""What the extension relies on in agent-lightning's trainer, one test per behaviour.

The supported versions keep all of it; a new one that does not fails here, with the place to look at. The other parts:
test_contracts_rollouts (rollout managers), _server (agl-server, controllers), _verl (VERL, torchdata), _start (Ray).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import agentlightning
import numpy as np
import pytest
import tomllib
import torch
from agentlightning.verl import trainer as trainer_module
from agentlightning.verl.dataset import LoadedDataset
from omegaconf import OmegaConf

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.internals import start
from agl_async_ckpt.storage import layout
from tests.contract import agl
from tests.rig.bare import bare_trainer, enqueued

Trainer: Any = trainer_module.AgentLightningRayPPOTrainer
REPO_DIR = Path(__file__).parents[3]


def code_of(function: Any) -> ast.FunctionDef:
    """Syntax tree of a function or method."""
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def first_line(tree: ast.AST, code: str) -> int:
    """Line on which a statement or expression that reads `code` stands first; 0 if nowhere."""
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr) and ast.unparse(node).startswith(code)
    ]
    return min(lines, default=0)


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["agentlightning", "verl", "torchdata"])
def test_installed_version_is_one_that_is_declared(package: str) -> None:
    """What the tests ran with is what pyproject.toml claims to support."""
    from importlib.metadata import version

    from packaging.requirements import Requirement

    extra = tomllib.loads((REPO_DIR / "pyproject.toml").read_text())["project"]["optional-dependencies"]["agl"]
    [requirement] = [item for item in map(Requirement, extra) if item.name == package]
    assert requirement.specifier.contains(version(package)), f"{package} {version(package)} is not {requirement}"


def test_agent_lightning_does_not_write_our_file_itself() -> None:
    """No module of the installed version mentions it; one that does would be a second writer."""
    root = Path(agentlightning.__path__[0])
    found = [path for path in root.rglob("*.py") if layout.FILE_NAME in path.read_text(encoding="utf-8")]
    assert not found, agl(
        f"{layout.FILE_NAME} is written by the extension only (found in {found})", "agl/internals/process.py"
    )


# --- the trainer class --------------------------------------------------------------------------------------------


def test_trainer_class_is_where_the_swap_looks_for_it() -> None:
    """Module and class name, and VERL's trainer as its base."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert trainer_module.__name__ == start.TRAINER_MODULE
    assert issubclass(vars(trainer_module)[start.TRAINER_CLASS], RayPPOTrainer)


@pytest.mark.parametrize(
    ("caller", "callee"),
    [
        ("fit", "_load_checkpoint"),
        ("fit", "_train_step"),
        ("fit", "_save_checkpoint"),
        ("fit", "_validate"),
        ("_train_step", "_next_train_batch_dict_for_rollout"),
        ("_next_train_batch_dict_for_rollout", "_next_train_batch_dict_with_size"),
        ("_train_step", "_rollout"),
        ("_validate", "_rollout"),
        ("_rollout", "_make_rollout_manager"),
        ("_rollout", "_pause_and_drain_gateway"),
        ("_pause_and_drain_gateway", "_ensure_agl_client"),
    ],
)
def test_overridden_method_is_called_where_expected(caller: str, callee: str) -> None:
    """An override that nothing calls does nothing."""
    called = first_line(code_of(getattr(Trainer, caller)), f"self.{callee}(")
    assert called, agl(f"{caller} calls self.{callee}", "trainer.py")


def test_buffer_is_reset_neither_by_init_nor_by_fit() -> None:
    """So a restored tail survives `fit()`, and a fresh start has to clear an earlier one."""
    for method in (Trainer.__init__, Trainer.fit):
        assert not first_line(code_of(method), "self._train_dataloader_buf"), agl(
            f"{method.__name__} leaves _train_dataloader_buf alone", "agl/internals/trainer.py"
        )


@pytest.mark.parametrize(
    "statement",
    [
        "self.global_steps = 0",
        "self.epoch = 0",
        "self._train_dataloader_iter = None",
        "self._carry_over_rollouts = []",
    ],
)
def test_fit_resets_before_it_loads(statement: str) -> None:
    """What `_load_checkpoint` restores is not reset after it."""
    fit = code_of(Trainer.fit)
    loads = first_line(fit, "self._load_checkpoint()")
    name = statement.split(" = ")[0]
    assigned = [
        node.lineno
        for node in ast.walk(fit)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets)
    ]
    assert first_line(fit, statement) in range(1, loads), agl(f"fit() does {statement} before loading", "resume.py")
    assert max(assigned) < loads, agl(f"fit() does not set {name} after loading", "resume.py")


@pytest.mark.parametrize("counter", ["epoch", "global_steps"])
def test_fit_adds_one_to_step_and_epoch_after_loading(counter: str) -> None:
    """The restored epoch is set one lower for that."""
    fit = code_of(Trainer.fit)
    loads, adds = first_line(fit, "self._load_checkpoint()"), first_line(fit, f"self.{counter} += 1")
    loop = next(node.lineno for node in ast.walk(fit) if isinstance(node, ast.While))
    assert loads < adds < loop, agl(f"fit() adds 1 to {counter} between loading and its loop", "resume.py")


def test_fit_skips_a_step_without_a_result() -> None:
    """`_train_step` returns (metrics, batch), or None: then nothing is saved."""
    fit = code_of(Trainer.fit)
    assert first_line(fit, "if result is None:"), agl("_train_step may return None", "trainer.py")
    assert first_line(fit, "metrics, step_batch = result"), agl("_train_step returns (metrics, batch)", "trainer.py")


def test_fit_saves_by_the_config_as_it_is_after_the_step() -> None:
    """So a step can be saved out of turn; a validation comes before, the end of the training after."""
    fit = code_of(Trainer.fit)
    step, decides = first_line(fit, "self._train_step("), first_line(fit, "self.config.trainer.save_freq > 0")
    assert 0 < step < decides < first_line(fit, "self._save_checkpoint("), agl(
        "fit() reads trainer.save_freq between step and save", "checkpoint/step_end.py"
    )
    assert any(
        step < node.lineno < decides and "self._validate(" in ast.unparse(node)
        for node in ast.walk(fit)
        if isinstance(node, ast.stmt)
    ), agl("fit() validates between step and save", "checkpoint/step_end.py")


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
    assert trainer.epoch == 2, agl("a pull adds 1 to epoch when the loader has ended", "save.py")


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
