"""What a resume says and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl.in_flight.keeper import Outcome
from agl_async_ckpt.agl.report import ResumeReport


class Saved:
    """A position that was saved, by its numbers."""

    global_step, epoch = 40, 2

    def __init__(self, **changes: int) -> None:
        counts = {
            "num_buffered_inputs": 3,
            "num_carry_over_groups": 12,
            "num_carry_over_rollouts": 48,
            "num_finished_rollouts": 20,
        }
        self.counts = counts | changes
        self.num_in_flight = self.counts["num_carry_over_groups"]


def report(num_waiting: int = 0, **changes: int) -> ResumeReport:
    """The report of a resume from step 40."""
    saved: Any = Saved(**changes)
    folder, reason = Path("out/global_step_40"), "the newest complete checkpoint"
    return ResumeReport(folder, reason, saved, Outcome(), num_waiting=num_waiting)


def test_restored_text_says_where_from_why_and_what() -> None:
    """In one sentence; waiting groups are named only if there are any."""
    said = (
        "Resuming the input stream from out/global_step_40, the newest complete checkpoint: step 40, epoch 2, "
        "3 buffered inputs and 12 prompt groups in flight (48 rollouts, 20 finished)."
    )
    assert report().restored_text() == said
    assert report(5).restored_text() == f"{said} 5 of the groups wait for room."
    assert report(1).restored_text() == f"{said} 1 of the groups waits for room."


def test_restored_text_counts_one_as_one_and_leaves_out_rollouts_where_there_are_none() -> None:
    """A sentence that people read."""
    none = report(num_buffered_inputs=1, num_carry_over_groups=0, num_carry_over_rollouts=0, num_finished_rollouts=0)
    assert none.restored_text().endswith(": step 40, epoch 2, 1 buffered input and 0 prompt groups in flight.")
    one = report(num_buffered_inputs=0, num_carry_over_groups=1, num_carry_over_rollouts=1, num_finished_rollouts=0)
    assert one.restored_text().endswith("0 buffered inputs and 1 prompt group in flight (1 rollout, 0 finished).")


def test_metrics_count_each_kind_under_its_name() -> None:
    """The names that dashboards use."""
    resumed = replace(report(), outcome=Outcome(["a"] * 5, ["b"] * 4, ["c"] * 3, ["d"] * 2, ["e"]))
    assert resumed.metrics() == {
        "num_restored_groups": 12,
        "num_adopted_rollouts": 5,
        "num_reused_finished_rollouts": 4,
        "num_recreated_rollouts": 3,
        "num_rerun_rollouts": 2,
        "num_reclaimed_rollouts": 1,
    }
