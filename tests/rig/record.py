"""What happened in a life of a run: an event log that a killed process leaves whole, and the views tests need."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Recorder:
    """Collects events; with a path also appends them as JSON lines, each handed to the kernel at once.

    Args:
        path: Where the lines go, so that they survive a SIGKILL of the writer.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._path = path

    def emit(self, kind: str, **data: Any) -> None:
        """Note an event."""
        event = {"kind": kind, **data}
        self.events.append(event)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(event) + "\n")


class LogRecorder(logging.Handler):
    """Hands the log of one logger tree to a recorder, while entered."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder
        self._logger = logging.getLogger(name)
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        """Note the message with its level."""
        self._recorder.emit("log", level=record.levelname, text=record.getMessage())

    def __enter__(self) -> LogRecorder:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@dataclass
class Step:
    """One call of `_train_step`.

    Attributes:
        pulled: Row ids taken from loader and tail, in pull order.
        epoch: The trainer's `epoch` after the pull.
        trained: Row ids of the groups that finished, in the order of finishing.
        num_rollouts: How many rollouts came back finished.
        updated: Row ids of the samples in the actor's update; empty if the step returned no batch.
        samples: The same samples: prompt tokens, response tokens, log-probs, score each.
        metrics: What agent-lightning counts about the step, below `training/`.
        dry: Only pulled, by `pull_on`.
    """

    pulled: list[int] = field(default_factory=list)
    epoch: int = 0
    trained: list[int] = field(default_factory=list)
    num_rollouts: int = 0
    updated: list[int] = field(default_factory=list)
    samples: list[list[Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    dry: bool = False


@dataclass(frozen=True)
class Position:
    """Where the inputs stand: rows in flight, oldest group first, and rows in the tail."""

    epoch: int
    in_flight: tuple[int, ...]
    buffered: tuple[int, ...]


@dataclass
class Life:
    """One process life of a run.

    Attributes:
        start: The step whose checkpoint it started from, 0 if none.
        restored: Position right after `_load_checkpoint`.
        steps: Step number -> what happened, in order; a step that died half-way is there with what it did.
        saves: Step number -> position at the save.
        weights: Role -> the step whose weights were loaded.
        finished: `fit` returned by itself.
        died: Where it ended instead, as `point step`.
        stopped: Or the step after which it stopped on request.
        log: (level, message) of this package's loggers.
    """

    start: int = 0
    restored: Position | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    saves: dict[int, Position] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    died: str | None = None
    stopped: int | None = None
    log: list[tuple[str, str]] = field(default_factory=list)
    total_steps: int = 0

    @classmethod
    def from_events(cls, events: Iterable[dict[str, Any]]) -> Life:
        """Build the view from a recorder's events."""
        life = cls()
        for event in events:
            life._add(dict(event))
        return life

    @classmethod
    def from_file(cls, path: Path) -> Life:
        """Build the view from a recorder's file; a torn last line is left out."""
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return cls.from_events(json.loads(line) for line in lines if line.endswith("\n"))

    def _add(self, event: dict[str, Any]) -> None:
        kind = event.pop("kind")
        if kind == "loaded":
            self.start = event["step"]
            self.weights = event["weights"]
            self.restored = _position(event)
            self.total_steps = event["total_steps"]
        elif kind == "pulled":
            self.steps[event["step"]] = Step(event["rows"], event["epoch"], dry=event.get("dry", False))
        elif kind == "trained":
            step = self.steps[event["step"]]
            step.trained, step.num_rollouts = event["rows"], event["num_rollouts"]
        elif kind == "updated":
            step = self.steps[event["step"]]
            step.updated, step.samples = event["rows"], event["samples"]
        elif kind == "metrics":
            self.steps[event["step"]].metrics = event["values"]
        elif kind == "saved":
            self.saves[event["step"]] = _position(event)
        elif kind == "log":
            self.log.append((event["level"], event["text"]))
        elif kind == "died":
            self.died = event["at"]
        elif kind == "stopped":
            self.stopped = event["step"]
        elif kind == "finished":
            self.finished = True

    @property
    def pulls(self) -> dict[int, list[int]]:
        """Step -> rows pulled."""
        return {number: step.pulled for number, step in self.steps.items()}

    @property
    def epochs(self) -> dict[int, int]:
        """Step -> epoch after its pull."""
        return {number: step.epoch for number, step in self.steps.items()}

    @property
    def warnings(self) -> list[str]:
        """Messages of level WARNING and above."""
        return [text for level, text in self.log if level in ("WARNING", "ERROR", "CRITICAL")]


def _position(event: dict[str, Any]) -> Position:
    return Position(event["epoch"], tuple(event["in_flight"]), tuple(event["buffered"]))


def lineage(*lives: Any) -> dict[int, Any]:
    """Step -> what happened to the weights that survive: a resume from N discards what came after N."""
    steps: dict[int, Any] = {}
    for life in lives:
        steps = {number: step for number, step in steps.items() if number <= life.start}
        steps.update(life.steps)
    return steps


def rows_pulled(steps: dict[int, Step]) -> list[int]:
    """Every row pulled, in pull order."""
    return [row for number in sorted(steps) for row in steps[number].pulled]


def rows_trained(steps: dict[int, Step]) -> list[int]:
    """Every row whose group was taken for training, step by step."""
    return [row for number in sorted(steps) for row in steps[number].trained]
