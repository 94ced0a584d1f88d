"""Plain scenes, and the yardstick itself: it tells runs apart that differ in anything it compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.runs import settings
from tests.rig.server import AglServer
from tests.yardstick.scene import (
    Account,
    Interruption,
    Scene,
    alone,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)


def test_a_plain_run_is_that_of_the_trainer_alone(server: AglServer, tmp_path: Path) -> None:
    """With the extension, uninterrupted."""
    scene = Scene(settings("14/4/6", epochs=2, rollout_n=2, mini_batch=3))
    truth = alone(scene, server, tmp_path)
    assert any(step.metrics["training/n_sample_dropped/same_reward"] for step in truth.steps.values()), "surplus rows"
    assert_same(truth, extended(scene, server, tmp_path))


@pytest.mark.parametrize("state", ["alive", "restarted"])
def test_a_killed_run_is_that_of_the_trainer_alone(server: AglServer, tmp_path: Path, state: str) -> None:
    """Killed after a save, and in the middle of a step."""
    scene = Scene(settings("14/4/6", epochs=2, rollout_n=2, mini_batch=3))
    truth = alone(scene, server, tmp_path)
    ends = (Interruption("saved", 2, server=state), Interruption("updated", 4, server=state))
    assert_resumed(truth, interrupted(scene, server, tmp_path, *ends))


def _last(account: Account) -> int:
    return max(account.steps)


ALTERATIONS: dict[str, Callable[[Account], object]] = {
    "pulled": lambda account: account.steps[2].pulled.reverse(),
    "epoch": lambda account: setattr(account.steps[2], "epoch", 7),
    "finished groups": lambda account: account.steps[2].trained.append(3),
    "rows of the update": lambda account: account.steps[2].samples[0][1].append(5),
    "counts": lambda account: account.steps[2].metrics.update({"training/n_sample": 99}),
    "steps": lambda account: account.lives[-1].steps.pop(_last(account)),
    "what agents were asked": lambda account: account.asked.append("[]"),
    "agents started for validation": lambda account: setattr(account, "num_validations", 9),
    "left on the server": lambda account: account.left.update([(0, "running")]),
    "lost": lambda account: (account.out_dir / "agentlightning_ledger.jsonl").write_text(_without_a_pull(account)),
}


def _without_a_pull(account: Account) -> str:
    """The ledger, less the line of one step."""
    lines = (account.out_dir / "agentlightning_ledger.jsonl").read_text().splitlines(keepends=True)
    return "".join(lines[:2] + lines[3:])


@pytest.fixture(scope="module")
def plain_accounts(_agl_server: AglServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Account, Account]:
    """A small scene, alone and with the extension."""
    folder = tmp_path_factory.mktemp("plain")
    scene = Scene(settings("14/4/6"))
    return alone(scene, _agl_server, folder), extended(scene, _agl_server, folder)


@pytest.mark.parametrize("what", ALTERATIONS)
def test_the_yardstick_notices_a_difference_in(what: str, plain_accounts: tuple[Account, Account]) -> None:
    """Each thing that is compared, altered in the run with the extension, is told by name."""
    truth, account = plain_accounts
    assert_same(truth, account)
    altered = copy.deepcopy(account)
    ledger = (account.out_dir / "agentlightning_ledger.jsonl").read_text()
    ALTERATIONS[what](altered)
    try:
        with pytest.raises(AssertionError, match=what if what != "lost" else "no line of step"):
            assert_same(truth, altered)
    finally:
        (account.out_dir / "agentlightning_ledger.jsonl").write_text(ledger)
