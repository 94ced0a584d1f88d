"""The text that says what a resume restored: one paragraph, counts and the first ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agl_async_ckpt.agl.in_flight.settle import Outcome
from agl_async_ckpt.folder.decision import Position, position_text
from agl_async_ckpt.words import plural

MAX_IDS = 3


@dataclass
class ResumeReport:
    """What was put back from a checkpoint, and what happened to its in-flight rollouts.

    Attributes:
        step_dir: The checkpoint folder.
        reason: Why this one, as in `Decision`.
        position: What it holds.
        num_waiting: Prompt groups that wait until there is room.
        outcome: What happened to the rollouts in flight.
    """

    step_dir: Path
    reason: str
    position: Position
    num_waiting: int = 0
    outcome: Outcome = field(default_factory=Outcome)

    def restored_text(self) -> str:
        """Return what the load put back: the text that `plan` prints, and how many groups wait for room."""
        waiting = f" {plural(self.num_waiting, 'of the groups waits', 'of the groups wait')} for room."
        return position_text(self.step_dir, self.reason, self.position) + (waiting if self.num_waiting else "")

    def in_flight_text(self) -> str:
        """Return what happened to the rollouts in flight."""
        outcome = self.outcome
        return (
            f"In-flight rollouts of step {self.position.global_step}: {_count(outcome.adopted)} adopted, "
            f"{_count(outcome.reused)} finished before and reused, {_count(outcome.recreated)} created again under new "
            f"ids, {_count(outcome.rerun)} run again because they failed or ended without a trainer; "
            f"{_count(outcome.reclaimed)} of this run that no checkpoint holds were removed from the server."
        )

    def metrics(self) -> dict[str, int]:
        """Return the counts under their metric names."""
        return {
            "num_restored_groups": self.position.counts["num_carry_over_groups"],
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
