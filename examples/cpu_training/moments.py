"""When the training driver is killed: once at a fixed place, or several times at random moments.

A moment is an event of the recorder, and a share of the time that usually goes by until the next one. The seed fixes
these choices; where exactly the trainer is at that moment is up to the machine, as it is with any kill.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpu_training.settings import SAVE_EVERY

STARTED = "started"
"""The one event that the recorder cannot write: the driver was started."""
PLACES: dict[str, tuple[str, ...]] = {
    "start": (STARTED, "trainer_imported", "workers_starting", "workers_ready"),
    "rollouts": ("pulled",),
    "step": ("completed",),
    "save": ("saving",),
}
"""Where a kill aims -> the events that it may follow. `workers_ready` is followed by the load of the checkpoint."""
REACHED = {
    STARTED: "while Ray started",
    "trainer_imported": "while the trainer was made",
    "workers_starting": "while the workers started",
    "workers_ready": "while the checkpoint was loaded",
    "loaded": "between load and first rollouts",
    "pulled": "in the rollouts of step {step}",
    "completed": "in the training of step {step}",
    "trained": "after the training of step {step}",
    "saving": "in the save of step {step}",
    "saved": "after the save of step {step}",
    "finished": "after the last step",
}
"""Last event before a kill -> what was going on."""
USUAL_S = {STARTED: 15.0, "trainer_imported": 10.0, "workers_starting": 15.0, "workers_ready": 0.5}
USUAL_S |= {"pulled": 6.0, "completed": 1.5, "saving": 0.2}
"""First guess of the seconds until the next event; replaced by what the run shows."""


@dataclass(frozen=True)
class Moment:
    """When one life of the driver is killed.

    Attributes:
        after: Event that must have happened.
        step: In this step of the trainer, or the first possible one if a life starts beyond it; a kill at a start comes
            in any case, one in a save in the first save from there.
        share: Of the usual time until the next event, 0 to 1.
    """

    after: str
    step: int
    share: float

    def step_of_life(self, resumed_from: int, last: int) -> int:
        """The step to kill in.

        Args:
            resumed_from: Step of the checkpoint that this life starts with, 0 without one.
            last: The last step of the run.
        """
        step = min(max(self.step, resumed_from + 1), last)
        return min(-(-step // SAVE_EVERY) * SAVE_EVERY, last) if self.after == "saving" else step


def draw(num_kills: int, last: int, seed: int) -> list[Moment]:
    """`num_kills` moments, spread over the places and over the steps 1 to `last`.

    Each place comes up before one is repeated, in random order; each kill gets its own part of the run. A kill before
    the first checkpoint is one of them.
    """
    rng = random.Random(seed)
    places: list[str] = []
    while len(places) < num_kills:
        places += rng.sample(list(PLACES), len(PLACES))
    moments: list[Moment] = []
    for i, place in enumerate(places[:num_kills]):
        first = 1 + i * last // num_kills
        step = rng.randint(first, max(first, (i + 1) * last // num_kills))
        moments.append(Moment(rng.choice(PLACES[place]), step, rng.random()))
    return moments


class Life:
    """One life of the driver as its events show it.

    Args:
        started: Unix time of the start.
        usual_s: Seconds from an event to the next one, kept up to date by all lives of a run.

    Attributes:
        event: The last one.
        time: Unix time of it.
        step: The trainer is in, or has last been in.
    """

    def __init__(self, started: float, usual_s: dict[str, float]) -> None:
        self._started = started
        self._usual_s = usual_s
        self.event = STARTED
        self.time = started
        self.step = 0
        self._resumed_from: int | None = None  # not known before it has loaded

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the next event."""
        self._usual_s[self.event] = event["time"] - self.time
        self.event, self.time = event["event"], event["time"]
        self.step = event.get("step", self.step)
        if event["event"] == "loaded":
            self._resumed_from = event["step"]

    def due(self, moment: Moment, last: int) -> float | None:
        """Unix time at which to kill, or None as long as that cannot be said.

        A life that resumes from the last step has nothing left to train: it is killed as soon as it has loaded.
        """
        if self.event == "loaded" and self._resumed_from == last:
            return self.time
        if self.event != moment.after:
            return None
        if self.event not in PLACES["start"] and self.step != moment.step_of_life(self._resumed_from or 0, last):
            return None
        return self.time + moment.share * self._usual_s[self.event]

    def end(self, killed: float) -> dict[str, Any]:
        """Where a kill at Unix time `killed` has hit: plain values for the verdict file."""
        return {
            "hit": REACHED[self.event].format(step=self.step),
            "seconds_after_start": round(killed - self._started, 1),
            "resumed_from": self._resumed_from,
        }
