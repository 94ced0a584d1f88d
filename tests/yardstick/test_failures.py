"""A failure is nothing worth keeping: it runs again at a resume, and no checkpoint ends a run twice for one reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.folder.stop_request import request_stop
from agl_async_ckpt.ledger.audit import audit
from tests.rig.agents import AgentPlan
from tests.rig.in_flight import (
    SiblingAgents,
    SiblingPlan,
    begin,
    end,
    ids_of,
    kill_after,
    prove_life_until_now,
    saved_state,
)
from tests.rig.life import extended_trainer, run_life
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.yardstick.scene import Scene, alone, assert_same, extended

OUTCOMES = pytest.mark.parametrize("outcome", ["failed", "silent"])
RUN = settings("20/2/6")


def ending_all(server: AglServer, outcome: str, then: Callable[[], None]) -> Callable[[str, int], bool]:
    """For `die_at`: everything in flight ends so while step 1 updates, and then something happens."""

    def here(point: str, step: int) -> bool:
        if (point, step) == ("updated", 1):
            end(server, *ids_of(server, 2, 3, 4, 5, state="running"), outcome=outcome)
            then()
        return False

    return here


@OUTCOMES
def test_what_had_ended_in_vain_at_a_stop_runs_again(server: AglServer, tmp_path: Path, outcome: str) -> None:
    """The four in flight; with agents that are well again the next start trains them."""
    truth = uninterrupted(RUN, server)
    begin(server, SiblingAgents())
    first = run_life(RUN, tmp_path, server.url, die_at=ending_all(server, outcome, lambda: request_stop(tmp_path, "x")))
    assert first.stopped == 1
    groups = saved_state(tmp_path, 1).carry_over
    assert [rollout.finished for group in groups for rollout in group.rollouts] == [None] * 4
    second = run_life(RUN, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert all(step.updated for step in second.steps.values())


@OUTCOMES
@pytest.mark.parametrize("state", ["alive", "restarted"])
def test_what_ended_in_vain_under_the_trainer_runs_again_after_its_death(
    server: AglServer, tmp_path: Path, outcome: str, state: str
) -> None:
    """Everything in flight, while step 1 updates; the trainer dies of it in step 2, and only then."""
    run = settings("40/2/6")
    truth = uninterrupted(run, server)
    begin(server, SiblingAgents())
    first = run_life(run, tmp_path, server.url, stop_after_step=1, recorder=None)
    end(server, *ids_of(server, 2, 3, 4, 5), outcome=outcome)
    prove_life_until_now(tmp_path)
    if state == "restarted":
        server.reset_store()
    second = run_life(run, tmp_path, server.url)
    assert_continues(truth, first, second)
    assert all(len(step.updated) == 2 for step in second.steps.values())


@OUTCOMES
def test_a_sibling_that_ended_in_vain_is_not_in_the_checkpoint(server: AglServer, tmp_path: Path, outcome: str) -> None:
    """Its request is: a resume runs it again, whether the server knows it or not."""
    plan = SiblingPlan(hold={3: 4}, early={3: 1}, early_outcome={3: outcome})
    begin(server, SiblingAgents(plan))
    kill_after(settings("16/2/6", rollout_n=2), tmp_path, server, 2)
    [group] = [
        group for group in saved_state(tmp_path, 2).carry_over if group.rollouts[0].enqueued["input"]["index"] == 3
    ]
    assert [rollout.finished for rollout in group.rollouts] == [None, None]
    assert saved_state(tmp_path, 2).counts["num_finished_rollouts"] == 0


@OUTCOMES
def test_within_one_life_an_end_in_vain_is_that_of_the_trainer_alone(
    server: AglServer, tmp_path: Path, outcome: str
) -> None:
    """It is trained as it is: a sibling without rows, and nothing runs twice."""
    plan = SiblingPlan(hold={3: 4}, early={3: 1}, early_outcome={3: outcome})
    scene = Scene(settings("16/2/6", rollout_n=2), plan)
    assert_same(alone(scene, server, tmp_path), extended(scene, server, tmp_path))


@OUTCOMES
@pytest.mark.parametrize("state", ["alive", "restarted"])
def test_inputs_that_never_bring_a_row_end_no_start_twice(
    server: AglServer, tmp_path: Path, outcome: str, state: str
) -> None:
    """All that was in flight, whatever agents do: the trainer alone would have forgotten it at the restart."""
    begin(server, SiblingAgents(AgentPlan(outcome=dict.fromkeys((2, 3, 4, 5), outcome))))
    kill_after(RUN, tmp_path, server, 1)
    if state == "restarted":
        server.reset_store()
    second = run_life(RUN, tmp_path, server.url)
    assert second.finished
    assert second.steps[2].updated == [6, 7]
    assert [text for text in second.warnings if "brought no row to train" in text]
    audited = audit(tmp_path)
    assert audited.holds
    assert not audited.lost


def test_inputs_that_never_bring_a_row_end_the_life_that_has_pulled_them(server: AglServer, tmp_path: Path) -> None:
    """As by the trainer alone: a run of which nothing can be trained must not go on to the end of its data."""
    plan = AgentPlan(outcome=dict.fromkeys((2, 3, 4, 5), "failed"))
    scene = Scene(RUN, plan)
    for run in (alone, extended):
        with pytest.raises(RuntimeError, match="zero training rows"):
            run(scene, server, tmp_path)


# --- what is held in memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extension", "num_held"),
    [({}, 2), ({"in_flight": "regenerate"}, 2), ({"in_flight": "drop"}, 0), ({"in_flight_max_bytes": 0}, 0)],
    ids=str,
)
def test_what_is_held_of_finished_siblings_is_bounded_in_memory(
    server: AglServer, tmp_path: Path, extension: dict[str, Any], num_held: int
) -> None:
    """Nothing is held, nor fetched, where nothing is to be kept; a lost server then costs their tokens, not a row."""
    plan = SiblingPlan(hold={3: 4, 4: 4}, early={3: 1, 4: 1})
    scene = Scene(settings("16/2/6", rollout_n=2, extension=extension), plan)
    truth = alone(scene, server, tmp_path)
    held: list[list[Any]] = []

    class Looking(extended_trainer()):
        def _train_step(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._train_step(*args, **kwargs)
            tracked = self._async_ckpt.life.keeper.groups.tracked
            kept = [tracked[item.rollout_id].finished for item in self._carry_over_rollouts]
            held.append([finished for finished in kept if finished is not None])
            if self.global_steps == 2:
                server.reset_store()
            return result

    begin(server, SiblingAgents(plan))
    life = run_life(scene.run, tmp_path / "ours", server.url, trainer_cls=Looking)
    assert len(held[1]) == num_held
    assert [sorted(step.updated) for step in life.steps.values()] == [
        sorted(step.updated) for step in truth.steps.values()
    ]
    assert server.agents.num_starts(3) == (3 if num_held else 4)
