"""The trainer is asked to stop by a SIGTERM to its whole process group: what has to be true when it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agl_async_ckpt.exceptions import EXIT_STOPPED
from agl_async_ckpt.folder.steps import list_steps, read_tracker


@dataclass(frozen=True)
class Preemption:
    """How a training ended that got a SIGTERM in the middle of a step.

    Attributes:
        step: In which the signal came.
        exit_code: Of the driver.
        last_step: The last step that was trained in this life.
        num_saves: How often the step was saved.
        complete: Its checkpoint is complete, and the tracker names it.
        rollouts_left: Rollouts on the server after the end.
        step_s: Duration of the step, without the save.
        to_step_end_s: From the signal to the end of the step.
        save_s: From there to the end of the save: metrics and the save.
        to_exit_s: From there to the end of the driver: rollouts are removed, Ray is shut down.
    """

    step: int
    exit_code: int
    last_step: int
    num_saves: int
    complete: bool
    rollouts_left: int
    step_s: float
    to_step_end_s: float
    save_s: float
    to_exit_s: float

    @property
    def problems(self) -> list[str]:
        """What is not as it has to be."""
        checks = {
            f"the exit code is {self.exit_code}, not {EXIT_STOPPED}": self.exit_code == EXIT_STOPPED,
            f"it trained on to step {self.last_step}": self.last_step == self.step,
            f"step {self.step} was saved {self.num_saves} times": self.num_saves == 1,
            f"the checkpoint of step {self.step} is not complete": self.complete,
            f"{self.rollouts_left} rollouts are left on the server": self.rollouts_left == 0,
        }
        return [text for text, holds in checks.items() if not holds]

    def __str__(self) -> str:
        total_s = self.to_step_end_s + self.save_s + self.to_exit_s
        return (
            f"stopped with exit code {self.exit_code}, {total_s:.1f} s after the signal: {self.to_step_end_s:.1f} s "
            f"for the rest of the step (which took {self.step_s:.1f} s), {self.save_s:.1f} s for the save, "
            f"{self.to_exit_s:.1f} s until the driver had ended with Ray"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for the verdict file."""
        return {**asdict(self), "problems": self.problems}


def look(
    events: Sequence[Mapping[str, Any]],
    *,
    step: int,
    signalled: float,
    ended: float,
    exit_code: int,
    output_dir: Path,
    rollouts_left: int,
) -> Preemption:
    """Put together what is known of a life that was asked to stop.

    Args:
        events: Of that life, in order.
        step: In which the signal was sent.
        signalled: Unix time of the signal.
        ended: Unix time at which the driver was gone.
        exit_code: Of the driver.
        output_dir: The trainer's.
        rollouts_left: On the server.
    """
    trained = [event for event in events if event["event"] == "trained"]
    saved = [event for event in events if event["event"] == "saved" and event["step"] == step]
    last = next((event for event in trained if event["step"] == step), {"time": ended, "seconds": 0.0})
    saved_at = saved[-1]["time"] if saved else ended
    complete = {info.step for info in list_steps(output_dir, full=True) if info.complete}
    return Preemption(
        step=step,
        exit_code=exit_code,
        last_step=max((event["step"] for event in trained), default=0),
        num_saves=len(saved),
        complete=step in complete and read_tracker(output_dir) == step,
        rollouts_left=rollouts_left,
        step_s=last["seconds"],
        to_step_end_s=last["time"] - signalled,
        save_s=saved_at - last["time"],
        to_exit_s=ended - saved_at,
    )
