"""The sizes of the demo, in one place: what the trainer, the uninterrupted stream and the verdict must agree on.

In the words of the verdict: B inputs are trained per step, A are kept requested. A is no multiple of B on purpose, so
that a request cuts a loader batch in two and a buffered tail exists at every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN_BATCH = 2
"""B: inputs trained per step, and rows per loader batch."""
ASYNC_BATCH = 5
"""A: inputs requested at a time; A - B of them are in flight at every checkpoint."""
ROLLOUTS_PER_INPUT = 2
SAVE_EVERY = 3
"""Steps between checkpoints: more than 1, so that the kill also throws trained steps away."""
SEED = 7
SLOW_EVERY = 3
"""Every third input is slow: it asks the model several times and waits in between, like an agent that uses tools."""

EXAMPLES_DIR = Path(__file__).resolve().parents[1]
RUNS_DIR = Path(__file__).resolve().parent / "runs"

RUN_DIR_VARIABLE = "AGL_DEMO_RUN_DIR"
"""Environment variable that tells every process of a run where to record events."""
LIFE_VARIABLE = "AGL_DEMO_LIFE"
"""Environment variable with the number of the training driver: all but the last are killed."""


@dataclass(frozen=True)
class Plan:
    """When the run saves, is killed and ends.

    Attributes:
        steps: Optimizer steps of the whole run.
        kill_after_step: The driver is killed once this step is trained and the next one has requested its inputs; None
            to kill at random moments.
        kills: How often it is killed: once, more often at random moments, or never.
        seed: Of the random moments.
        preempt: It is not killed, but asked to stop in the step `kill_after_step`, with a SIGTERM to its process group.
    """

    steps: int
    kill_after_step: int | None
    kills: int = 1
    seed: int = 0
    preempt: bool = False

    def __post_init__(self) -> None:
        if self.steps < SAVE_EVERY + 2:
            raise ValueError(f"--steps must be {SAVE_EVERY + 2} or more, got {self.steps}.")
        if self.kill_after_step is None:
            return
        if self.kills > 1:
            raise ValueError(f"--kill-after-step is for one kill, --kills is {self.kills}.")
        if not SAVE_EVERY <= self.kill_after_step < self.steps:
            raise ValueError(
                f"--kill-after-step must be from {SAVE_EVERY} (the first checkpoint) to {self.steps - 1} "
                f"(the step before the last), got {self.kill_after_step}."
            )

    def uninterrupted(self) -> Plan:
        """The same run without kill or stop."""
        return Plan(self.steps, kill_after_step=None, kills=0)

    @property
    def num_inputs(self) -> int:
        """Rows of the dataset: one epoch is enough even for a run that skips inputs and reads further."""
        rows = TRAIN_BATCH * self.steps + 2 * ASYNC_BATCH
        return -(-rows // TRAIN_BATCH) * TRAIN_BATCH


def dataset_rows(num_inputs: int) -> list[dict[str, Any]]:
    """The dataset: `num_inputs` rows, each with its id and whether its agents are slow.

    agent-lightning copies `extra_info.index` to the column `index`, which lets the ledger name positions.
    """
    return [
        {
            "input_id": i,
            "question": f"{i}: say a vowel",
            "slow": i % SLOW_EVERY == 0,
            "extra_info": {"index": i},
        }
        for i in range(num_inputs)
    ]
