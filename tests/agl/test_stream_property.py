"""The promise, for any size, any loader batch, any number of workers and any deaths that hypothesis can think of."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.life import run_life
from tests.rig.runs import assert_balanced, assert_continues, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

MAX_STEPS = 6
EXAMPLES = int(os.environ.get("RIG_EXAMPLES", "30"))


@dataclass(frozen=True)
class Scenario:
    """A run, how its agents behave, and where its lives end."""

    run: RunSettings
    plan: AgentPlan
    deaths: tuple[tuple[str, int], ...]
    restarts: tuple[bool, ...]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small runs: up to 6 steps of up to 3 groups, up to 3 deaths."""
    b = draw(st.integers(1, 3), "B")
    a = draw(st.integers(b + 1, 3 * b + 2), "A")
    gen_batch_size = draw(st.none() | st.integers(1, 5), "gen_batch_size")
    n = draw(st.integers(gen_batch_size or b, 16), "n")
    run = RunSettings(
        n,
        b,
        a,
        shuffle=draw(st.booleans(), "shuffle"),
        seed=draw(st.integers(0, 3), "seed"),
        epochs=draw(st.integers(1, 3), "epochs"),
        num_workers=draw(st.sampled_from([0] * 11 + [2]), "num_workers"),
        gen_batch_size=gen_batch_size,
        rollout_n=draw(st.sampled_from([1, 1, 1, 2]), "rollout_n"),
        save_freq=draw(st.sampled_from([1, 1, 1, 2]), "save_freq"),
        total_steps=draw(st.integers(2, MAX_STEPS), "total_steps"),
    )
    slow = draw(st.sets(st.integers(0, n - 1), max_size=3), "slow rows")
    assert run.total_steps is not None
    instants = st.tuples(
        st.sampled_from(["saved", "pulled", "trained", "save", "actor_saved"]),
        st.integers(1, run.total_steps),
    )
    deaths = tuple(draw(st.lists(instants, max_size=3), "deaths"))
    restarts = tuple(draw(st.booleans(), "restart the server") for _ in deaths)
    return Scenario(run, AgentPlan(rank=dict.fromkeys(slow, 1)), deaths, restarts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@profile(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    # An example takes seconds: shrinking one would take longer than reading it.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(scenario=scenarios())
def test_any_run_with_any_deaths_is_the_uninterrupted_run(server: AglServer, scenario: Scenario) -> None:
    """Whatever the sizes and wherever the lives end: pulls, epochs, training order, tail and in flight are the same."""
    run, plan = scenario.run, scenario.plan
    truth = uninterrupted(run, server, plan)
    server.reset()
    server.agents = AgentTable(plan)
    with tempfile.TemporaryDirectory(prefix="rig-property-") as folder:
        lives = []
        for death, restart in zip(scenario.deaths, scenario.restarts, strict=True):
            lives.append(run_life(run, Path(folder), server.url, die_at=death))
            if restart:
                server.reset_store()
        lives.append(run_life(run, Path(folder), server.url))
    assert lives[-1].finished
    assert_continues(truth, *lives)
    last = max((max(life.saves, default=0) for life in lives), default=0)
    if last:
        assert_balanced(truth, last, *lives)
