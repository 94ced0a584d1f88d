"""What a resume says and counts."""

from __future__ import annotations

from pathlib import Path

from agl_async_ckpt.checkpoint.report import ResumeReport
from agl_async_ckpt.in_flight.settle import Outcome


def report(**changes: int) -> ResumeReport:
    """Of a resume from step 40."""
    values = {"global_step": 40, "epoch": 2, "num_buffered": 3, "num_groups": 12, **changes}
    return ResumeReport(step_dir=Path("out/global_step_40"), **values)


OUTCOME = Outcome(
    adopted=["a1", "a2", "a3", "a4"], reused=["u1"], recreated=["c1", "c2", "c3"], rerun=[], reclaimed=["o1", "o2"]
)


def test_restored_text_says_where_from_and_what() -> None:
    """In one sentence; waiting groups are named only if there are any."""
    assert report().restored_text() == (
        "Resumed the input stream from out/global_step_40: step 40, epoch 2, 3 buffered inputs and 12 prompt groups in "
        "flight put back."
    )
    assert "12 prompt groups in flight (5 wait for room) put back" in report(num_waiting=5).restored_text()


def test_in_flight_text_has_counts_and_the_first_ids() -> None:
    """Three ids each, and a sign that there are more."""
    resumed = report()
    resumed.outcome = OUTCOME
    assert resumed.in_flight_text() == (
        "In-flight rollouts of step 40: 4 (a1, a2, a3, …) adopted, 1 (u1) finished before and reused, 3 (c1, c2, c3) "
        "created again under new ids, 0 run again because they ended without a trainer; 2 (o1, o2) of this run that no "
        "checkpoint holds were removed from the server."
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
