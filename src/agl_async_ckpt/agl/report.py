"""What a resume restored: one paragraph, and the numbers for the trainer's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agl_async_ckpt.agl.in_flight.keeper import Outcome
from agl_async_ckpt.folder.decision import Position, position_text
from agl_async_ckpt.state import InputState
from agl_async_ckpt.words import plural


@dataclass(frozen=True)
class ResumeReport:
    """What was put back from a checkpoint, and what happened to its in-flight rollouts.

    Attributes:
        step_dir: The checkpoint folder.
        reason: Why this one, as in `Decision`.
        state: What it holds.
        outcome: What happened to the rollouts in flight.
        num_waiting: Prompt groups that wait until there is room.
    """

    step_dir: Path
    reason: str
    state: InputState
    outcome: Outcome
    num_waiting: int = 0

    def restored_text(self) -> str:
        """Return what the load put back: the text that `plan` prints, and how many groups wait for room."""
        waiting = f" {plural(self.num_waiting, 'of the groups waits', 'of the groups wait')} for room."
        text = position_text(self.step_dir, self.reason, Position.of(self.state))
        return text + (waiting if self.num_waiting else "")

    def metrics(self) -> dict[str, int]:
        """Return the counts under their metric names."""
        return {
            "num_restored_groups": self.state.num_in_flight,
            "num_adopted_rollouts": len(self.outcome.adopted),
            "num_reused_finished_rollouts": len(self.outcome.reused),
            "num_recreated_rollouts": len(self.outcome.recreated),
            "num_rerun_rollouts": len(self.outcome.rerun),
            "num_reclaimed_rollouts": len(self.outcome.reclaimed),
        }
