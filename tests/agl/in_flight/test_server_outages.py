"""The agl-server fails or is restarted under a live trainer, which goes on as if nothing had happened.

The rig puts a fault at exactly one request, or at many; the real server on processes is in `test_outage_scenes.py`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.agl.in_flight import patience
from agl_async_ckpt.exceptions import ServerError
from agl_async_ckpt.ledger.audit import audit
from tests.rig.in_flight import SiblingAgents, SiblingPlan, begin
from tests.rig.life import extended_trainer, run_life
from tests.rig.record import Life, lineage
from tests.rig.server import AglServer
from tests.rig.server_process import ServerProcess
from tests.rig.settings import RunSettings
from tests.rig.weather import FAULTS

SIBLINGS = RunSettings(
    12, 2, 4, rollout_n=2, epochs=2, total_steps=5, val_before_train=True, overrides=("trainer.test_freq=2",)
)
RUNS = {
    "siblings": SIBLINGS,
    "alone, regenerated": replace(SIBLINGS, rollout_n=1, extension={"in_flight": "regenerate"}),
}
PLAN = SiblingPlan(early=dict.fromkeys(range(12), 1), hold={3: 3, 5: 4})
Truths = dict[str, Life]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off without the wait."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="module")
def truths(_agl_server: AglServer, tmp_path_factory: pytest.TempPathFactory) -> Truths:
    """The uninterrupted runs."""
    lives: Truths = {}
    for name, run in RUNS.items():
        _agl_server.reset()
        begin(_agl_server, SiblingAgents(PLAN))
        lives[name] = run_life(run, tmp_path_factory.mktemp("truth"), _agl_server.url)
    return lives


def at_random(fault: str, seed: int) -> Callable[[int, str], str | None]:
    """One of twelve requests meets the fault."""
    rng = random.Random(seed)
    return lambda number, request: fault if rng.random() < 1 / 12 else None


def assert_same(server: AglServer, truth: Life, *lives: Life) -> None:
    """The stream is that of the uninterrupted run, each group is trained whole, and no id is used twice."""
    steps = lineage(*lives)
    assert lives[-1].finished
    assert {n: step.pulled for n, step in steps.items()} == truth.pulls
    assert {n: step.trained for n, step in steps.items()} == {n: step.trained for n, step in truth.steps.items()}
    assert {n: Counter(s.updated) for n, s in steps.items()} == {n: Counter(s.updated) for n, s in truth.steps.items()}
    starts = Counter(rollout_id for rollout_id, _ in server.agents.starts)
    assert set(starts.values()) == {1}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", RUNS)
def test_faults_at_many_requests_change_nothing(
    server: AglServer, tmp_path: Path, truths: Truths, fault: str, name: str
) -> None:
    """Every request may meet it, in any phase of a step and in validations: the run is the uninterrupted one."""
    begin(server, SiblingAgents(PLAN))
    server.weather.fault = at_random(fault, seed=len(name))
    life = run_life(RUNS[name], tmp_path, server.url)
    assert server.weather.num_faults > 5
    assert_same(server, truths[name], life)
    assert life.saves == truths[name].saves
    assert audit(tmp_path).problems == []


@pytest.mark.parametrize("fault", ["restart after", "failover before"])
def test_death_among_faults_resumes_exactly(server: AglServer, tmp_path: Path, truths: Truths, fault: str) -> None:
    """What was created again since the checkpoint is reclaimed, and created again once more."""
    begin(server, SiblingAgents(PLAN))
    server.weather.fault = at_random(fault, seed=1)
    first = run_life(SIBLINGS, tmp_path, server.url, die_at=("updated", 4))
    second = run_life(SIBLINGS, tmp_path, server.url)
    assert (first.died, second.start) == ("updated 4", 3)
    assert_same(server, truths["siblings"], first, second)
    assert audit(tmp_path).problems == []


def test_restart_is_told_in_one_line_with_its_cost(server: AglServer, tmp_path: Path) -> None:
    """Of four siblings in flight two had ended: they are kept, the others are created again, and one line says so."""
    begin(server, SiblingAgents(PLAN))
    looks: list[str] = []

    def fault(number: int, request: str) -> str | None:
        if not request.startswith("GET /api/rollouts/") or "/events" in request or server.weather.num_faults:
            return None
        looks.append(request)
        # After the siblings that end early were seen: what is left is looked at once more.
        return "restart before" if looks.count(request) == 3 else None

    server.weather.fault = fault
    life = run_life(RunSettings(8, 2, 4, rollout_n=2, total_steps=2), tmp_path, server.url)
    assert life.finished
    [line] = [text for level, text in life.log if level == "WARNING" and text.endswith("Training goes on.")]
    assert line.startswith(f"The agl-server at {server.url} was away for ")
    assert "(HTTP 502) and came back without the rollouts of this run: 4 created again under new ids, 4 that" in line
    assert len(server.agents.starts) == 2 * 6 + 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_kills_of_the_server_process_in_fifty_steps_change_nothing(server: AglServer, tmp_path: Path) -> None:
    """Killed with SIGKILL before a creation, before the gateway is paused, and while it is; started again at once."""
    run = RunSettings(30, 1, 2, epochs=2, total_steps=50, save_freq=10)
    truth = run_life(run, tmp_path / "truth", server.url)
    with ServerProcess(tmp_path / "server.log") as process:
        moments = [("pulled", 10), ("trained", 25), ("updated", 40)]

        def restart(point: str, step: int) -> bool:
            if (point, step) in moments:
                process.kill()
                process.start()  # the trainer does not wait for it here
            return False

        life = run_life(run, tmp_path / "out", process.url, die_at=restart)
    assert life.finished
    assert life.pulls == truth.pulls
    assert life.saves == truth.saves
    assert [step.trained for step in life.steps.values()] == [step.trained for step in truth.steps.values()]
    assert audit(tmp_path / "out").holds
    assert len([text for _, text in life.log if "created again under new ids" in text]) == 3


def test_two_servers_behind_one_address_are_an_error(server: AglServer, tmp_path: Path) -> None:
    """A rollout that is unknown each time it was created would be created for ever."""
    begin(server, SiblingAgents(PLAN))
    is_look = re.compile(r"GET /api/rollouts/\w+")
    server.weather.fault = lambda number, request: "failover before" if is_look.fullmatch(request) else None
    with pytest.raises(
        ServerError, match=r"right after it was created, 5 times.\nOne server has to answer all requests"
    ):
        run_life(RunSettings(8, 2, 4), tmp_path, server.url)


HOOKS = """
from agentlightning.hooks import RolloutHooks

