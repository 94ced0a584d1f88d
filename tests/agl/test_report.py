"""What a resume says and counts."""

from __future__ import annotations

from pathlib import Path

from agl_async_ckpt.agl.in_flight.settle import Outcome
from agl_async_ckpt.agl.report import ResumeReport
from agl_async_ckpt.folder.decision import Position


def report(**changes: int) -> ResumeReport:
    """Of a resume from step 40."""
    counts = {
        "num_buffered_inputs": 3,
        "num_carry_over_groups": 12,
        "num_carry_over_rollouts": 48,
        "num_finished_rollouts": 20,
    }
    return ResumeReport(Path("out/global_step_40"), "the newest complete checkpoint", Position(40, 2, counts | changes))


OUTCOME = Outcome(
    adopted=["a1", "a2", "a3", "a4"], reused=["u1"], recreated=["c1", "c2", "c3"], rerun=[], reclaimed=["o1", "o2"]
)


def test_restored_text_says_where_from_why_and_what() -> None:
    """In one sentence; waiting groups are named only if there are any."""
    said = (
        "Resuming the input stream from out/global_step_40, the newest complete checkpoint: step 40, epoch 2, "
        "3 buffered inputs and 12 prompt groups in flight (48 rollouts, 20 finished)."
    )
    resumed = report()
    assert resumed.restored_text() == said
    resumed.num_waiting = 5
    assert resumed.restored_text() == f"{said} 5 of the groups wait for room."
    resumed.num_waiting = 1
    assert resumed.restored_text() == f"{said} 1 of the groups waits for room."


def test_restored_text_counts_one_as_one_and_leaves_out_rollouts_where_there_are_none() -> None:
    """A sentence that people read."""
    none = report(num_buffered_inputs=1, num_carry_over_groups=0, num_carry_over_rollouts=0, num_finished_rollouts=0)
    assert none.restored_text().endswith(": step 40, epoch 2, 1 buffered input and 0 prompt groups in flight.")
    one = report(num_buffered_inputs=0, num_carry_over_groups=1, num_carry_over_rollouts=1, num_finished_rollouts=0)
    assert one.restored_text().endswith("0 buffered inputs and 1 prompt group in flight (1 rollout, 0 finished).")


def test_in_flight_text_has_counts_and_the_first_ids() -> None:
    """Three ids each, and a sign that there are more."""
    resumed = report()
    resumed.outcome = OUTCOME
    assert resumed.in_flight_text() == (
        "In-flight rollouts of step 40: 4 (a1, a2, a3, …) adopted, 1 (u1) finished before and reused, 3 (c1, c2, c3) "
        "created again under new ids, 0 run again because they failed or ended without a trainer; 2 (o1, o2) of "
        "this run that no checkpoint holds were removed from the server."
    )


def test_metrics_count_each_kind_under_its_name() -> None:
    """The names that dashboards use."""
    resumed = report()
    resumed.outcome = Outcome(["a"] * 5, ["b"] * 4, ["c"] * 3, ["d"] * 2, ["e"])
    assert resumed.metrics() == {
        "num_restored_groups": 12,
        "num_adopted_rollouts": 5,
        "num_reused_finished_rollouts": 4,
        "num_recreated_rollouts": 3,
        "num_rerun_rollouts": 2,
        "num_reclaimed_rollouts": 1,
    }


def test_reports_do_not_share_their_lists() -> None:
    """A second resume in a process begins at zero."""
    first, second = report(), report()
    first.outcome.rerun.append("x")
    assert second.outcome.rerun == []
