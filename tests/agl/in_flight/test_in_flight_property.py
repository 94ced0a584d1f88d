"""The promise for groups in flight, for any sizes, deaths, servers, sibling states and settings that hypothesis finds.

The oracle needs no run: without shuffling the stream is 0, 1, 2, ... epoch by epoch, and only the order of pulling is
promised; which group finishes first depends on the agents.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note
from hypothesis import settings as profile
from hypothesis import strategies as st

from agl_async_ckpt.agl.in_flight.carry_over import RUN_ID_KEY
from tests.rig.agents import row_of
from tests.rig.in_flight import SiblingAgents, SiblingPlan, begin, end, prove_life, saved_state
from tests.rig.life import run_life
from tests.rig.record import Life, lineage, rows_pulled, rows_trained
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

EXAMPLES = int(os.environ.get("RIG_EXAMPLES", "40"))
POINTS = ("saved", "saved", "saved", "pulled", "trained", "updated", "save", "actor_saved")


@dataclass(frozen=True)
class Death:
    """How a life ends, and what happens until the next one.

    Attributes:
        at: Point and step.
        ends: Of what runs on the server every k-th rollout ends, 0 for none.
        under_trainer: They end before the trainer's death, else after it.
        outcome: How they end.
        restart: The server is restarted then.
        run: Settings of the life that dies.
    """

    at: tuple[str, int]
    ends: int
    under_trainer: bool
    outcome: str
    restart: bool
    run: RunSettings


@dataclass(frozen=True)
class Scenario:
    """Lives that die, a last one to the end, and how the agents behave."""

    deaths: tuple[Death, ...]
    last: RunSettings
    plan: SiblingPlan


@st.composite
def scenarios(draw: st.DrawFn, max_steps: int = 6) -> Scenario:
    """Small runs, up to three deaths, in some of which A or rollout.n changes between the lives."""
    b = draw(st.integers(1, 3), "B")
    a = draw(st.integers(b + 1, 3 * b + 2), "A")
    n = draw(st.integers(a + 1, 20), "n")  # more rows than are active: a row's groups of two epochs do not meet
    rollout_n = draw(st.sampled_from([1, 2, 2, 3]), "rollout.n")
    extension = {
        "in_flight": draw(st.sampled_from(["keep", "keep", "keep", "regenerate"]), "in_flight"),
        "adopt": draw(st.sampled_from(["all", "all", "finished_before_death"]), "adopt"),
        "reclaim": draw(st.sampled_from([True, True, False]), "reclaim"),
        "in_flight_max_bytes": draw(st.sampled_from([2**30, 2**30, 2000]), "in_flight_max_bytes"),
    }
    run = RunSettings(
        n,
        b,
        a,
        epochs=draw(st.integers(1, 3), "epochs"),
        total_steps=draw(st.integers(2, max_steps), "total_steps"),
        rollout_n=rollout_n,
        save_freq=draw(st.sampled_from([1, 1, 2]), "save_freq"),
        extension=extension,
    )
    changes = draw(st.booleans(), "settings change between lives")
    failures = not changes and rollout_n > 1 and run.epochs == 1
    rows = st.integers(0, n - 1)
    plan = SiblingPlan(
        rank=dict.fromkeys(draw(st.sets(rows, max_size=n // 2), "slow rows"), 1),
        early={row: draw(st.integers(1, rollout_n)) for row in draw(st.sets(rows, max_size=n), "rows with early")},
        # A failed sibling beside one that does not fail: a step without any sample ends the run.
        early_outcome=dict.fromkeys(draw(st.sets(rows, max_size=3)), "failed") if failures else {},
    )
    plan = replace(plan, early={row: min(k, max(1, rollout_n - 1)) for row, k in plan.early.items()})
    assert run.total_steps is not None

    def life() -> RunSettings:
        if not changes:
            return run
        return replace(run, A=draw(st.integers(b + 1, a + 2)), rollout_n=draw(st.integers(1, 3)))

    deaths = tuple(
        Death(
            at=(draw(st.sampled_from(POINTS)), step),
            ends=draw(st.integers(0, 3)),
            under_trainer=(under_trainer := draw(st.booleans())),
            outcome="ok" if under_trainer else draw(st.sampled_from(["ok", "failed", "silent"])),
            restart=draw(st.booleans()),
            run=life(),
        )
        for step in draw(st.lists(st.integers(1, run.total_steps), min_size=1, max_size=3), "steps of death")
    )
    return Scenario(deaths, life(), plan)


def stream(run: RunSettings) -> Any:
    """Row ids in the order of pulling: the loader leaves out n mod batch rows of each epoch."""
    return itertools.chain.from_iterable(itertools.repeat(range(run.n - run.n % run.B)))


def epoch_of(run: RunSettings, num_pulled: int) -> int:
    """Epoch that the trainer counts once it has pulled that many rows: the loader hands out whole batches."""
    per_epoch = run.n - run.n % run.B
    num_loaded = -(-num_pulled // run.B) * run.B
    return (num_loaded - 1) // per_epoch + 1


def check_lineage(out_dir: Path, scenario: Scenario, lives: list[Life]) -> None:
    """What the surviving steps pulled is the stream; at every save all of it is trained, in flight or buffered."""
    run = scenario.last
    steps = lineage(*lives)
    assert list(steps) == list(range(1, len(steps) + 1))
    pulled = rows_pulled(steps)
    assert pulled == list(itertools.islice(stream(run), len(pulled)))
    num_pulled = 0
    for number in sorted(steps):
        num_pulled += len(steps[number].pulled)
        assert steps[number].epoch == epoch_of(run, num_pulled), f"epoch at step {number}"
        assert len(steps[number].trained) == run.B, f"groups trained at step {number}"
        until = {k: step for k, step in steps.items() if k <= number}
        if number % run.save_freq and number != max(steps):
            continue
        if not (out_dir / f"global_step_{number}").is_dir():
            continue
        state = saved_state(out_dir, number)
        in_flight = [row_of(group.rollouts[0].enqueued["input"]) for group in state.carry_over]
        buffered = [] if state.buffered_batch is None else [int(row) for row in state.buffered_batch["index"]]
        taken = list(itertools.islice(stream(run), num_pulled + len(buffered)))
        assert Counter([*rows_trained(until), *in_flight, *buffered]) == Counter(taken), f"at the save of {number}"
        assert len({rollout.rollout_id for group in state.carry_over for rollout in group.rollouts}) == sum(
            len(group.rollouts) for group in state.carry_over
        )


def play(server: AglServer, scenario: Scenario, out_dir: Path) -> list[Life]:
    """All lives of a scenario, with what happens between them."""
    agents = SiblingAgents(scenario.plan)
    begin(server, agents)
    spans: list[tuple[float, float]] = []
    lives: list[Life] = []
    for death in scenario.deaths:
        born = time.time()
        lives.append(run_life(death.run, out_dir, server.url, die_at=death.at))
        note(f"life {len(lives)} from {lives[-1].start}, died at {lives[-1].died}")
        running = [rid for rid, record in server.rollouts().items() if record.status.state.value == "running"]
        chosen = running[:: death.ends] if death.ends else []
        if death.under_trainer:
            end(server, *chosen, outcome=death.outcome)
        spans.append((born, time.time()))
        if not death.under_trainer:
            end(server, *chosen, outcome=death.outcome)
        prove_life(out_dir, *spans)
        if death.restart:
            server.reset_store()
    lives.append(run_life(scenario.last, out_dir, server.url))
    return lives


def check(server: AglServer, scenario: Scenario) -> None:
    """Play a scenario, and hold the promise."""
    with tempfile.TemporaryDirectory(prefix="rig-in-flight-") as folder:
        out_dir = Path(folder) / "out"
        out_dir.mkdir()
        lives = play(server, scenario, out_dir)
        assert lives[-1].finished
        check_lineage(out_dir, scenario, lives)
        starts = [rollout_id for rollout_id, _ in server.agents.starts]
        assert len(starts) == len(set(starts)), "an id is started once"
        for life, run in zip(lives, [*(death.run for death in scenario.deaths), scenario.last], strict=True):
            for number, step in life.steps.items():
                if step.trained:
                    assert step.num_rollouts == run.B * run.rollout_n, f"siblings trained at step {number}"
                if step.updated and not scenario.plan.early_outcome:
                    whole = Counter({row: k * run.rollout_n for row, k in Counter(step.trained).items()})
                    assert Counter(step.updated) == whole, f"a rollout without tokens was trained at step {number}"
        if scenario.last.extension is not None and scenario.last.extension["reclaim"]:
            last = max(lives[-1].saves, default=None)
            if last is not None and last == max(lives[-1].steps):
                state = saved_state(out_dir, last)
                waited = {rollout.rollout_id for group in state.carry_over for rollout in group.rollouts}
                tagged = {
                    rollout_id
                    for rollout_id, record in server.rollouts().items()
                    if (record.metadata.model_extra or {}).get(RUN_ID_KEY) == state.run_id
                }
                assert tagged <= waited, "no orphan stays"


def hold(max_examples: int, max_steps: int) -> Any:
    """Decorator: that many examples, the same ones every time."""

    def decorate(function: Any) -> Any:
        return profile(
            max_examples=max_examples,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )(given(scenario=scenarios(max_steps))(function))

    return decorate


@pytest.mark.timeout(600)
@hold(EXAMPLES, max_steps=6)
def test_nothing_in_flight_is_lost_or_trained_twice(server: AglServer, scenario: Scenario) -> None:
    """Whatever dies when, and whatever has become of the rollouts by then."""
    check(server, scenario)


@pytest.mark.slow
@pytest.mark.timeout(900)
@hold(EXAMPLES // 2, max_steps=9)
def test_nothing_in_flight_is_lost_in_longer_runs(server: AglServer, scenario: Scenario) -> None:
    """The same with more steps, and other examples."""
    check(server, scenario)
