"""In-flight scenes on the rig: siblings that finish one by one, time travel of server and folder, what a file holds."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.agents import AgentPlan, AgentTable, WaitReport, row_of
from tests.rig.life import extended_trainer, run_life
from tests.rig.record import Life
from tests.rig.runs import TRACKER
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

FOREVER = 2e9
"""Unix seconds, beyond any test."""


@dataclass(frozen=True)
class SiblingPlan(AgentPlan):
    """A plan in which some siblings of a group finish before the others.

    Attributes:
        early: Row -> how many siblings of its group finish at the first wait; the others obey the group's plan.
        early_outcome: Row -> what becomes of those: `ok`, `failed`, `silent`.
    """

    early: Mapping[int, int] = field(default_factory=dict)
    early_outcome: Mapping[int, str] = field(default_factory=dict)


class SiblingAgents(AgentTable):
    """Agents that obey a `SiblingPlan`, and that end rollouts while no trainer looks."""

    def __init__(self, plan: AgentPlan | None = None) -> None:
        super().__init__(plan)
        self._outcomes: dict[str, str] = {}

    def num_starts(self, row: int | None = None) -> int:
        """Agents started so far, of one row or of all."""
        return len(self.starts) if row is None else self.rows_started().count(row)

    def _choose(self, waiting: list[str], report: WaitReport) -> list[str]:
        early = self._early(waiting, report)
        # In a wait of their own: the trainer reads them before the step is over, as it does when it polls for long.
        return early or super()._choose(waiting, report)

    def _early(self, waiting: list[str], report: WaitReport) -> list[str]:
        if not isinstance(self.plan, SiblingPlan):
            return []
        found: list[str] = []
        for group in self._groups(waiting, report):
            row = self._row(group)
            num_left = report.rollout_n - self.plan.early.get(row, 0)
            early = group[: max(0, len(group) - num_left)]
            self._outcomes |= dict.fromkeys(early, self.plan.early_outcome.get(row, "ok"))
            found += early
        return found

    def _finish(self, rollout_id: str, step: int) -> None:
        outcome = self._outcomes.pop(rollout_id, None)
        plan = self.plan
        if outcome is not None:
            self.plan = AgentPlan(step_outcome={step: outcome})
        try:
            super()._finish(rollout_id, step)
        finally:
            self.plan = plan

    def end(self, rollout_ids: Iterable[str], outcome: str = "ok") -> None:
        """End rollouts, started if they were not; in the server's loop."""
        self._reconcile()
        for rollout_id in rollout_ids:
            self._outcomes[rollout_id] = outcome
            self._finish(rollout_id, 0)


def begin(server: AglServer, agents: SiblingAgents) -> None:
    """A run begins on an empty server, whatever the uninterrupted run has left there."""
    server.reset_store()
    server.agents = agents


def kill_after(run: RunSettings, out_dir: Path, server: AglServer, step: int, **kwargs: Any) -> Life:
    """A life that dies right after the save of `step`; everything that has ended so far ended under it."""
    life = run_life(run, out_dir, server.url, stop_after_step=step, **kwargs)
    assert life.died == f"saved {step}"
    prove_life_until_now(out_dir)
    return life


def ids_of(server: AglServer, *rows: int, state: str | None = None) -> list[str]:
    """Ids of the rollouts that the server holds of these rows, in the order of their creation."""
    return [
        rollout_id
        for rollout_id, rollout in server.rollouts().items()
        if row_of(rollout.input) in rows and state in (None, rollout.status.state.value)
    ]


def end(server: AglServer, *rollout_ids: str, outcome: str = "ok") -> None:
    """Have agents end rollouts while no trainer looks."""
    agents: Any = server.agents
    server.call(lambda: agents.end(rollout_ids, outcome))


