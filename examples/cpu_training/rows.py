"""Compare the rows of the updates with those of the trainer alone. Pure functions on recorded events.

With a hook of `hook_values` a row is a function of its input: all of it or, where the hook only rewards, prompt and
score. Which inputs a step trains depends on which agents are done first, so rows are compared by input: in each update
of each life, for the inputs that both runs have trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cpu_training.hook_values import trained_rows

FIELDS = {"reward": ("prompt", "score"), "trace": ("prompt", "response", "mask", "log_probs", "score")}
"""Hook -> what it makes a function of the input."""


@dataclass(frozen=True)
class RowComparison:
    """The result.

    Attributes:
        num_rows: Rows of this run that were compared.
        num_rows_after_resume: Of those the ones that a resumed life trained.
        num_inputs: Inputs that they belong to.
        problems: What is not as it has to be, a sentence each.
    """

    num_rows: int
    num_rows_after_resume: int
    num_inputs: int
    problems: list[str]

    @property
    def holds(self) -> bool:
        """Whether rows were compared and all are equal."""
        return self.num_rows > 0 and not self.problems

    def __str__(self) -> str:
        result = "all equal" if self.holds else f"{len(self.problems)} problems" if self.num_rows else "nothing shown"
        return (
            f"rows of the updates: {self.num_rows} compared with those of the trainer alone ({self.num_inputs} inputs, "
            f"{self.num_rows_after_resume} rows trained after a resume): {result}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for the verdict file."""
        return {"holds": self.holds, **asdict(self)}


def compare(hook: str, events: Iterable[Mapping[str, Any]], alone: Iterable[Mapping[str, Any]]) -> RowComparison:
    """Hold the updates of a run against those of an uninterrupted run without the extension, and against the hook.

    Args:
        hook: Name of the hook of both runs.
        events: Recorded by the run.
        alone: Recorded by the other.
    """
    problems: list[str] = []
    yardstick: dict[int, list[dict[str, Any]]] = {}
    for _, where, input_id, rows in _updates(hook, alone):
        yardstick[input_id] = rows
        problems += _difference(f"the trainer alone, {where}", rows, "the hook", trained_rows(hook, input_id))
    num_rows = after_resume = 0
    inputs: set[int] = set()
    for life, where, input_id, rows in _updates(hook, events):
        if input_id not in yardstick:
            problems += _difference(where, rows, "the hook", trained_rows(hook, input_id))
            continue
        num_rows += len(rows)
        after_resume += len(rows) if life > 1 else 0
        inputs.add(input_id)
        problems += _difference(where, rows, "the trainer alone", yardstick[input_id])
    return RowComparison(num_rows, after_resume, len(inputs), problems)


def _updates(hook: str, events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, str, int, list[dict[str, Any]]]]:
    """Per input of each update: life, place in words, input id, and what is compared of its rows."""
    for event in events:
        for group in event["update"] if event["event"] == "trained" else ():
            where = f"life {event['life']}, step {event['step']}, input {group['input']}"
            rows = [{name: row[name] for name in FIELDS[hook]} for row in group["rows"]]
            yield event["life"], where, group["input"], rows


def _difference(where: str, rows: list[dict[str, Any]], whose: str, expected: list[dict[str, Any]]) -> Iterator[str]:
    """Say how `rows` differ from `expected`, which may have fewer fields."""
    if len(rows) != len(expected):
        yield f"{where}: {len(rows)} rows, of {whose} {len(expected)}"
        return
    for row, other in zip(rows, expected, strict=True):
        if differs := [f"{name} {row[name]}, of {whose} {other[name]}" for name in other if row[name] != other[name]]:
            yield f"{where}: {'; '.join(differs)}"
