"""After a resume: each row of the table in the module's docstring, and what may be deleted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt.agl.in_flight.carry_over import RUN_ID_KEY, InFlight, Tracked
from agl_async_ckpt.agl.in_flight.settle import Outcome, Policy, decide, is_adoptable, reclaimable
from agl_async_ckpt.folder.liveness import Span
from agl_async_ckpt.state import FinishedRollout

LIVES = (Span(10.0, 20.0), Span(30.0, 40.0))
OWN = Policy(own_folder=True, lives=LIVES)
KEPT = FinishedRollout({"rollout_id": "r", "status": {"state": "succeeded"}}, ({"event_type": "reward", "data": {}},))


def record(
    state: str, *, created: float = 11.0, updated: float = 12.0, run_id: str | None = "run", **metadata: Any
) -> dict[str, Any]:
    """What the server says of a rollout."""
    if run_id is not None:
        metadata[RUN_ID_KEY] = run_id
    return {"status": {"state": state, "created_at": created, "updated_at": updated}, "metadata": metadata}


def restored(*rollout_ids: str, finished: FinishedRollout | None = None) -> tuple[InFlight, list[Any]]:
    """In-flight rollouts about which the server was not asked yet."""
    in_flight = InFlight(run_id="run")
    for rollout_id in rollout_ids:
        in_flight.tracked[rollout_id] = Tracked(request={"input": 1}, finished=finished)
        in_flight.undecided.add(rollout_id)
    return in_flight, [SimpleNamespace(rollout_id=rollout_id) for rollout_id in rollout_ids]


def outcome_of(
    record: dict[str, Any] | None, policy: Policy, finished: FinishedRollout | None = None
) -> tuple[str, Tracked, bool]:
    """What happens to one rollout: its kind, what is then known of it, and whether it is to be created."""
    in_flight, items = restored("r", finished=finished)
    outcome = decide(in_flight, items, {} if record is None else {"r": record}, policy)
    kinds = [name for name, ids in vars(outcome).items() if ids == ["r"]]
    assert sum(len(ids) for ids in vars(outcome).values()) == 1
    assert in_flight.undecided == set()
    return kinds[0], in_flight.tracked["r"], "r" in in_flight.to_create


GAP, BEFORE, AFTER = 25.0, 5.0, 45.0


@pytest.mark.parametrize(
    ("state", "created", "updated", "adopt", "kind"),
    [
        # It ended while a trainer was there.
        ("succeeded", 11, 12, "all", "adopted"),
        ("succeeded", 11, 20, "all", "adopted"),
        ("failed", 11, 12, "all", "rerun"),
        ("failed", 31, 39, "finished_before_death", "rerun"),
        ("succeeded", 31, 39, "finished_before_death", "adopted"),
        # It ended when nobody was there: before the first life, between two, after the last.
        *((state, 11, GAP, "all", "rerun") for state in ("succeeded", "failed")),
        *((state, 31, AFTER, "all", "rerun") for state in ("succeeded", "failed")),
        *((state, BEFORE, BEFORE, "all", "rerun") for state in ("succeeded", "failed")),
        ("succeeded", 31, 40.01, "all", "rerun"),
        # It spans the gap, and ended under the second trainer.
        ("succeeded", 11, 35, "all", "adopted"),
        ("failed", 11, 35, "all", "rerun"),
        ("succeeded", 11, 35, "finished_before_death", "rerun"),
        ("failed", GAP, 35, "all", "rerun"),
        # It has not ended.
        *((state, 11, 12, "all", "adopted") for state in ("queuing", "running")),
        *((state, 11, 12, "finished_before_death", "rerun") for state in ("queuing", "running")),
    ],
)
def test_rollout_that_the_server_knows(state: str, created: float, updated: float, adopt: Any, kind: str) -> None:
    """Adopted if its end is its own; else run again, once."""
    policy = Policy(own_folder=True, adopt=adopt, lives=LIVES)
    got, known, created_again = outcome_of(record(state, created=created, updated=updated), policy)
    assert got == kind
    assert created_again == (kind == "rerun")
    assert known.doubted == (kind == "adopted"), "until it is seen that something can be trained from it"
    assert not known.served


@pytest.mark.parametrize("updated", [12.0, GAP, AFTER])
@pytest.mark.parametrize("adopt", ["all", "finished_before_death"])
def test_success_that_the_checkpoint_holds_is_reused(updated: float, adopt: Any) -> None:
    """It ended before the checkpoint, and the server still has its events."""
    policy = Policy(own_folder=True, adopt=adopt, lives=LIVES)
    kind, known, created_again = outcome_of(record("succeeded", updated=updated), policy, KEPT)
    assert (kind, created_again, known.served) == ("reused", False, False)


@pytest.mark.parametrize("is_known", [True, False], ids=["server knows it", "server does not"])
def test_failure_that_an_older_checkpoint_holds_runs_again(is_known: bool) -> None:
    """Earlier versions of this package kept failures, too."""
    failed = FinishedRollout({"rollout_id": "r", "status": {"state": "failed"}})
    kind, known, created_again = outcome_of(record("failed") if is_known else None, OWN, failed)
    assert (kind, created_again, known.served) == ("rerun" if is_known else "recreated", True, False)


def test_end_that_only_the_checkpoint_holds_is_served() -> None:
    """The server was restarted, or the group was trained and deleted after this checkpoint."""
    kind, known, created_again = outcome_of(None, OWN, KEPT)
    assert (kind, created_again, known.served) == ("reused", False, True)


def test_rollout_that_nobody_holds_is_created() -> None:
    """Its request is all there is."""
    kind, known, created_again = outcome_of(None, OWN)
    assert (kind, created_again, known.served) == ("recreated", True, False)


@pytest.mark.parametrize("state", ["queuing", "running", "succeeded", "failed"])
@pytest.mark.parametrize("finished", [None, KEPT], ids=["not finished", "finished"])
def test_fork_looks_at_nothing_on_the_server(state: str, finished: FinishedRollout | None) -> None:
    """The parent may be alive: what the server holds is its own, down to the ids."""
    kind, known, created_again = outcome_of(record(state), Policy(own_folder=False, lives=LIVES), finished)
    assert kind == ("reused" if finished else "recreated")
    assert known.served is (finished is not None)
    assert created_again is (finished is None)


def test_without_a_proof_of_life_every_end_is_doubted() -> None:
    """A lost file costs work, not correctness."""
    policy = Policy(own_folder=True)
    assert outcome_of(record("succeeded"), policy)[0] == "rerun"
    assert outcome_of(record("failed"), policy)[0] == "rerun"
    assert outcome_of(record("running"), policy)[0] == "adopted"


def test_what_is_decided_stays_decided() -> None:
    """Fresh siblings, and rollouts of this life, are not asked about."""
    in_flight, items = restored("old")
    fresh = SimpleNamespace(rollout_id="fresh")
    in_flight.tracked["fresh"] = Tracked(request={})
    in_flight.to_create.add("fresh")
    records = {"fresh": record("failed", updated=GAP)}
    assert decide(in_flight, [*items, fresh], records, OWN) == Outcome(recreated=["old"])
    assert decide(in_flight, [*items, fresh], records, OWN) == Outcome()
    assert in_flight.to_create == {"old", "fresh"}


def test_outcome_keeps_the_order_of_the_groups() -> None:
    """So that the report's first ids are the oldest."""
    in_flight, items = restored("c", "a", "b")
    assert decide(in_flight, items, {}, OWN).recreated == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("state", "created", "updated", "adopt", "believed"),
    [
        ("succeeded", GAP, 31, "all", True),
        ("succeeded", GAP, 31, "finished_before_death", False),
        ("succeeded", 10, 20, "finished_before_death", True),
        ("succeeded", 9.9, 20, "finished_before_death", False),
        ("succeeded", 10, 20.1, "all", False),
        ("failed", 10, 20, "all", False),
    ],
)
def test_end_is_trusted_by_the_lives_it_lies_in(
    state: str, created: float, updated: float, adopt: Any, believed: bool
) -> None:
    """Bounds included."""
    status = {"state": state, "created_at": created, "updated_at": updated}
    assert is_adoptable(status, False, Policy(own_folder=True, adopt=adopt, lives=LIVES)) is believed


