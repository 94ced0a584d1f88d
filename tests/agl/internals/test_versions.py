"""A start names versions that the suite does not run on, and refuses what is known not to work."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomllib
from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase
from packaging.requirements import Requirement

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight.rollout_manager import InFlightRolloutManager
from agl_async_ckpt.agl.internals import process
from agl_async_ckpt.exceptions import ActivationError
from tests.rig.life import build_trainer, quiet, stock_trainer
from tests.rig.runs import settings

ROOT = Path(__file__).parents[3]


@pytest.fixture
def trainer() -> Any:
    """Nothing but a class is looked at."""
    return SimpleNamespace.__new__(type("Trainer", (stock_trainer(), SimpleNamespace), {}))


@pytest.fixture
def verl_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another VERL is installed, as far as its metadata tell."""
    monkeypatch.setattr(process, "_versions", lambda: {"agentlightning": "1.0.2", "verl": "9.0", "torchdata": "0.11.0"})


def test_tested_versions_start_without_a_word(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The environment of the suite is one of them."""
    internals.require_known_versions(trainer, "refuse")
    assert not caplog.records


@pytest.mark.usefixtures("verl_9")
def test_an_untested_version_is_named_with_the_tested_ones(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And the start goes on."""
    with caplog.at_level(logging.WARNING):
        internals.require_known_versions(trainer, "warn")
    [record] = caplog.records
    assert record.getMessage() == (
        "agl-async-ckpt was not tested with these versions:\n"
        "  verl here:   9.0\n"
        "  verl tested: 0.7.1, 0.8.0\n"
        "Install a tested version, or set agentlightning.async_checkpoint.untested_versions=allow to go on without "
        "this check."
    )


@pytest.mark.usefixtures("verl_9")
def test_an_untested_version_is_refused_if_the_config_says_so(trainer: Any) -> None:
    """`untested_versions: refuse`."""
    with pytest.raises(ActivationError, match=r"verl here: +9\.0"):
        internals.require_known_versions(trainer, "refuse")


@pytest.mark.usefixtures("verl_9")
def test_an_untested_version_can_be_allowed(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`untested_versions: allow`."""
    internals.require_known_versions(trainer, "allow")
    assert not caplog.records


def test_a_manager_that_polls_in_batches_is_refused_before_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its polls would go past the extension: the trainer's constructor raises, long before workers are started."""
    monkeypatch.setattr(AglRolloutManagerBase, "_get_rollout_statuses", lambda self, ids: {}, raising=False)
    with quiet(), pytest.raises(ActivationError, match="polls in batches"):
        build_trainer(settings("12/2/5"), tmp_path, "http://127.0.0.1:9")


def test_a_method_that_is_gone_is_refused_by_name(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The override of a method that nobody calls would leave the run without the extension."""
    monkeypatch.delattr(AglRolloutManagerBase, "_post_event")
    with pytest.raises(ActivationError, match="its rollout manager has no _post_event"):
        internals.require_known_versions(trainer, "warn")


def test_every_override_of_the_manager_is_insisted_on() -> None:
    """A start refuses a version without one of them, so a new override has to be in the list."""
    own = {
        name
        for name in vars(InFlightRolloutManager)
        if not name.startswith("__") and hasattr(AglRolloutManagerBase, name)
    }
    assert own <= set(internals.methods_of(internals.RolloutManager))


def test_readme_and_extras_list_the_tested_versions() -> None:
    """One table in the code; README, the page made from it and the extras say the same."""
    readme = (ROOT / "README.md").read_text()
    agl, verl = internals.TESTED["agentlightning"], internals.TESTED["verl"]
    for name, versions in {"agent-lightning": f"{agl[0]} to {agl[-1]}", "VERL           ": ", ".join(verl)}.items():
        assert f"| {name} | {versions} |" in readme
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [Requirement(text) for text in project["optional-dependencies"]["agl"]]
    for name, tested in internals.TESTED.items():
        [requirement] = [wanted for wanted in extra if wanted.name == name]
        assert all(requirement.specifier.contains(version) for version in tested)
        assert not requirement.specifier.contains("9.0")
