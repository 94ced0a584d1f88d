"""Switching on: the command, the function, and OpenRLHF's whole trainer in Ray actors of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from agl_async_ckpt.exceptions import ActivationError, StateMismatchError
from agl_async_ckpt.openrlhf import __main__ as command
from agl_async_ckpt.openrlhf import activation, enable, internals
from tests.openrlhf.rig.hosts import strategy
from tests.openrlhf.rig.stage import Stage

ASYNC = (internals.ASYNC_MODULE, "PPOTrainerAsync")
SYNC = (internals.SYNC_MODULE, "PPOTrainer")


@pytest.fixture
def _switched_off() -> Iterator[None]:
    """OpenRLHF's own classes before and after."""
    originals = {place: getattr(importlib.import_module(place[0]), place[1]) for place in (ASYNC, SYNC)}
    activation._enabled = False
    yield
    for (module, name), original in originals.items():
        setattr(importlib.import_module(module), name, original)
    activation._enabled = False


@pytest.mark.usefixtures("_switched_off")
def test_whole_trainer_resumes_exactly_in_its_own_actors(stage: Stage, tmp_path: Path) -> None:
    """`enable()` in the driver is all: OpenRLHF's trainer starts generator and trainer in other processes."""
    enable()
    args = stage.args(tmp_path, 7)
    folder = str(Path(args.ckpt.path) / "_actor")
    trained: list[Any] = []
    for crash_at in (4, None):
        ray.get(stage.machine.begin.remote(folder, crash_at))
        trainer = getattr(importlib.import_module(ASYNC[0]), ASYNC[1]).remote(
            args.actor.model_name_or_path,
            strategy(args, in_order=True),
            stage.group(),
            None,
            None,
            None,
            [stage.machine],
            max_len=64,
            max_new_tokens=None,
        )
        if crash_at is None:
            ray.get(trainer.fit.remote())
        else:
            with pytest.raises(RayTaskError, match="CrashError"):
                ray.get(trainer.fit.remote())
        trained += ray.get(stage.machine.story.remote())["trained"]
        ray.kill(trainer)
    assert [len(batch) for batch in trained] == [2, 2, 2, 1]
    prompts = [prompt for batch in trained for prompt in batch]
    # The engine completes the prompts of a generation batch in any order.
    assert [sorted(prompts[:4]), sorted(prompts[4:])] == [["0", "1", "2", "3"], ["4", "5", "6"]]


@pytest.mark.usefixtures("_switched_off")
def test_enable_replaces_both_trainers_once() -> None:
    """A second call changes nothing."""
    enable()
    replaced = [getattr(importlib.import_module(module), name) for module, name in (ASYNC, SYNC)]
    names = [actor.__ray_actor_class__.__name__ for actor in replaced]
    assert names == ["CheckpointedPPOTrainerAsync", "GuardedPPOTrainer"]
    enable()
    assert [getattr(importlib.import_module(module), name) for module, name in (ASYNC, SYNC)] == replaced


@pytest.mark.usefixtures("_switched_off")
def test_enable_refuses_when_the_trainer_was_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher that holds the original is named."""
    launcher = ModuleType("my_launcher")
    launcher.PPOTrainer = getattr(importlib.import_module(ASYNC[0]), ASYNC[1])  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "my_launcher", launcher)
    with pytest.raises(ActivationError, match=r"my_launcher imported PPOTrainerAsync .* before"):
        enable()


@pytest.mark.usefixtures("_switched_off")
@pytest.mark.parametrize("version", ["0.10.4", "0.11.3", "0.12.0"])
def test_enable_refuses_an_unknown_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """With the supported ones; nothing is replaced."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(ActivationError, match=rf"OpenRLHF {version} is not supported; supported are 0.11.0, "):
        enable()
    assert getattr(importlib.import_module(ASYNC[0]), ASYNC[1]).__ray_actor_class__.__name__ == "PPOTrainerAsync"


@pytest.mark.usefixtures("_switched_off")
def test_command_runs_openrlhf_with_its_arguments(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Switched on before OpenRLHF takes its trainer; an error of ours stands alone at the end."""
    import openrlhf.utils

    from tests.openrlhf.rig.arguments import training_words

    seen: dict[str, Any] = {}

    def stop(args: Any) -> None:
        seen["args"] = args
        seen["trainer"] = getattr(importlib.import_module(ASYNC[0]), ASYNC[1]).__ray_actor_class__.__name__
        raise StateMismatchError("as a resume raises it")

    monkeypatch.setattr(openrlhf.utils, "get_strategy", stop)
    monkeypatch.setattr(sys, "argv", ["openrlhf", *training_words(stage.folder, 8, ckpt__path=tmp_path)])
    assert command.main() == 1
    assert seen["args"].ckpt.path == str(tmp_path)
    assert seen["trainer"] == "CheckpointedPPOTrainerAsync"
    assert capsys.readouterr().err.endswith("error: as a resume raises it\n")


@pytest.mark.usefixtures("_switched_off")
def test_error_of_openrlhf_leaves_the_command_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as its own check of the arguments."""
    monkeypatch.setattr(sys, "argv", ["openrlhf", "--nonsense"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
