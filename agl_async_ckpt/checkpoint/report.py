"""The text that says what a resume restored: one paragraph, counts and the first ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agl_async_ckpt.in_flight.settle import Outcome

MAX_IDS = 3


@dataclass
class ResumeReport:
    """What was put back from a checkpoint, and what happened to its in-flight rollouts.

    Attributes:
        step_dir: The checkpoint folder.
        global_step: Its step.
        epoch: Epoch that the input stream is in, 1-based.
        num_buffered: Inputs put back into the buffered batch.
        num_groups: Prompt groups put back as in flight, `num_waiting` of them until there is room.
        outcome: What happened to the rollouts in flight.
    """

    step_dir: Path
    global_step: int
    epoch: int
    num_buffered: int
    num_groups: int
    num_waiting: int = 0
    outcome: Outcome = field(default_factory=Outcome)

    def restored_text(self) -> str:
        """Return what the load put back."""
        waiting = f" ({self.num_waiting} wait for room)" if self.num_waiting else ""
        return (
            f"Resumed the input stream from {self.step_dir}: step {self.global_step}, epoch {self.epoch}, "
            f"{self.num_buffered} buffered inputs and {self.num_groups} prompt groups in flight{waiting} put back."
        )

    def in_flight_text(self) -> str:
        """Return what happened to the rollouts in flight."""
        outcome = self.outcome
        return (
            f"In-flight rollouts of step {self.global_step}: {_count(outcome.adopted)} adopted, "
            f"{_count(outcome.reused)} finished before and reused, {_count(outcome.recreated)} created again under new "
            f"ids, {_count(outcome.rerun)} run again because they ended without a trainer; "
            f"{_count(outcome.reclaimed)} of this run that no checkpoint holds were removed from the server."
        )

    def metrics(self) -> dict[str, int]:
        """Return the counts under their metric names."""
        return {
            "num_restored_groups": self.num_groups,
            "num_adopted_rollouts": len(self.outcome.adopted),
            "num_reused_finished_rollouts": len(self.outcome.reused),
            "num_recreated_rollouts": len(self.outcome.recreated),
            "num_rerun_rollouts": len(self.outcome.rerun),
            "num_reclaimed_rollouts": len(self.outcome.reclaimed),
        }


def _count(ids: list[str]) -> str:
    shown = ", ".join(ids[:MAX_IDS])
    more = ", …" if len(ids) > MAX_IDS else ""
    return f"{len(ids)} ({shown}{more})" if ids else "0"
