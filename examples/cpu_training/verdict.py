"""Compare what the run trained with what an uninterrupted run would have. Pure functions on recorded events.

Only steps whose weights survive count: a resume from step N throws away what came after N. The promise is

    trained(1..N) + in flight at N + buffered at N == everything an uninterrupted run has pulled by step N
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from cpu_training.settings import ASYNC_BATCH, TRAIN_BATCH


@dataclass(frozen=True)
class Step:
    """One step of the trainer; the lists hold input ids.

    Attributes:
        life: Number of the driver process that did it.
        step: As the trainer counts optimizer steps, from 1.
        epoch: As the trainer counts it, after the pull.
        pulled: (A,) in the first step of a run, (B,) later: requested from the loader, in order.
        trained: (B,) inputs whose rollouts this step trained.
        buffered: Pulled from the loader but not requested yet, after the step.
        in_flight: Requested and unfinished after the step, oldest first.
        rows: Rows of the training batch; 0 if the trainer found nothing to train.
        seconds: Duration, without the checkpoint.
    """

    life: int
    step: int
    epoch: int
    pulled: list[int]
    trained: list[int]
    buffered: list[int]
    in_flight: list[int]
    rows: int
    seconds: float


class StepBuilder:
    """Puts the events of a step together; an unfinished step (the driver was killed) yields nothing."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def add(self, event: Mapping[str, Any]) -> Step | None:
        """Take one event; returns the step that it finishes, if it does."""
        match event["event"]:
            case "loaded":
                self._parts = {}
            case "pulled":
                self._parts = {
                    "epoch": event["epoch"],
                    "pulled": event["inputs"],
                    "buffered": event["buffered"],
                }
            case "completed":
                self._parts |= {"trained": event["inputs"], "in_flight": event["in_flight"]}
            case "trained":
                return Step(
                    life=event["life"],
                    step=event["step"],
                    rows=sum(len(group["rows"]) for group in event["update"]),
                    seconds=event["seconds"],
                    **self._parts,
                )
        return None


def surviving_steps(events: Iterable[Mapping[str, Any]]) -> list[Step]:
    """The steps whose weights the last driver ended with, over all lives."""
    builder = StepBuilder()
    lineage: list[Step] = []
    for event in events:
        if event["event"] == "loaded":
            lineage = [step for step in lineage if step.step <= event["step"]]
        if step := builder.add(event):
            lineage.append(step)
    return lineage


@dataclass(frozen=True)
class Verdict:
    """The result; the lists hold input ids.

    Attributes:
        steps: Optimizer steps of the lineage.
        trained_once: Trained exactly once and due by now in the uninterrupted run.
        in_flight: Requested and unfinished at the end: no loss, so it is in an uninterrupted run.
        buffered: Pulled and not requested at the end: no loss either.
        lost: The uninterrupted run has trained it or holds it; this run neither trained nor holds it.
        repeated: Trained or held more often than in the uninterrupted run.
        ahead: Trained or held although the uninterrupted run has not come so far: the other side of a loss.
        same_pull_order: The pulls of all surviving steps, joined, are those of the uninterrupted run.
        trained_in_steps: Input id -> surviving steps that trained it.
        lost_where: Lost input id -> where it was at the checkpoint that was resumed from.
    """

    steps: int
    trained_once: list[int]
    in_flight: list[int]
    buffered: list[int]
    lost: list[int]
    repeated: list[int]
    ahead: list[int]
    same_pull_order: bool
    trained_in_steps: dict[int, list[int]] = field(default_factory=dict)
    lost_where: dict[int, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the promise was kept."""
        return not self.lost and not self.repeated and not self.ahead and self.same_pull_order

    def as_json(self) -> dict[str, Any]:
        """Plain values for the verdict file."""
        return {"holds": self.holds, **asdict(self)}


def judge(lineage: Sequence[Step], stream: Sequence[int]) -> Verdict:
    """Hold the lineage against `stream`, the uninterrupted pull order.

    Args:
        lineage: Surviving steps 1..N, in order.
        stream: Input ids in loader order; long enough for the run to stay inside.

    Raises:
        ValueError: The lineage is empty, has a gap, or `stream` is too short.
    """
    numbers = [step.step for step in lineage]
    if not lineage or numbers != list(range(1, len(lineage) + 1)):
        raise ValueError(f"The surviving steps are {numbers}, expected 1, 2, 3, ... without a gap.")
    last = lineage[-1]

    num_requested = ASYNC_BATCH + TRAIN_BATCH * (last.step - 1)
    num_pulled = -(-num_requested // TRAIN_BATCH) * TRAIN_BATCH
    if num_pulled > len(stream):
        raise ValueError(f"The uninterrupted stream has {len(stream)} inputs, {num_pulled} are needed.")
    due = Counter(stream[:num_pulled])

    trained = Counter(i for step in lineage for i in step.trained)
    reached = trained + Counter(last.in_flight) + Counter(last.buffered)
    surplus = reached - due
    # An input beyond what is due, reached once, was merely read early; anything else is a repetition.
    later = Counter(stream[num_pulled:])
    ahead = surplus & later

    lost = sorted((due - reached).elements())
    pulls = [i for step in lineage for i in step.pulled]
    return Verdict(
        steps=last.step,
        trained_once=[i for i in stream[:num_pulled] if trained[i] == 1 and reached[i] == 1],
        in_flight=last.in_flight,
        buffered=last.buffered,
        lost=lost,
        repeated=sorted((surplus - ahead).elements()),
        ahead=sorted(ahead.elements()),
        same_pull_order=pulls == list(stream[: len(pulls)]) and len(pulls) == num_requested,
        trained_in_steps={i: [step.step for step in lineage if i in step.trained] for i in sorted(reached | due)},
        lost_where=_where(lineage, lost),
    )


def _where(lineage: Sequence[Step], lost: Sequence[int]) -> dict[int, str]:
    """Tell where each lost input was when the step was saved that the next life resumed from."""
    where: dict[int, str] = {}
    for saved, resumed in pairwise(lineage):
        if saved.life != resumed.life:
            where |= {i: f"in flight at step {saved.step}" for i in saved.in_flight if i in lost}
            where |= {i: f"buffered at step {saved.step}" for i in saved.buffered if i in lost}
    return where
