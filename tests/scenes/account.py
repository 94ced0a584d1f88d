"""What happened in the lives of a scene, and whether it adds up to the uninterrupted run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.record import lineage


@dataclass
class SceneStep:
    """One training step.

    Attributes:
        pulled: Rows taken from loader and tail, in order.
        trained: Row of each prompt group that was taken for training.
        rollouts: Its completed rollouts, as agent-lightning describes them (without their events).
        samples: Of the actor's update: rollout_id, row, tokens, log_probs, reward.
        metrics: What the trainer logged about rollouts.
    """

    pulled: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class SceneLife:
    """One process life of a trainer.

    Attributes:
        start: The step whose checkpoint it started from.
        restored: Position right after the load.
        steps: Step -> what happened.
        saves: Step -> position at its save: epoch, in_flight and buffered rows, rollouts in flight.
        posted: Every rollout request that went to the server, in order.
        reached: (point, step) in order.
        seen: Ids of rollouts that the trainer has seen ended, and whose end it therefore keeps.
        log: (level, text) of the package's loggers.
        finished: `fit` returned.
    """

    start: int = 0
    restored: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, SceneStep] = field(default_factory=dict)
    saves: dict[int, dict[str, Any]] = field(default_factory=dict)
    posted: list[dict[str, Any]] = field(default_factory=list)
    reached: list[tuple[str, int]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def from_file(cls, path: Path) -> SceneLife:
        """Read what a life has noted so far; a torn last line is left out."""
        life = cls()
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            if line.endswith("\n"):
                life._add(json.loads(line))
        return life

    def _add(self, event: dict[str, Any]) -> None:
        kind = event.pop("kind")
        if kind == "loaded":
            self.start, self.restored = event["step"], event
        elif kind == "pulled":
            self.steps[event["step"]] = SceneStep(pulled=event["rows"])
        elif kind == "completed":
            step = self.steps[event["step"]]
            step.trained, step.rollouts = event["rows"], event["rollouts"]
        elif kind == "updated":
            self.steps[event["step"]].samples = event["samples"]
        elif kind == "metrics":
            self.steps[event["step"]].metrics = event["metrics"]
        elif kind == "saved":
            self.saves[event["step"]] = event
        elif kind == "posted":
            self.posted += event["requests"]
        elif kind == "reached":
            self.reached.append((event["point"], event["step"]))
        elif kind == "seen":
            self.seen.append(event["rollout_id"])
        elif kind == "log":
            self.log.append((event["level"], event["text"]))
        elif kind == "finished":
            self.finished = True

    @property
    def text(self) -> str:
        """The log as one text."""
        return "\n".join(text for _, text in self.log)

    @property
    def posted_ids(self) -> list[str]:
        """Ids of `posted`, in order."""
        return [request["rollout_id"] for request in self.posted]

    @property
    def resume_metrics(self) -> dict[str, int]:
        """The counts of its resume as the last step logged them, under their short names; empty without a step."""
        prefix = "training/async_ckpt/"
        return {
            name.removeprefix(prefix): int(value)
            for step in self.steps.values()
            for name, value in step.metrics.items()
            if name.startswith(prefix)
        }


def saves(*lives: SceneLife) -> dict[int, dict[str, Any]]:
    """Step -> position at the save that survives."""
    kept: dict[int, dict[str, Any]] = {}
    for life in lives:
        kept = {number: position for number, position in kept.items() if number <= life.start}
        kept.update(life.saves)
    return kept


def assert_adds_up(truth: SceneLife, *lives: SceneLife, rollout_n: int) -> None:
    """Over the surviving lineage nothing is lost and nothing comes twice, at each of its saves.

    trained(1..N) + in flight at N + buffered at N == what the uninterrupted run has taken from the loader by step N.

    Args:
        truth: The uninterrupted pulls.
        lives: In order; each starts from a checkpoint of an earlier one.
        rollout_n: Siblings of a group.
    """
    steps, positions = lineage(*lives), saves(*lives)
    for number, step in steps.items():
        assert step.pulled == truth.steps[number].pulled, f"pulled at step {number}"
        assert len(step.rollouts) == rollout_n * len(step.trained), f"siblings trained at step {number}"
    assert positions, "no life has saved"
    for number, position in positions.items():
        trained = [row for n in range(1, number + 1) for row in steps[n].trained]
        pulled = [row for n in range(1, number + 1) for row in truth.steps[n].pulled]
        have = Counter([*trained, *position["in_flight"], *position["buffered"]])
        expected = Counter([*pulled, *truth.saves[number]["buffered"]])
        assert have == expected, f"at the save of step {number}: lost {expected - have}, too many {have - expected}"
        assert position["buffered"] == truth.saves[number]["buffered"], f"tail at the save of step {number}"


def assert_ids_are_new(lives: Iterable[SceneLife], agents: list[dict[str, Any]]) -> None:
    """No id is created twice, and the controller starts at most one agent for each: an old id is never used again."""
    posted = Counter(rollout_id for life in lives for rollout_id in life.posted_ids)
    assert not [rollout_id for rollout_id, count in posted.items() if count > 1], "created twice"
    started = Counter(event["rollout_id"] for event in agents if event["event"] == "start")
    assert not [rollout_id for rollout_id, count in started.items() if count > 1], "started twice"


def assert_trained_what_agents_did(lives: Iterable[SceneLife], agents: list[dict[str, Any]]) -> None:
    """Each sample of an update holds the tokens, log-probs and reward of its own agent, to the bit.

    An agent that failed posted no reward; agent-lightning fills in 0.
    """
    answers = {event["rollout_id"]: event for event in agents if event["event"] == "answer"}
    rewards = {event["rollout_id"]: event["value"] for event in agents if event["event"] in ("reward", "late reward")}
    for life in lives:
        for number, step in life.steps.items():
            for sample in step.samples:
                answer = answers[sample["rollout_id"]]
                assert answer["row"] == sample["row"], f"row of {sample} at step {number}"
                assert answer["tokens"] == sample["tokens"], f"tokens of {sample} at step {number}"
                assert answer["log_probs"] == sample["log_probs"], f"log-probs of {sample} at step {number}"
                assert rewards.get(sample["rollout_id"], 0.0) == sample["reward"], (
                    f"reward of {sample} at step {number}"
                )
