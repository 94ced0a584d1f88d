"""Switching on, without Ray: the class swap, trainer classes, the worker hook, the line in the log."""

from __future__ import annotations

import importlib.util
import linecache
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt import _logging, worker
from agl_async_ckpt.agl import activation, internals, trainer
from agl_async_ckpt.agl.internals import start
from agl_async_ckpt.agl.trainer import AsyncCheckpointMixin, CheckpointOverrides, extend
from agl_async_ckpt.exceptions import ActivationError
from agl_async_ckpt.storage.layout import FILE_NAME

REPO_DIR = Path(__file__).parents[2]


@dataclass
class House:
    """Stands for agent-lightning: a package whose `trainer` module holds the class to be swapped."""

    name: str
    path: Path

    def write(self, module: str, *lines: str) -> None:
        (self.path / f"{module}.py").write_text("\n".join(lines) + "\n")

    def trainer(self) -> Any:
        """The trainer module, imported."""
        return importlib.import_module(f"{self.name}.trainer")


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[House]:
    name = f"house_{uuid.uuid4().hex}"  # of its own: an import hook that was registered for a name stays registered
    house = House(name, tmp_path / name)
    house.path.mkdir()
    house.write("__init__")
    house.write("trainer", "class AgentLightningRayPPOTrainer: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(activation, "TRAINER_MODULE", f"{name}.trainer")
    monkeypatch.setattr(activation, "_installed", False)
    yield house
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        del sys.modules[loaded]


# --- the swap -----------------------------------------------------------------------------------------------------


def test_install_imports_nothing_and_swaps_at_the_import(house: House) -> None:
    """The trainer module is not imported by us; whoever imports it gets the extended class, under the same name."""
    activation.install()
    assert f"{house.name}.trainer" not in sys.modules
    module = house.trainer()
    swapped = module.AgentLightningRayPPOTrainer
    assert issubclass(swapped, CheckpointOverrides)
    assert swapped.__name__ == "AgentLightningRayPPOTrainer"
    assert swapped.__module__ == module.__name__
    assert pickle.loads(pickle.dumps(swapped)) is swapped


def test_install_swaps_in_a_module_that_was_imported_before(house: House) -> None:
    """A hook that comes late still extends the class for later imports from the module."""
    module = house.trainer()
    activation.install()
    assert issubclass(module.AgentLightningRayPPOTrainer, CheckpointOverrides)


@pytest.mark.parametrize("access", ["from_import", "attribute"])
def test_install_during_the_import_of_the_trainer_module_swaps(house: House, access: str) -> None:
    """The trainer module imports the framework, and that our plugin, before it has a class to swap."""
    house.write("framework", "from agl_async_ckpt.agl import activation", "activation.install()")
    house.write(
        "trainer",
        f"import {house.name}.framework",
        "class AgentLightningRayPPOTrainer: ...",
        "own = AgentLightningRayPPOTrainer",
    )
    if access == "from_import":
        namespace: dict[str, Any] = {}
        exec(f"from {house.name}.trainer import AgentLightningRayPPOTrainer as found", namespace)
        found = namespace["found"]
    else:
        found = house.trainer().AgentLightningRayPPOTrainer
    module = house.trainer()
    assert found.__mro__[:3] == (found, CheckpointOverrides, module.own)
    assert type(module) is ModuleType
    assert module.AgentLightningRayPPOTrainer is found


def test_install_during_the_import_respects_a_replacement(house: House) -> None:
    """A class that someone puts in place before the first access is the one that gets extended."""
    house.write(
        "trainer",
        "from agl_async_ckpt.agl import activation",
        "activation.install()",
        "class AgentLightningRayPPOTrainer: ...",
    )
    module = house.trainer()

    class Replacement: ...

    module.AgentLightningRayPPOTrainer = Replacement
    assert module.AgentLightningRayPPOTrainer.__mro__[1:3] == (CheckpointOverrides, Replacement)


def test_install_twice_extends_once(house: House) -> None:
    """Loaded by hook and plugin and launcher: the overrides are there once."""
    activation.install()
    activation.install()
    module = house.trainer()
    first = module.AgentLightningRayPPOTrainer
    activation.swap_trainer_class(module)
    assert module.AgentLightningRayPPOTrainer is first
    assert first.__mro__.count(CheckpointOverrides) == 1


def test_swap_leaves_a_users_own_subclass_alone(house: House) -> None:
    """A class with the mixin that was put into the module keeps its identity."""
    module = house.trainer()

    class Own(AsyncCheckpointMixin, module.AgentLightningRayPPOTrainer): ...

    module.AgentLightningRayPPOTrainer = Own
    activation.swap_trainer_class(module)
    assert module.AgentLightningRayPPOTrainer is Own


def test_missing_class_is_an_activation_error_with_the_version(house: House) -> None:
    """An agent-lightning without that class stops the import, instead of training unprotected."""
    house.write("trainer")
    activation.install()
    with pytest.raises(ActivationError, match=r"agentlightning 1\.\d+\.\d+ has no .*AgentLightningRayPPOTrainer"):
        house.trainer()


def test_plugin_works_where_the_trainer_module_is_the_first_to_import_verl() -> None:
    """The real thing, in a fresh process; afterwards the mixin and the exported trainer build on the swapped class."""
    code = """
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer as Swapped
    import cloudpickle, pickle
    from agl_async_ckpt import AsyncCheckpointMixin, AsyncCheckpointTrainer
    from agl_async_ckpt.agl.trainer import CheckpointOverrides

    names = [cls.__name__ for cls in Swapped.__mro__]
    assert names[:4] == ["AgentLightningRayPPOTrainer", "CheckpointOverrides", "AgentLightningRayPPOTrainer",
                         "RayPPOTrainer"], names
    assert pickle.loads(pickle.dumps(Swapped)) is Swapped

    class Own(AsyncCheckpointMixin, Swapped): ...
    class OwnToo(AsyncCheckpointTrainer): ...

    for cls in (Own, OwnToo, AsyncCheckpointTrainer):
        assert cls.__mro__.count(CheckpointOverrides) == 1
        assert cls._save_checkpoint is CheckpointOverrides._save_checkpoint
        assert issubclass(cloudpickle.loads(cloudpickle.dumps(cls)), Swapped)
    print("ok")
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        cwd=REPO_DIR,
        env={**os.environ, start.PLUGIN_VARIABLE: "json,agl_async_ckpt.plugin"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("ok")


# --- trainer classes ----------------------------------------------------------------------------------------------


IDLE = SimpleNamespace(life=None, step_end=SimpleNamespace(request=None, on_saved=lambda _trainer: None))
"""The extension of a trainer that neither saves positions nor was asked to stop."""


def counting_trainer(monkeypatch: pytest.MonkeyPatch) -> tuple[type, list[str]]:
    """A trainer class, and the list that every call of an override and of the class itself is added to."""
    calls: list[str] = []

    class Stock:
        def _save_checkpoint(self) -> None:
            calls.append("stock")

    def save(_trainer: Any, _session: Any, stock_save: Any) -> None:
        calls.append("override")
        stock_save()

    monkeypatch.setattr(trainer, "save_checkpoint", save)
    return Stock, calls


@pytest.mark.parametrize("base", ["stock", "swapped"])
def test_mixin_runs_its_overrides_once(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    """Also on a class that the hook has extended already."""
    stock, calls = counting_trainer(monkeypatch)

    class Own(AsyncCheckpointMixin, extend(stock) if base == "swapped" else stock):  # type: ignore[misc]
        _async_ckpt = IDLE

    object.__new__(Own)._save_checkpoint()
    assert calls == ["override", "stock"]


def test_users_override_stays_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass that saves something of its own calls ours through super()."""
    stock, calls = counting_trainer(monkeypatch)

    class Own(AsyncCheckpointMixin, extend(stock)):  # type: ignore[misc]
        _async_ckpt = IDLE

        def _save_checkpoint(self) -> None:
            calls.append("own")
            super()._save_checkpoint()

    object.__new__(Own)._save_checkpoint()
    assert calls == ["own", "override", "stock"]


def test_mixin_after_the_trainer_class_is_refused() -> None:
    """None of its overrides would run: said when the class is made, with the right order."""
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    with pytest.raises(ActivationError, match=r"Write class Own\(AsyncCheckpointMixin, AgentLightningRayPPOTrainer\)"):

        class Own(AgentLightningRayPPOTrainer, AsyncCheckpointMixin): ...


def test_exported_trainer_is_a_class_to_extend_and_to_send() -> None:
    """The same one each time it is asked for; Ray pickles it by its name, and a subclass of a script by value."""
    import cloudpickle
    from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

    import agl_async_ckpt
    from agl_async_ckpt import AsyncCheckpointTrainer

    class Own(AsyncCheckpointTrainer): ...

    assert agl_async_ckpt.AsyncCheckpointTrainer is AsyncCheckpointTrainer
    assert AsyncCheckpointTrainer.__mro__[1:3] == (AsyncCheckpointMixin, CheckpointOverrides)
    assert issubclass(AsyncCheckpointTrainer, AgentLightningRayPPOTrainer)
    for dumps in (pickle.dumps, cloudpickle.dumps):
        assert pickle.loads(dumps(AsyncCheckpointTrainer)) is AsyncCheckpointTrainer
    assert issubclass(pickle.loads(cloudpickle.dumps(Own)), AsyncCheckpointTrainer)


def trainer_of_the_future(tmp_path: Path, source: str) -> Any:
    """An object of a trainer class that an agent-lightning module with this source defines."""
    path = tmp_path / "future.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("agentlightning.future_of_activation_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module.Trainer()


@pytest.mark.parametrize("base", ["stock", "swapped"])
def test_second_writer_of_our_file_is_refused(tmp_path: Path, base: str) -> None:
    """An agent-lightning that saves `agentlightning_input.pt` itself is named, with its version, at the start."""
    source = f"class Trainer:\n    FILE = {FILE_NAME!r}\n"
    found = trainer_of_the_future(tmp_path, source)
    if base == "swapped":
        found = object.__new__(extend(type(found)))
    try:
        with pytest.raises(ActivationError, match=rf"agentlightning 1\.\S+ writes {FILE_NAME} itself"):
            internals.require_sole_writer(found, FILE_NAME)
    finally:
        del sys.modules["agentlightning.future_of_activation_tests"]


def test_agent_lightning_without_sources_is_accepted(tmp_path: Path) -> None:
    """An installation of compiled files only cannot be looked into; the first save notices a second writer."""
    found = trainer_of_the_future(tmp_path, "class Trainer: ...\n")
    (tmp_path / "future.py").unlink()
    linecache.clearcache()
    try:
        internals.require_sole_writer(found, FILE_NAME)
    finally:
        del sys.modules["agentlightning.future_of_activation_tests"]


# --- the worker hook ----------------------------------------------------------------------------------------------


@pytest.fixture
def hooks(house: House, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The worker hook with agent-lightning's own replaced by one that notes that it ran; returns the notes."""
    notes: list[str] = []
    module: Any = ModuleType("hooks_of_activation_tests")
    module.upstream = lambda: notes.append(f"upstream, installed={activation.is_installed()}")
    module.chained = lambda: notes.append("chained")
    module.calls_ours = lambda: (notes.append("calls_ours"), worker.setup())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(worker, "UPSTREAM_HOOK", f"{module.__name__}.upstream")
    monkeypatch.setattr(worker, "_ran", False)
    monkeypatch.delenv(worker.CHAINED_HOOK_VARIABLE, raising=False)
    return notes


def test_hook_installs_and_runs_agent_lightnings_own(hooks: list[str]) -> None:
    """The one hook that Ray takes does both; installed first, for hooks that import the trainer."""
    worker.setup()
    assert hooks == ["upstream, installed=True"]


def test_hook_runs_the_chained_one_last(hooks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that `run_ppo` found in the config keeps running."""
    monkeypatch.setenv(worker.CHAINED_HOOK_VARIABLE, "hooks_of_activation_tests.chained")
    worker.setup()
    assert hooks == ["upstream, installed=True", "chained"]


def test_hook_that_is_called_by_the_chained_one_does_not_recurse(
    hooks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's hook may call ours itself and still be given to `run_ppo`."""
    monkeypatch.setenv(worker.CHAINED_HOOK_VARIABLE, "hooks_of_activation_tests.calls_ours")
    worker.setup()
    worker.setup()
    assert hooks == ["upstream, installed=True", "calls_ours"]


@pytest.mark.parametrize("name", ["no_such_module.setup", "hooks_of_activation_tests.missing", "setup"])
def test_hook_that_cannot_be_loaded_is_an_activation_error(
    hooks: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Named, with the form that is expected."""
    monkeypatch.setenv(worker.CHAINED_HOOK_VARIABLE, name)
    with pytest.raises(ActivationError, match=f"The worker setup hook '{name}' cannot be loaded"):
        worker.setup()


def test_real_hook_registers_the_losses_of_agent_lightning(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of agent-lightning's hook is right, and it runs in this process."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    monkeypatch.setattr(worker, "_ran", False)
    monkeypatch.delenv(worker.CHAINED_HOOK_VARIABLE, raising=False)
    worker.setup()
    assert "per_rollout_mean" in POLICY_LOSS_REGISTRY


# --- the line in the log ------------------------------------------------------------------------------------------


@pytest.fixture
def our_logger() -> Iterator[logging.Logger]:
    """Our logger as a fresh process has it."""
    logger = logging.getLogger(_logging.LOGGER_NAME)
    level, handlers = logger.level, list(logger.handlers)
    logger.setLevel(logging.NOTSET)
    logger.handlers[:] = []
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def root_at_warning() -> Iterator[list[str]]:
    """The root logger as VERL leaves it: a handler, and level WARNING; returns what reaches the handler."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    yield seen
    root.setLevel(level)
    root.handlers[:] = handlers


def test_log_line_is_visible_where_verl_hides_info(our_logger: logging.Logger, root_at_warning: list[str]) -> None:
    """Once, through the handler that is there, however often it is asked for."""
    _logging.ensure_visible()
    _logging.ensure_visible()
    logging.getLogger("agl_async_ckpt.agl.extension").info("active")
    logging.getLogger("other").info("hidden")
    assert root_at_warning == ["active"]
    assert our_logger.handlers == []


def test_log_level_of_the_user_is_respected(our_logger: logging.Logger, root_at_warning: list[str]) -> None:
    """Whoever set a level on our logger has decided."""
    our_logger.setLevel(logging.ERROR)
    _logging.ensure_visible()
    logging.getLogger("agl_async_ckpt.agl.extension").info("active")
    assert root_at_warning == []


def test_log_line_is_visible_without_any_handler(
    our_logger: logging.Logger, root_at_warning: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that has configured no logging gets a handler of ours, once."""
    logging.getLogger().handlers[:] = []
    _logging.ensure_visible()
    _logging.ensure_visible()
    logging.getLogger("agl_async_ckpt.agl.extension").info("active")
    assert capsys.readouterr().err.count("active") == 1