def prove_life(out_dir: Path, *spans: tuple[float, float]) -> None:
    """Set when a trainer of the folder's run was there; without spans never.

    The trainer's own proofs have the resolution of a second, in which the rig plays a whole life.
    """
    run_id = json.loads((out_dir / "agentlightning_run.json").read_text())["run_id"]
    values = {"run_id": run_id, "lives": [list(span) for span in spans]}
    (out_dir / "agentlightning_alive.json").write_text(json.dumps(values))


def prove_life_until_now(out_dir: Path) -> None:
    """What has ended so far ended under a trainer; what ends later does not."""
    prove_life(out_dir, (0.0, time.time()))


def saved_state(out_dir: Path, step: int) -> Any:
    """The input state that a checkpoint holds."""
    from agl_async_ckpt.storage.commit import load_state

    return load_state(out_dir / f"global_step_{step}")


def requests_of(out_dir: Path, step: int) -> list[str]:
    """The requests in flight of a checkpoint, as JSON texts, oldest first."""
    groups = saved_state(out_dir, step).carry_over
    return [json.dumps(rollout.request) for group in groups for rollout in group.rollouts]


@dataclass
class TimeTravel:
    """Server, controller and output folder as they were at some instants, to go back to any of them.

    The folder is rewound in place: it stays the same run's.
    """

    server: AglServer
    out_dir: Path
    _moments: dict[Any, tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]] = field(default_factory=dict)

    def note(self, moment: Any) -> None:
        """Remember now as `moment`."""
        files = {path.name: path.read_bytes() for path in self.out_dir.iterdir() if path.is_file()}
        agents = {"starts": list(self.server.agents.starts), "_ended": dict(self.server.agents._ended)}
        self._moments[moment] = self.server.call(_copy_store), agents, files

    def at_saves(self, point: str, step: int) -> bool:
        """For `die_at`: never dies, and notes each step as it is saved."""
        if point == "saved":
            self.note(step)
        return False

    def keep_folder(self, aside: Path) -> None:
        """After the last note: put the step folders aside, so that later lives cannot change them."""
        shutil.copytree(self.out_dir, aside)
        self._aside = aside

    def go_back(self, step: int) -> None:
        """Restore everything as it was right after the save of `step`."""
        store, agents, files = self._moments[step]
        self.server.call(lambda: _put_store(store))
        self.server.agents.starts, self.server.agents._ended = list(agents["starts"]), dict(agents["_ended"])
        for path in self.out_dir.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self._aside / f"global_step_{step}", self.out_dir / f"global_step_{step}")
        for name, data in files.items():
            (self.out_dir / name).write_bytes(data)
        assert (self.out_dir / TRACKER).read_text() == str(step)


def _copy_store() -> dict[str, Any]:
    from agentlightning.server import store

    return {
        "_rollouts": dict(store._rollouts),
        "_events": {i: {a: list(events) for a, events in by.items()} for i, by in store._events.items()},
        "_models": {name: dict(models) for name, models in store._models.items()},
        "_terminal_order": list(store._terminal_order),
    }


def _put_store(values: dict[str, Any]) -> None:
    from agentlightning.server import store

    for name in ("_rollouts", "_models"):
        getattr(store, name).clear()
        getattr(store, name).update(values[name])
    store._events.clear()
    store._events.update({i: {a: list(events) for a, events in by.items()} for i, by in values["_events"].items()})
    store._terminal_order[:] = values["_terminal_order"]


@contextlib.contextmanager
def metrics_of() -> Iterator[tuple[type, dict[int, dict[str, Any]]]]:
    """Yield a trainer class of this package, for `run_life`, and where it notes the extension's metrics by step."""
    metrics: dict[int, dict[str, Any]] = {}
    base: Any = extended_trainer()

    class Measured(base):
        def _train_step(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._train_step(*args, **kwargs)
            if result is not None:
                prefix = "training/async_ckpt/"
                found = {name: value for name, value in result[0].items() if name.startswith(prefix)}
                metrics[self.global_steps] = {name.removeprefix(prefix): value for name, value in found.items()}
            return result

    Measured.__module__ = base.__module__
    yield Measured, metrics
