"""What a life does about its rollouts: about which it asks, what it deletes, and how long it waits for a gateway."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import agl_server
from agl_async_ckpt.agl.in_flight.carry_over import RUN_ID_KEY, InFlight, Tracked
from agl_async_ckpt.agl.in_flight.keeper import Outcome, RolloutKeeper
from agl_async_ckpt.agl.in_flight.standing import Fate, Standing
from agl_async_ckpt.config import AsyncCheckpointConfig
from agl_async_ckpt.folder.run_identity import RunIdentity
from agl_async_ckpt.state import FinishedRollout

REWARD = {"event_type": "reward", "data": {"value": 1.0}}
TRAIN, VALIDATION = {"is_train": True}, {"is_train": False}


def record(state: str, *, updated: float = 12.0, run_id: str | None = "run") -> dict[str, Any]:
    """What the server says of a rollout."""
    metadata = {} if run_id is None else {RUN_ID_KEY: run_id}
    return {"status": {"state": state, "created_at": 11.0, "updated_at": updated}, "metadata": metadata}


def item(rollout_id: str, place: int = 0) -> Any:
    """As much of an `EnqueuedRollout` as decisions look at."""
    return SimpleNamespace(rollout_id=rollout_id, data_id="d", step=1, sample_idx_in_step=place)


class Scene:
    """A keeper whose server holds `records`, and a manager that creates what it is asked to."""

    base_url = "http://server"

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, own_folder: bool = True, **settings: Any
    ) -> None:
        rollout = SimpleNamespace(n=1)
        config = SimpleNamespace(
            agentlightning=SimpleNamespace(get=lambda key: None),
            actor_rollout_ref=SimpleNamespace(rollout=rollout),
        )
        trainer: Any = SimpleNamespace(config=config, _carry_over_rollouts=[], _ensure_agl_client=lambda: self)
        run = RunIdentity(str(settings.pop("run_id", "run")), life_id="life")
        self.keeper = RolloutKeeper(
            trainer, AsyncCheckpointConfig(**settings), folder, run, own_folder=own_folder, on_wait=lambda: None
        )
        self.trainer = trainer
        self.manager: Any = SimpleNamespace(client=self, enqueued=[], register_again=lambda: None)
        self.records: dict[str, Any] = {}
        self.created: list[str] = []
        self.deleted: list[str] = []
        monkeypatch.setattr(agl_server, "list_rollouts", lambda client: self.records)
        monkeypatch.setattr(agl_server, "num_proxied_requests", lambda client: 0)
        monkeypatch.setattr(agl_server, "delete_rollouts", lambda client, ids: self.deleted.extend(ids))
        monkeypatch.setattr(agl_server, "create_rollouts", lambda manager, requests: self._create(requests))
        monkeypatch.setattr(internals, "default_rollout_config", lambda manager: {})
        monkeypatch.setattr(internals, "renew_enqueued", lambda item, new_id, time: setattr(item, "rollout_id", new_id))

    def _create(self, requests: list[dict[str, Any]]) -> None:
        self.created += [str(request["metadata"].get("replaces")) for request in requests]

    def register_again(self) -> None:
        """Stand for the manager's client."""

    def carry(self, **tracked: Tracked) -> None:
        """Have the trainer carry rollouts."""
        self.keeper.groups.tracked.update(tracked)
        carried = [item(rollout_id, place) for place, rollout_id in enumerate(tracked)]
        self.trainer._carry_over_rollouts = carried

    def start(self) -> Outcome:
        """Register models for the first time."""
        self.keeper.on_models_registered(self.manager)
        return self.keeper.outcome


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    """A keeper in its own folder."""
    return Scene(monkeypatch, tmp_path)


def restored(finished: FinishedRollout | None = None) -> Tracked:
    """A rollout of a checkpoint about which the server was not asked yet."""
    return Tracked({"input": 1}, finished=finished, standing=Standing.UNDECIDED)


def test_the_server_is_asked_once_about_what_was_restored(scene: Scene) -> None:
    """What is decided stays decided; fresh siblings, and rollouts of this life, are not asked about."""
    scene.carry(
        old=restored(),
        fresh=Tracked({}, standing=Standing.TO_CREATE, is_fresh=True),
        own=Tracked({"input": 2}),
    )
    scene.records = {"fresh": record("failed", updated=25.0), "own": record("running")}
    assert scene.start() == Outcome(recreated=["old"], reclaimed=["fresh"])
    assert scene.created == ["old", "None"], "a fresh one has no old id to name"
    assert scene.start() == Outcome(recreated=["old"], reclaimed=["fresh"])
    assert scene.created == ["old", "None"]