# --- what may be deleted -------------------------------------------------------------------------------------------


def test_only_what_is_of_this_run_and_in_no_group_is_reclaimed() -> None:
    """Another run's, nobody's, and what is waited for stay; validations and replaced rollouts go."""
    in_flight, items = restored("waited", "replaced")
    in_flight.to_create.add("replaced")
    records = {
        "waited": record("running"),
        "replaced": record("failed"),
        "orphan": record("queuing"),
        "validation": record("succeeded"),
        "others": record("running", run_id="other"),
        "nobodys": record("running", run_id=None),
        "untagged": {"status": record("running")["status"]},
        "null": {**record("running"), "metadata": None},
    }
    assert reclaimable(in_flight, items, records, OWN) == ["replaced", "orphan", "validation"]


@pytest.mark.parametrize("own_folder", [True, False])
def test_nothing_is_reclaimed_where_it_is_not_wanted(own_folder: bool) -> None:
    """Not even what is replaced."""
    in_flight, items = restored("a")
    in_flight.to_create.add("a")
    policy = Policy(own_folder=own_folder, reclaim=False)
    assert reclaimable(in_flight, items, {"a": record("failed"), "b": record("running")}, policy) == []


def test_fork_reclaims_what_an_earlier_start_of_it_left() -> None:
    """Started again with the same path, it begins at its parent's checkpoint once more; the parent's stay."""
    in_flight, items = restored("a")
    in_flight.to_create.add("a")
    records = {"a": record("running", run_id="parent"), "b": record("running"), "c": record("queuing", run_id=None)}
    assert reclaimable(in_flight, items, records, Policy(own_folder=False)) == ["b"]


def test_run_without_an_id_reclaims_nothing_untagged() -> None:
    """An empty id matches no missing tag."""
    in_flight = InFlight(run_id="")
    assert reclaimable(in_flight, [], {"a": record("running", run_id=None)}, OWN) == []


@pytest.mark.parametrize(
    ("state", "rewarded", "hooks_reward", "kind"),
    [
        ("succeeded", True, False, "reused"),
        ("succeeded", False, True, "reused"),
        ("failed", True, False, "recreated"),
        ("succeeded", False, False, "recreated"),
    ],
)
def test_success_without_a_reward_is_not_served(state: str, rewarded: bool, hooks_reward: bool, kind: str) -> None:
    """Its agent posts the reward later, to a server that is gone: training it with the fill-in value would be wrong."""
    events = ({"event_type": "reward", "data": {"value": 1.0}},) if rewarded else ()
    finished = FinishedRollout({"rollout_id": "r", "status": {"state": state}}, events, events)
    policy = Policy(own_folder=True, lives=LIVES, hooks_reward=hooks_reward)
    assert outcome_of(None, policy, finished)[0] == kind
