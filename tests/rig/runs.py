"""Several lives of one run, and the uninterrupted run that they are compared with."""

from __future__ import annotations

import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.life import run_life, stock_trainer
from tests.rig.record import Life, Position, lineage, rows_pulled, rows_trained
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

TRACKER = "latest_checkpointed_iteration.txt"

_truths: dict[tuple[str, str], Life] = {}


def uninterrupted(settings: RunSettings, server: AglServer, plan: AgentPlan | None = None) -> Life:
    """What the stock trainer does with these settings when nothing interrupts it; computed once per process.

    The server's agents are replaced for its duration.
    """
    settings = replace(settings, extension=None, save_freq=1, resume_mode="disable", resume_from_path=None)
    key = (settings.to_json(), repr(plan))
    if key not in _truths:
        agents, server.agents = server.agents, AgentTable(plan)
        try:
            with tempfile.TemporaryDirectory(prefix="rig-truth-") as folder:
                _truths[key] = run_life(settings, folder, server.url, trainer_cls=stock_trainer())
        finally:
            server.agents = agents
    return _truths[key]


def rewind(source: Path, target: Path, step: int) -> Path:
    """Copy an output folder as it was right after the save of `step`: later steps gone, tracker at `step`.

    Earlier steps stay behind as well, unless they are needed: a test that needs them copies the folder itself.
    """
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_dir():
            if entry.name == f"global_step_{step}":
                shutil.copytree(entry, target / entry.name)
        elif entry.name != TRACKER:
            shutil.copy2(entry, target / entry.name)
    (target / TRACKER).write_text(str(step))
    return target


def assert_continues(truth: Life, *lives: Life, until: int | None = None) -> None:
    """The lineage of `lives` pulled and trained, step by step, what the uninterrupted run did, in the same epochs.

    Args:
        truth: The uninterrupted run.
        lives: In order; each starts from a checkpoint of an earlier one.
        until: Compare up to this step, if the last life was ended early.
    """
    steps = lineage(*lives)
    expected = {number: step for number, step in truth.steps.items() if until is None or number <= until}
    if until is not None:
        steps = {number: step for number, step in steps.items() if number <= until}
    starts = [life.start for life in lives]
    for what in ("pulled", "epoch", "trained"):
        got = {number: getattr(step, what) for number, step in steps.items()}
        want = {number: getattr(step, what) for number, step in expected.items()}
        assert got == want, f"{what} differs from the uninterrupted run; lives started at {starts}"
    for life in lives:
        for number, position in life.saves.items():
            assert position == truth.saves[number], f"position at step {number}; lives started at {starts}"


def assert_balanced(position: Position, step: int, *lives: Life) -> None:
    """trained(1..N) + in flight at N + buffered at N == pulled by N plus the tail, nothing lost, nothing twice."""
    steps = {number: value for number, value in lineage(*lives).items() if number <= step}
    have = rows_trained(steps) + list(position.in_flight)
    assert sorted(have) == sorted(rows_pulled(steps))


@functools.cache
def verl_version() -> tuple[int, ...]:
    """The installed VERL, as comparable numbers."""
    import verl
    from packaging.version import Version

    return Version(verl.__version__).release


def settings(case: str, **changes: Any) -> RunSettings:
    """`n/B/A` as the cases are written, with changes: `settings("24/4/8", epochs=2)`."""
    n, b, a = (int(part) for part in case.split("/"))
    return RunSettings(n, b, a, **changes)
