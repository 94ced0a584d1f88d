"""One scene: its folder, its services, its lives."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.rig.nursery import Nursery
from tests.rig.processes import wait_until
from tests.rig.settings import RunSettings
from tests.scenes.account import SceneLife, assert_adds_up, assert_ids_are_new
from tests.scenes.services import Services
from tests.scenes.trainer import AGENT_OVERRIDES

LIFE_WAIT_S = 240.0


class LifeHandle:
    """A trainer process."""

    def __init__(self, pid: int, record: Path, status: Path, log: Path) -> None:
        self.pid = pid
        self._record, self._status, self._log = record, status, log

    @property
    def life(self) -> SceneLife:
        """What it has noted so far."""
        return SceneLife.from_file(self._record)

    def wait_reached(self, point: str, step: int) -> None:
        """Wait until it has passed a point."""
        wait_until(lambda: self._reached(point, step), f"trainer at {point} {step}", timeout_s=LIFE_WAIT_S)

    def _reached(self, point: str, step: int) -> bool:
        assert not self._status.exists() or (point, step) in self.life.reached, self._text()
        return (point, step) in self.life.reached

    def wait_seen(self, rollout_ids: Iterable[str]) -> None:
        """Wait until it has seen these rollouts ended."""
        ids = set(rollout_ids)
        wait_until(lambda: ids <= set(self.life.seen), f"trainer sees {ids} ended", timeout_s=LIFE_WAIT_S)

    def wait_end(self) -> SceneLife:
        """Wait until `fit` has returned.

        Raises:
            AssertionError: It ended otherwise; the text is its output.
        """
        assert self._wait() == 0, self._text()
        return self.life

    def wait_error(self) -> str:
        """Wait until it has failed by itself; its output."""
        assert os.waitstatus_to_exitcode(self._wait()) == 1, self._text()
        return self._text()

    def wait_killed(self) -> SceneLife:
        """Wait until it has killed itself at its `die_at`."""
        assert os.waitstatus_to_exitcode(self._wait()) == -signal.SIGKILL, self._text()
        return self.life

    def kill(self) -> SceneLife:
        """SIGKILL it now; it must be alive."""
        assert not self._status.exists(), self._text()
        os.kill(self.pid, signal.SIGKILL)
        return self.wait_killed()

    def _wait(self) -> int:
        wait_until(self._status.exists, f"end of the trainer; its log is {self._log}", timeout_s=LIFE_WAIT_S)
        return int(self._status.read_text())

    def _text(self) -> str:
        return self._log.read_text()[-6000:]


class Stage:
    """One scene. Use as a context: whatever happens, nothing is left running.

    Args:
        folder: Empty; everything of the scene goes there.
        nursery: Forks the trainers.
        settings: The run; agents and server are added.
        pool: How many agents run at a time.
    """

    def __init__(self, folder: Path, nursery: Nursery, settings: RunSettings, *, pool: int = 50) -> None:
        self.folder = folder
        for name in ("claims", "gates", "out"):
            (folder / name).mkdir(parents=True)
        self.out_dir = folder / "out"
        self.settings = replace(settings, overrides=(*AGENT_OVERRIDES, *settings.overrides))
        self.services = Services(folder, pool=pool)
        self.lives: list[LifeHandle] = []
        self._nursery = nursery
        self.plan()

    def __enter__(self) -> Stage:
        self.services.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self.lives:
            if not handle._status.exists():
                handle.kill()
        (self.folder / "over").touch()
        self.services.stop()
        pids = {event["pid"] for event in self.agents()}
        wait_until(lambda: not any(self._is_agent(pid) for pid in pids), "end of the agents")

    @staticmethod
    def _is_agent(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE and "scene" in " ".join(process.cmdline()).lower()
        except psutil.NoSuchProcess:
            return False

    # --- agents -----------------------------------------------------------------------------------------------------

    def plan(self, default: Iterable[str] = ("ask", "reward"), **rows: list[list[str]]) -> None:
        """Say what agents do from now on.

        Args:
            default: Moves of an agent of whom nothing else is said.
            rows: `row<ID>` or `val` -> moves of its first, second, ... agent; the last entry holds for all later ones.
        """
        plan = {name.removeprefix("row"): starts for name, starts in rows.items()}
        temp = self.folder / "plan.tmp"
        temp.write_text(json.dumps({"default": [list(default)], **plan}))
        temp.replace(self.folder / "plan.json")

    def open(self, *gates: str) -> None:
        """Let agents through."""
        for gate in gates:
            (self.folder / "gates" / gate).touch()

    def agents(self, event: str | None = None, row: int | None = None, **fields: Any) -> list[dict[str, Any]]:
        """What agents have noted, in order; of one kind, row, and with fields of these values."""
        path = self.folder / "agents.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [
            found
            for found in events
            if (event is None or found["event"] == event)
            and (row is None or found.get("row") == row)
            and all(found.get(name) == value for name, value in fields.items())
        ]

    def wait_agents(self, count: int, event: str, row: int | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Wait until agents have noted `count` such events."""
        return wait_until(
            lambda: len(found := self.agents(event, row, **fields)) >= count and found,
            f"{count} agents with {event} {row} {fields}; noted: {self.folder / 'agents.jsonl'}",
        )

    def wait_states(self, states: dict[str, str]) -> None:
        """Wait until the server shows each rollout in its state."""
        wait_until(
            lambda: {rid: self.services.rollouts()[rid]["status"]["state"] for rid in states} == states,
            f"rollouts in {states}",
        )

    def wait_started(self) -> None:
        """Wait until the server shows none of its rollouts as queued: agents run before their state says so."""
        wait_until(
            lambda: all(record["status"]["state"] != "queuing" for record in self.services.rollouts().values()),
            "no rollout in the queue",
        )

    def wait_proof(self, moment: float) -> None:
        """Wait until the trainer has shown that it lived after `moment`, Unix seconds."""
        path = self.out_dir / "agentlightning_alive.json"
        wait_until(lambda: json.loads(path.read_text())["lives"][-1][1] > moment, f"a proof of life after {moment}")

    # --- lives ------------------------------------------------------------------------------------------------------

    def start_life(
        self,
        *,
        die_at: tuple[str, int] | None = None,
        hold_at: Iterable[tuple[str, int]] = (),
        model_address: str | None = None,
        out_dir: Path | None = None,
        pulls_until: int | None = None,
        base_url: str | None = None,
        **changes: Any,
    ) -> LifeHandle:
        """Start a trainer.

        Args:
            die_at: Point and step at which it kills itself with SIGKILL.
            hold_at: Points and steps at which it waits for the gate `POINT STEP`.
            model_address: Of a model server; default: one of its own, in the same process.
            out_dir: Default: the scene's.
            pulls_until: Only pull, with the stock trainer.
            base_url: Where it looks for agl-server; default: there.
            changes: Of the settings; `overrides` are added.
        """
        name = f"life-{len(self.lives) + 1}"
        overrides = (*self.settings.overrides, *changes.pop("overrides", ()))
        request: dict[str, Any] = {
            "name": name,
            "settings": replace(self.settings, **changes, overrides=overrides).to_json(),
            "out_dir": str(out_dir or self.out_dir),
            "base_url": base_url or self.services.url,
            "record": str(self.folder / f"{name}.jsonl"),
            "status": str(self.folder / f"{name}.status"),
            "log": str(self.folder / f"{name}.log"),
            "die_at": die_at,
            "hold_at": list(hold_at),
            "model_address": model_address,
        }
        if pulls_until is not None:
            request["pulls_until"] = pulls_until
        pid = self._nursery.fork(request)
        handle = LifeHandle(pid, *(Path(request[key]) for key in ("record", "status", "log")))
        self.lives.append(handle)
        return handle

    def truth(self, until_step: int) -> SceneLife:
        """What the uninterrupted run pulls."""
        return self.start_life(pulls_until=until_step, out_dir=self.folder / "truth").wait_end()

    def check(self, truth: SceneLife, *lives: SceneLife) -> None:
        """What every scene promises over the surviving lineage of `lives`, which were all there were."""
        assert_adds_up(truth, *lives, rollout_n=self.settings.rollout_n)
        assert_ids_are_new(lives, self.agents())


StageMaker = Callable[..., Stage]