class Hooks(RolloutHooks):
    def on_succeeded(self, rollout, events, store):
        store.add_event(rollout.rollout_id, "0", "reward", {"value": (1 + rollout.input["index"]) / 64})
"""


@pytest.mark.parametrize("fault", ["unprocessed", "answer lost", "restart after", "failover before"])
@pytest.mark.parametrize("name", RUNS)
def test_reward_of_a_hook_arrives_through_every_fault(server: AglServer, tmp_path: Path, fault: str, name: str) -> None:
    """agent-lightning swallows what a hook raises: a reward that is lost would be trained as another one."""
    hooks = tmp_path / "hooks.py"
    hooks.write_text(HOOKS)
    rewards: list[tuple[int, float | None]] = []
    base: Any = extended_trainer()

    class Noting(base):
        def _compute_async_rollout_metrics(self, *, completed_rollouts: list[Any], **kwargs: Any) -> Any:
            rewards.extend((item.input["index"], item.final_reward) for item in completed_rollouts)
            return super()._compute_async_rollout_metrics(completed_rollouts=completed_rollouts, **kwargs)

    Noting.__module__ = base.__module__
    begin(server, SiblingAgents(PLAN))
    faults_left = [fault] * 3
    server.weather.fault = lambda number, request: (
        faults_left.pop() if faults_left and request.endswith("/attempt/0/events") else None
    )
    run = replace(RUNS[name], total_steps=2, val_before_train=False, overrides=(f"agentlightning.hooks={hooks}",))
    assert run_life(run, tmp_path / "out", server.url, trainer_cls=Noting).finished
    assert not faults_left
    assert len(rewards) == 2 * run.B * run.rollout_n
    assert rewards == [(row, (1 + row) / 64) for row, _ in rewards]
