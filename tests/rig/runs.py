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
from tests.rig.record import Life, lineage, rows_pulled, rows_trained
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
    starts = [life.start for life in lives]
    last = max(truth.steps) if until is None else until
    steps = {number: step for number, step in lineage(*lives).items() if number <= last}
    assert list(steps) == list(range(1, last + 1)), f"steps are missing or too many; lives started at {starts}"
    for number, step in steps.items():
        expected = truth.steps[number]
        where = f"step {number}; lives started at {starts}"
        assert step.pulled == expected.pulled, f"pulled at {where}"
        assert step.epoch == expected.epoch, f"epoch at {where}"
        if not step.dry:
            assert step.trained == expected.trained, f"trained at {where}"
    for life in lives:
        for number, position in life.saves.items():
            assert position == truth.saves[number], f"position at the save of step {number}; lives started at {starts}"
        if life.start:
            assert life.restored is not None
            saved = truth.saves[life.start]
            assert life.restored.in_flight == saved.in_flight, f"in flight after the load of step {life.start}"
            assert life.restored.buffered == saved.buffered, f"tail after the load of step {life.start}"
            assert life.restored.epoch == saved.epoch - 1, "`fit` adds 1 after the load"


def assert_balanced(truth: Life, step: int, *lives: Life) -> None:
    """trained(1..N) + in flight at N + buffered at N is what the uninterrupted run has taken from the loader by N."""
    steps = {number: value for number, value in lineage(*lives).items() if number <= step}
    position = next(life.saves[step] for life in reversed(lives) if step in life.saves)
    have = [*rows_trained(steps), *position.in_flight, *position.buffered]
    expected = rows_pulled({number: value for number, value in truth.steps.items() if number <= step})
    assert sorted(have) == sorted([*expected, *truth.saves[step].buffered])


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


def protected(settings: RunSettings, out_dir: Path, server: AglServer, plan: AgentPlan | None = None) -> Life:
    """A whole run with the extension, nothing interrupting it; its folder has a checkpoint of every step."""
    server.agents = AgentTable(plan)
    return run_life(settings, out_dir, server.url)


def resume_from(
    settings: RunSettings, life: Life, source: Path, target: Path, step: int, server: AglServer, **kwargs: Any
) -> tuple[Life, Life]:
    """Resume a copy of the folder `source` as it was at `step`; one step is trained, then only pulled.

    Returns:
        What happened up to `step`, and the resumed life.
    """
    rewind(source, target, step)
    until = max(life.steps)
    second = run_life(settings, target, server.url, stop_after_step=step + 1, pull_until=until, **kwargs)
    first = Life(steps={n: s for n, s in life.steps.items() if n <= step}, saves={step: life.saves[step]})
    return first, second
