"""Which rollouts a server has lost, and what becomes of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt.agl.in_flight.carry_over import RUN_ID_KEY, InFlight, Tracked
from agl_async_ckpt.agl.in_flight.recovery import is_new_server, mark_lost
from agl_async_ckpt.state import FinishedRollout

REWARD = {"event_type": "reward", "data": {"value": 1.0}}


def ended(state: str, *events: dict[str, Any]) -> FinishedRollout:
    """A rollout whose end was seen."""
    return FinishedRollout(record={"status": {"state": state}}, raw_events=events)


TRAIN, VALIDATION = {"is_train": True}, {"is_train": False}
CASES = {
    "waited for": (Tracked(TRAIN), "lost"),
    "ended with its reward": (Tracked(TRAIN, ended("succeeded", REWARD)), "kept"),
    "failed": (Tracked(TRAIN, ended("failed")), "kept"),
    "success whose reward may still come": (Tracked(TRAIN, ended("succeeded")), "lost"),
    "validation that is waited for": (Tracked(VALIDATION), "lost"),
    "validation whose result is read": (Tracked(VALIDATION, is_read=True), None),
    "served already": (Tracked(TRAIN, ended("failed"), served=True), None),
    "trained and deleted": (None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_fate_of_a_rollout_that_the_server_has_lost(name: str) -> None:
    """Served where nothing is missing, created again where something is, left alone where nobody waits."""
    known, fate = CASES[name]
    in_flight = InFlight(tracked={} if known is None else {"r1": known})
    kept, lost = mark_lost(in_flight, [SimpleNamespace(rollout_id="r1")], {})
    assert (kept, lost) == (["r1"] if fate == "kept" else [], ["r1"] if fate == "lost" else [])
    assert in_flight.to_create == set(lost)
    if known is not None and fate == "lost":
        assert known.replaces == "r1"
        assert not known.served
    if known is not None and fate == "kept":
        assert known.served


def test_rollout_that_the_server_holds_is_left_as_it_is() -> None:
    """Only what is missing is created again; what waits for its creation already is not counted."""
    in_flight = InFlight(tracked={"r1": Tracked(TRAIN), "r2": Tracked(TRAIN)}, to_create={"r2"})
    items = [SimpleNamespace(rollout_id="r1"), SimpleNamespace(rollout_id="r2")]
    assert mark_lost(in_flight, items, {"r1": {}}) == ([], [])
    assert in_flight.to_create == {"r2"}


def test_server_without_a_rollout_of_this_run_is_a_new_one() -> None:
    """Rollouts of others, and of no run at all, say nothing."""
    in_flight = InFlight(run_id="mine")
    others = {"a": {"metadata": {RUN_ID_KEY: "another"}}, "b": {"metadata": None}}
    assert is_new_server(in_flight, {})
    assert is_new_server(in_flight, others)
    assert not is_new_server(in_flight, {**others, "c": {"metadata": {RUN_ID_KEY: "mine"}}})
