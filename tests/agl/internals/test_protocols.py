"""The trainer and the rollout manager as the extension sees them, compared with agent-lightning's own classes."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager, AglRolloutManager
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.trainer import CheckpointOverrides
from tests.contract import agl
from tests.rig.life import build_trainer, close_trainer, quiet, stock_trainer
from tests.rig.runs import settings

CLASSES = {
    AgentLightningRayPPOTrainer: internals.Trainer,
    AglAsyncRolloutManager: internals.RolloutManager,
    AglRolloutManager: internals.RolloutManager,
}
METHODS = [
    pytest.param(cls, name, method, id=f"{cls.__name__}.{name}")
    for cls, protocol in CLASSES.items()
    for name, method in internals.methods_of(protocol).items()
]
SET_LATER = {"global_steps", "actor_rollout_wg", "_train_dataloader_buf"}
"""Attributes of a trainer that its `fit()`, the start of workers, and the first partial pull set."""


@pytest.mark.parametrize(("cls", "name", "known"), METHODS)
def test_method_has_the_known_signature(cls: type, name: str, known: FunctionType) -> None:
    """A method that is renamed or called otherwise would leave an override unused, or break the call through it."""
    assert hasattr(cls, name), agl(f"{cls.__name__} has a method {name}", "agl/internals/protocols.py")
    ours, theirs = (list(inspect.signature(method).parameters.values()) for method in (known, getattr(cls, name)))
    if ours[-1].kind is inspect.Parameter.VAR_KEYWORD:
        others = theirs[len(ours) - 1 :]
        assert {item.kind for item in others} == {inspect.Parameter.KEYWORD_ONLY}
        ours, theirs = ours[:-1], theirs[: len(ours) - 1]
    assert [(item.name, item.kind, item.default) for item in theirs] == [
        (item.name, item.kind, item.default) for item in ours
    ], agl(f"{name}{inspect.signature(known)}", "agl/internals/protocols.py")


def test_a_trainer_has_the_attributes_once_it_is_built(tmp_path: Path) -> None:
    """Settings and inputs are checked right after `__init__`, before any worker is started."""
    with quiet():
        trainer = build_trainer(settings("12/2/5"), tmp_path, "http://127.0.0.1:9", trainer_cls=stock_trainer())
    names = set(internals.Trainer.__annotations__) - SET_LATER
    assert not names - set(vars(trainer)), agl("its __init__ sets them", "agl/internals/protocols.py")
    for part, protocol in ((trainer.config, internals.Config), (trainer.config.trainer, internals.TrainerSection)):
        assert not set(protocol.__annotations__) - set(part), agl("the config has them", "agl/internals/protocols.py")
    close_trainer(trainer)


@pytest.mark.parametrize("cls", [AglAsyncRolloutManager, AglRolloutManager])
def test_a_manager_has_the_attributes_once_it_is_built(cls: type) -> None:
    """They are replaced and read right after `__init__`."""
    manager: Any = cls(agl_base_url="http://127.0.0.1:9", agl_key="", model="m", step=1)
    missing = set(internals.RolloutManager.__annotations__) - set(vars(manager))
    assert not missing, agl("its __init__ sets them", "agl/internals/protocols.py")
    manager.client.close()


def test_every_override_of_the_trainer_is_in_the_list() -> None:
    """A start insists on what is listed: an override of a method that nobody calls would do nothing."""
    own = {name for name, value in vars(CheckpointOverrides).items() if callable(value) and not name.startswith("__")}
    assert own == set(internals.methods_of(internals.Trainer))
