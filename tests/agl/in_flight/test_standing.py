"""What becomes of a rollout: the table of the module's docstring, row by row, and the cases that it sums up."""

from __future__ import annotations

from typing import Any

import pytest

from agl_async_ckpt.agl.in_flight import standing
from agl_async_ckpt.agl.in_flight.standing import Fate, Policy, Standing, fate_at_start, fate_later, is_adoptable
from agl_async_ckpt.folder.liveness import Span
from agl_async_ckpt.state import FinishedRollout

LIVES = (Span(10.0, 20.0), Span(30.0, 40.0))
OWN = Policy(own_folder=True, lives=LIVES)
REWARD = {"event_type": "reward", "data": {"value": 1.0}}
GAP, BEFORE, AFTER = 25.0, 5.0, 45.0


def record(state: str, *, created: float = 11.0, updated: float = 12.0) -> dict[str, Any]:
    """What the server says of a rollout."""
    return {"status": {"state": state, "created_at": created, "updated_at": updated}}


def ended(state: str, *events: dict[str, Any]) -> FinishedRollout:
    """A rollout whose end was kept."""
    return FinishedRollout({"rollout_id": "r", "status": {"state": state}}, events)


ON_THE_SERVER = {
    "succeeded while a trainer was there": [record("succeeded"), record("succeeded", updated=35)],
    "succeeded while no trainer was there": [record("succeeded", updated=at) for at in (BEFORE, GAP, AFTER)],
    "succeeded": [record("succeeded", updated=at) for at in (12.0, GAP, AFTER)],
    "failed": [record("failed", updated=at) for at in (12.0, 35.0, GAP)],
    "has not ended": [record("queuing"), record("running")],
    "does not know it": [None],
    "knows it": [record(state) for state in ("queuing", "running", "succeeded", "failed")],
}
KEPT = {
    "its request": None,
    "its end": ended("succeeded", REWARD),
    "a success with its reward": ended("succeeded", REWARD),
    "a success without a reward": ended("succeeded"),
    "a failure": ended("failed"),
}
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (standing.__doc__ or "").splitlines()
    if line.startswith("| ") and not line.startswith("| when")
]


def test_table_tells_every_place_and_everything_that_may_be_kept() -> None:
    """Nothing that the cases below know is left out of it."""
    assert {server for _, server, _, _ in ROWS} == ON_THE_SERVER.keys()
    assert {kept for _, _, kept, _ in ROWS} == KEPT.keys()
    assert {fate for *_, fate in ROWS} == {fate.value for fate in Fate}


@pytest.mark.parametrize(("when", "server", "kept", "fate"), ROWS)
def test_row_of_the_table(when: str, server: str, kept: str, fate: str) -> None:
    """Each record that a row is about has the fate of that row."""
    for found in ON_THE_SERVER[server]:
        decided = fate_at_start(KEPT[kept], found, OWN) if when == "at a start" else fate_later(KEPT[kept], found)
        assert decided.value == fate


@pytest.mark.parametrize(
    ("fate", "stands"),
    [
        (Fate.ADOPTED, Standing.ON_SERVER),
        (Fate.REUSED, Standing.ON_SERVER),
        (Fate.SERVED, Standing.SERVED),
        (Fate.CREATED, Standing.TO_CREATE),
        (Fate.RERUN, Standing.TO_CREATE),
    ],
)
def test_a_fate_says_where_a_rollout_stands(fate: Fate, stands: Standing) -> None:
    """One standing each."""
    assert fate.standing is stands


@pytest.mark.parametrize(
    ("state", "created", "updated", "adopt", "fate"),
    [
        # It ended while a trainer was there, bounds included.
        ("succeeded", 11, 20, "all", Fate.ADOPTED),
        ("failed", 31, 39, "finished_before_death", Fate.RERUN),
        ("succeeded", 31, 39, "finished_before_death", Fate.ADOPTED),
        ("succeeded", 31, 40.01, "all", Fate.RERUN),
        # It spans the gap, and ended under the second trainer.
        ("succeeded", 11, 35, "all", Fate.ADOPTED),
        ("failed", 11, 35, "all", Fate.RERUN),
        ("succeeded", 11, 35, "finished_before_death", Fate.RERUN),
        ("failed", GAP, 35, "all", Fate.RERUN),
        # It has not ended.
        *((state, 11, 12, "finished_before_death", Fate.RERUN) for state in ("queuing", "running")),
    ],
)
def test_rollout_that_the_server_knows(state: str, created: float, updated: float, adopt: Any, fate: Fate) -> None:
    """Adopted if its end is its own; else run again, once."""
    policy = Policy(own_folder=True, adopt=adopt, lives=LIVES)
    assert fate_at_start(None, record(state, created=created, updated=updated), policy) is fate


@pytest.mark.parametrize("adopt", ["all", "finished_before_death"])
def test_success_that_the_checkpoint_holds_is_reused(adopt: Any) -> None:
    """It ended before the checkpoint, and the server still has its events."""
    policy = Policy(own_folder=True, adopt=adopt, lives=LIVES)
    assert fate_at_start(ended("succeeded", REWARD), record("succeeded", updated=GAP), policy) is Fate.REUSED


@pytest.mark.parametrize("state", ["queuing", "running", "succeeded", "failed"])
def test_fork_looks_at_nothing_on_the_server(state: str) -> None:
    """The parent may be alive: what the server holds is its own, down to the ids."""
    policy = Policy(own_folder=False, lives=LIVES)
    assert fate_at_start(None, record(state), policy) is Fate.CREATED
    assert fate_at_start(ended("succeeded", REWARD), record(state), policy) is Fate.SERVED


def test_without_a_proof_of_life_every_end_is_doubted() -> None:
    """A lost file costs work, not correctness."""
    policy = Policy(own_folder=True)
    assert fate_at_start(None, record("succeeded"), policy) is Fate.RERUN
    assert fate_at_start(None, record("failed"), policy) is Fate.RERUN
    assert fate_at_start(None, record("running"), policy) is Fate.ADOPTED


@pytest.mark.parametrize(
    ("state", "rewarded", "hooks_reward", "fate"),
    [
        ("succeeded", True, False, Fate.SERVED),
        ("succeeded", False, True, Fate.SERVED),
        ("failed", True, False, Fate.CREATED),
        ("failed", True, True, Fate.CREATED),
        ("succeeded", False, False, Fate.CREATED),
    ],
)
def test_success_without_a_reward_is_not_served(state: str, rewarded: bool, hooks_reward: bool, fate: Fate) -> None:
    """Its agent posts the reward later, to a server that is gone: training it with the fill-in value would be wrong."""
    policy = Policy(own_folder=True, lives=LIVES, hooks_reward=hooks_reward)
    assert fate_at_start(ended(state, *([REWARD] if rewarded else [])), None, policy) is fate


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