def test_a_rollout_that_a_trainer_of_ones_own_carries_is_left_as_it_is(scene: Scene) -> None:
    """Nothing is known of it: its trainer has put it back by itself."""
    scene.carry(old=restored())
    scene.trainer._carry_over_rollouts.append(item("unseen", 1))
    assert scene.start() == Outcome(recreated=["old"])
    assert scene.created == ["old"]


def test_outcome_keeps_the_order_of_the_groups(scene: Scene) -> None:
    """So that the report's first ids are the oldest."""
    scene.carry(c=restored(), a=restored(), b=restored())
    assert scene.start().recreated == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("found", "finished", "doubted"),
    [
        (record("running"), None, True),
        (record("succeeded"), FinishedRollout({}, (REWARD,)), True),
        (None, FinishedRollout({}, (REWARD,)), True),
    ],
)
def test_what_comes_from_an_earlier_life_is_doubted(
    scene: Scene, found: Any, finished: FinishedRollout | None, doubted: bool
) -> None:
    """Until it is seen that something can be trained from it."""
    scene.carry(r=restored(finished))
    scene.records = {} if found is None else {"r": found}
    scene.start()
    assert scene.keeper.groups.tracked["r"].doubted is doubted


# --- what may be deleted -------------------------------------------------------------------------------------------


def test_only_what_is_of_this_run_and_in_no_group_is_reclaimed(scene: Scene) -> None:
    """Another run's, nobody's, and what is waited for stay; validations and replaced rollouts go."""
    scene.carry(waited=restored(), replaced=restored())
    scene.records = {
        "waited": record("running"),
        "replaced": record("failed"),
        "orphan": record("queuing"),
        "validation": record("succeeded"),
        "others": record("running", run_id="other"),
        "nobodys": record("running", run_id=None),
        "untagged": {"status": record("running")["status"]},
        "null": {**record("running"), "metadata": None},
    }
    assert scene.start().reclaimed == scene.deleted == ["replaced", "orphan", "validation"]


@pytest.mark.parametrize("own_folder", [True, False])
def test_nothing_is_reclaimed_where_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_folder: bool
) -> None:
    """Not even what is replaced."""
    scene = Scene(monkeypatch, tmp_path, own_folder=own_folder, reclaim=False)
    scene.carry(a=restored())
    scene.records = {"a": record("failed"), "b": record("running")}
    assert scene.start().reclaimed == scene.deleted == []


def test_fork_reclaims_what_an_earlier_start_of_it_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Started again with the same path, it begins at its parent's checkpoint once more; the parent's stay."""
    scene = Scene(monkeypatch, tmp_path, own_folder=False)
    scene.carry(a=restored())
    scene.records = {
        "a": record("running", run_id="parent"),
        "b": record("running"),
        "c": record("queuing", run_id=None),
    }
    assert scene.start().reclaimed == ["b"]


def test_run_without_an_id_reclaims_nothing_untagged() -> None:
    """An empty id matches no missing tag."""
    assert not InFlight(run_id="").owns(record("running", run_id=None))


# --- a server that has forgotten ------------------------------------------------------------------------------------


def ended(state: str, *events: dict[str, Any]) -> FinishedRollout:
    """A rollout whose end was seen."""
    return FinishedRollout(record={"status": {"state": state}}, raw_events=events)


CASES = {
    "waited for": (Tracked(TRAIN), Fate.CREATED),
    "ended with its reward": (Tracked(TRAIN, ended("succeeded", REWARD)), Fate.SERVED),
    "failed": (Tracked(TRAIN, ended("failed")), Fate.SERVED),
    "success whose reward may still come": (Tracked(TRAIN, ended("succeeded")), Fate.CREATED),
    "validation that is waited for": (Tracked(VALIDATION), Fate.CREATED),
    "validation whose result is read": (Tracked(VALIDATION, is_read=True), None),
    "served already": (Tracked(TRAIN, ended("failed"), standing=Standing.SERVED), None),
}


@pytest.mark.parametrize("name", CASES)
def test_fate_of_a_rollout_that_the_server_has_lost(scene: Scene, name: str) -> None:
    """Served where nothing is missing, created again where something is, left alone where nobody waits."""
    known, fate = CASES[name]
    before = known.standing
    scene.carry(r1=known)
    now = scene.keeper.recover(scene.manager, "r1")
    assert (now != "r1") == (fate is Fate.CREATED)
    assert scene.created == (["r1"] if fate is Fate.CREATED else [])
    if fate is not Fate.CREATED:
        assert known.standing is (Standing.SERVED if fate is Fate.SERVED else before)
    assert not known.doubted, "its hook has run in this life"


def test_rollout_that_the_server_holds_is_left_as_it_is(scene: Scene) -> None:
    """Only what is missing is created again; what waits for its creation already is not counted."""
    scene.carry(r1=Tracked(TRAIN), r2=Tracked(TRAIN, standing=Standing.TO_CREATE), r3=Tracked(TRAIN))
    scene.records = {"r1": {}, "r3": {}}
    assert scene.keeper.recover(scene.manager, "r1") == "r1"
    assert scene.created == []


# --- a gateway that is paused ---------------------------------------------------------------------------------------


def judge(monkeypatch: pytest.MonkeyPatch, folder: Path, num_stale: int, drain_wait_s: float = 120.0) -> RolloutKeeper:
    """A keeper that saw `num_stale` requests before any model of its own was registered."""
    keeper = Scene(monkeypatch, folder, drain_wait_s=drain_wait_s).keeper
    monkeypatch.setattr(agl_server, "num_proxied_requests", lambda client: num_stale)
    keeper.on_models_deleted()
    return keeper


def test_empty_gateway_is_drained_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever was stale before."""
    assert judge(monkeypatch, tmp_path, 0).is_drained(0, 0.0)
    assert judge(monkeypatch, tmp_path, 5).is_drained(0, 0.0)


def test_requests_of_this_life_are_always_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However long: the weights change under them otherwise, and agent-lightning waits too."""
    assert not judge(monkeypatch, tmp_path, 0).is_drained(1, 1e6)
    assert not judge(monkeypatch, tmp_path, 3).is_drained(4, 1e6)


def test_stale_requests_are_left_alone_after_the_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They hang at an endpoint that is gone; before the wait is over they may still come back."""
    assert not judge(monkeypatch, tmp_path, 3).is_drained(3, 119.9)
    assert caplog.messages == []
    assert judge(monkeypatch, tmp_path, 3).is_drained(3, 120.0)
    assert caplog.messages == [
        "Going on after 120 s with 3 model requests in the gateway that went to the dead trainer's endpoint."
    ]
    assert judge(monkeypatch, tmp_path, 3, drain_wait_s=0.0).is_drained(2, 0.0)


def test_later_steps_do_not_wait_that_long_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that hangs for half an hour costs the wait once, and each later step a few seconds."""
    keeper = judge(monkeypatch, tmp_path, 3)
    with caplog.at_level(logging.INFO, "agl_async_ckpt"):
        assert keeper.is_drained(3, 120.0)
        assert not keeper.is_drained(3, 4.9)
        assert keeper.is_drained(3, 5.0)
        assert not keeper.is_drained(4, 1e6), "one is ours"
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "INFO"]
    quick = judge(monkeypatch, tmp_path, 3, drain_wait_s=1.0)
    assert quick.is_drained(3, 1.0)
    assert quick.is_drained(3, 1.0)


def test_stale_requests_that_ended_are_not_stale_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The smallest count seen is the bound: a later one of the same size holds requests of this life."""
    keeper = judge(monkeypatch, tmp_path, 3)
    assert not keeper.is_drained(3, 10.0)
    assert not keeper.is_drained(1, 20.0)
    assert not keeper.is_drained(2, 200.0), "one of the two is ours"
    assert keeper.is_drained(1, 200.0)
    assert keeper.is_drained(0, 0.0)


# --- what is said ---------------------------------------------------------------------------------------------------


def test_text_of_an_outcome_has_counts_and_the_first_ids() -> None:
    """Three ids each, and a sign that there are more."""
    outcome = Outcome(
        adopted=["a1", "a2", "a3", "a4"], reused=["u1"], recreated=["c1", "c2", "c3"], rerun=[], reclaimed=["o1", "o2"]
    )
    assert outcome.text(40) == (
        "In-flight rollouts of step 40: 4 (a1, a2, a3, …) adopted, 1 (u1) finished before and reused, 3 (c1, c2, c3) "
        "created again under new ids, 0 run again because they failed or ended without a trainer; 2 (o1, o2) of "
        "this run that no checkpoint holds were removed from the server."
    )
