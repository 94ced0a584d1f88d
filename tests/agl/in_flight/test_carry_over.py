"""In-flight prompt groups: what is kept, put back, resized, admitted, and posted again."""

from __future__ import annotations

import copy
import json
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from agentlightning.verl.agl_rollout_manager import EnqueuedRollout

from agl_async_ckpt.agl.in_flight.carry_over import REPLACES_KEY, RUN_ID_KEY, InFlight, Tracked, creation
from agl_async_ckpt.agl.in_flight.group_size import resized
from agl_async_ckpt.agl.in_flight.kept_events import json_bytes
from agl_async_ckpt.agl.in_flight.standing import Fate, Standing
from agl_async_ckpt.exceptions import ServerError
from agl_async_ckpt.state import FinishedRollout, InFlightRollout, PromptGroup

DEFAULT_CONFIG = {"timeout_seconds": 1800, "local": {"agent_class": "a:B", "env_map": {}}}


def standing_at(in_flight: InFlight, standing: Standing) -> set[str]:
    """Ids of the rollouts that stand there."""
    return {rollout_id for rollout_id, known in in_flight.tracked.items() if known.standing is standing}


def enqueued(rollout_id: str, data_id: str = "d", step: int = 1, **changes: Any) -> EnqueuedRollout:
    """As the trainer holds it."""
    values = {"sample_idx_in_step": 0, "enqueue_time": 5.0, "input": {"index": 1}, "running_at": 6.0, **changes}
    return EnqueuedRollout(rollout_id=rollout_id, data_id=data_id, step=step, **values)


def finished(text: str = "", state: str = "succeeded") -> FinishedRollout:
    """A kept end whose size grows with `text`."""
    record = {"rollout_id": "x", "text": text, "status": {"state": state}}
    return FinishedRollout(record, ({"event_type": "reward", "data": {}},), ())


def in_file(rollout_id: str, **changes: Any) -> InFlightRollout:
    """A rollout as a checkpoint holds it."""
    values = {"request": {"input": {"index": 1}, "is_train": True, "config": None, "metadata": {}}, **changes}
    data_id, step = values.pop("data_id", "d"), values.pop("step", 1)
    return InFlightRollout(enqueued=enqueued(rollout_id, data_id, step).model_dump(), **values)


def group(data_id: str, *rollouts: InFlightRollout) -> PromptGroup:
    """A prompt group of rollouts, which need not repeat its data id."""
    return PromptGroup(data_id, tuple(rollouts))


def row_group(row: int, step: int, size: int = 2) -> PromptGroup:
    """A group of `size` unfinished siblings, ids `<row>.<i>`."""
    return group(f"g{row}", *(in_file(f"{row}.{i}", data_id=f"g{row}", step=step) for i in range(size)))


class Manager:
    """A rollout manager whose server creates what is posted, or fails."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.posted: list[dict[str, Any]] = []
        self.client: Any = SimpleNamespace(base_url="http://server", post_with_retry=self._post)
        self._fail = fail

    def _post(self, url: str, json: list[dict[str, Any]]) -> Any:
        assert url == "/api/rollouts"
        if self._fail is not None:
            raise self._fail
        self.posted += copy.deepcopy(json)
        return SimpleNamespace(json=lambda: [{"rollout_id": request["rollout_id"]} for request in json])


# --- notes of what is posted ---------------------------------------------------------------------------------------


def request(rollout_id: str = "r1", **changes: Any) -> dict[str, Any]:
    """A creation as agent-lightning posts it."""
    values = {"input": {"index": 1, "urls": [None, []]}, "is_train": True, "config": DEFAULT_CONFIG, "metadata": {}}
    return {**copy.deepcopy(values), **changes, "rollout_id": rollout_id}


def test_posted_request_is_noted_without_id_and_tag() -> None:
    """Only what a later life posts again; the tag goes to the server alone."""
    in_flight = InFlight(run_id="run", default_config={"timeout_seconds": 1})
    posted = in_flight.outgoing([request(metadata={"kind": "x"})])
    assert posted == [request(metadata={"kind": "x", RUN_ID_KEY: "run"})]
    noted = in_flight.tracked["r1"].request
    assert noted == {
        "input": {"index": 1, "urls": [None, []]},
        "is_train": True,
        "config": DEFAULT_CONFIG,
        "metadata": {"kind": "x"},
    }


def test_request_of_the_caller_is_not_changed() -> None:
    """agent-lightning retries with the same list, and hooks may hold on to it."""
    sent = [request(metadata={"deep": {"a": [1]}})]
    before = copy.deepcopy(sent)
    in_flight = InFlight(run_id="run")
    in_flight.outgoing(sent)
    assert sent == before
    sent[0]["input"]["index"] = 99
    noted = in_flight.tracked["r1"].request
    assert noted is not None
    assert noted["input"]["index"] == 1


def test_siblings_share_the_note_of_one_input_and_of_nothing_else() -> None:
    """A thousand groups of eight: an input is copied once, and 1, True and 1.0 are three inputs."""
    in_flight = InFlight(run_id="run")
    values = [1, 1, True, 1.0, 1]
    in_flight.outgoing([{"rollout_id": f"r{i}", "input": {"x": [value]}} for i, value in enumerate(values)])
    noted = [in_flight.tracked[f"r{i}"].request for i in range(5)]
    assert [note["input"]["x"][0] for note in noted if note] == values
    assert [type(note["input"]["x"][0]) for note in noted if note] == [int, int, bool, float, int]
    inputs = [note["input"] for note in noted if note]
    assert inputs[0] is inputs[1]
    assert len({*map(id, inputs)}) == 4


@pytest.mark.parametrize("metadata", [None, "absent"])
def test_request_without_metadata_is_tagged(metadata: Any) -> None:
    """Both ways in which JSON can leave it out."""
    sent = request(metadata=None)
    if metadata == "absent":
        del sent["metadata"]
    in_flight = InFlight(run_id="run")
    assert in_flight.outgoing([sent])[0]["metadata"] == {RUN_ID_KEY: "run"}
    noted = in_flight.tracked["r1"].request
    assert noted is not None
    assert noted["metadata"] == {}


def test_validation_is_tagged_and_noted_until_it_is_deleted() -> None:
    """A server that is restarted has to be given it again; no checkpoint holds it."""
    in_flight = InFlight(run_id="run")
    (posted,) = in_flight.outgoing([request(is_train=False)])
    assert posted["metadata"] == {RUN_ID_KEY: "run"}
    assert list(in_flight.tracked) == ["r1"]
    in_flight.forget("r1")
    assert in_flight.tracked == {}


def test_tag_of_another_run_in_a_request_is_replaced() -> None:
    """A hook that copies metadata from elsewhere does not hand its rollout to another run."""
    in_flight = InFlight(run_id="run")
    (posted,) = in_flight.outgoing([request(metadata={RUN_ID_KEY: "other", "k": 1})])
    assert posted["metadata"] == {RUN_ID_KEY: "run", "k": 1}
    noted = in_flight.tracked["r1"].request
    assert noted is not None
    assert noted["metadata"] == {"k": 1}


def test_config_that_no_hook_changed_is_left_to_the_settings() -> None:
    """A later life posts its own default: a corrected image takes effect. A changed one stays as it is."""
    in_flight = InFlight(run_id="run", default_config=copy.deepcopy(DEFAULT_CONFIG))
    changed = {**DEFAULT_CONFIG, "timeout_seconds": 7}
    posted = in_flight.outgoing([request("r1"), request("r2", config=changed), request("r3", config=None)])
    assert [item["config"] for item in posted] == [DEFAULT_CONFIG, changed, None]
    noted = [in_flight.tracked[i].request or {} for i in ("r1", "r2", "r3")]
    assert [item["config"] for item in noted] == [None, changed, None]


# --- creation ------------------------------------------------------------------------------------------------------


def test_creation_repeats_the_request_under_a_new_id_that_names_the_old_one() -> None:
    """Input, kind and metadata as posted; the config of the settings where hooks left it alone."""
    known = Tracked(request={"input": {"a": None}, "is_train": True, "config": None, "metadata": {"k": [1]}})
    assert creation(known, "old", "new", DEFAULT_CONFIG) == {
        "rollout_id": "new",
        "input": {"a": None},
        "is_train": True,
        "config": DEFAULT_CONFIG,
        "metadata": {"k": [1], REPLACES_KEY: "old"},
    }


def test_creation_keeps_a_config_that_a_hook_set() -> None:
    """Whatever the settings say now."""
    posted = {"input": 1, "is_train": True, "config": {"timeout_seconds": 7}, "metadata": None}
    known = Tracked(posted, is_fresh=True)  # which has no old id to name
    body = creation(known, "old", "new", DEFAULT_CONFIG)
    assert body["config"] == {"timeout_seconds": 7}
    assert body["metadata"] == {}


def test_creation_does_not_share_with_the_note() -> None:
    """The note is what the next checkpoint saves."""
    known = Tracked(request={"input": {"a": [1]}, "is_train": True, "config": None, "metadata": {"k": {}}})
    config = copy.deepcopy(DEFAULT_CONFIG)
    body = creation(known, "old", "new", config)
    body["input"]["a"].append(2)
    body["metadata"]["k"]["x"] = 1
    body["config"]["timeout_seconds"] = 1
    assert known.request == {"input": {"a": [1]}, "is_train": True, "config": None, "metadata": {"k": {}}}
    assert config == DEFAULT_CONFIG


def test_missing_rollouts_are_created_in_one_post_and_renewed_in_place() -> None:
    """The trainer's loop holds the same objects: id, times and nothing else change."""
    in_flight = InFlight(run_id="run", default_config=DEFAULT_CONFIG)
    in_flight.restore([row_group(1, 3), row_group(2, 4)], group_size=2)
    items = in_flight.admit([], room=9)
    before = [item.model_dump() for item in items]
    in_flight.settle(dict.fromkeys({"1.0", "2.1"}, Fate.CREATED), doubted=False)
    manager = Manager()
    assert in_flight.create_missing(items, manager) == ["1.0", "2.1"]
    assert [body["metadata"] for body in manager.posted] == [{REPLACES_KEY: "1.0"}, {REPLACES_KEY: "2.1"}]
    assert standing_at(in_flight, Standing.TO_CREATE) == set()
    for item, old in zip(items, before, strict=True):
        now = item.model_dump()
        if old["rollout_id"] in ("1.0", "2.1"):
            assert now["rollout_id"] in [body["rollout_id"] for body in manager.posted]
            assert now["running_at"] is now["finished_at"] is None
            assert now["enqueue_time"] > old["enqueue_time"]
            assert old["rollout_id"] not in in_flight.tracked
            now.update({key: old[key] for key in ("rollout_id", "running_at", "finished_at", "enqueue_time")})
        assert now == old
    assert len({item.rollout_id for item in items}) == 4


def test_new_ids_are_never_old_ones() -> None:
    """Nor ids of each other, over many creations."""
    in_flight = InFlight(run_id="run")
    seen: set[str] = set()
    in_flight.restore([row_group(row, 1) for row in range(20)], group_size=2)
    items = in_flight.admit([], room=99)
    for _ in range(10):
        ids = {item.rollout_id for item in items}
        assert len(ids) == 40
        assert not ids & seen
        seen |= ids
        in_flight.settle(dict.fromkeys(set(ids), Fate.CREATED), doubted=False)
        in_flight.create_missing(items, Manager())


def test_request_stays_byte_equal_over_creations() -> None:
    """`replaces` and the tag are added to what is posted, not to what is kept."""
    in_flight = InFlight(run_id="run", default_config=DEFAULT_CONFIG)
    known = {"input": {"z": [None, {}], "é": 1.5}, "is_train": True, "config": None, "metadata": {"b": 1, "a": 2}}
    in_flight.restore([group("d", in_file("old", request=known))], group_size=1)
    items = in_flight.admit([], room=1)
    for _ in range(5):
        in_flight.settle(dict.fromkeys({items[0].rollout_id}, Fate.CREATED), doubted=False)
        in_flight.create_missing(items, Manager())
        (saved,) = in_flight.collect(items)
        assert json.dumps(saved.rollouts[0].request) == json.dumps(known)


def test_failed_creation_leaves_the_old_ids_in_place() -> None:
    """Nothing says that the server has them."""
    in_flight = InFlight(run_id="run")
    in_flight.restore([row_group(1, 1)], group_size=2)
    items = in_flight.admit([], room=1)
    in_flight.settle(dict.fromkeys({"1.0"}, Fate.CREATED), doubted=False)
    with pytest.raises(ServerError, match="http://server did not create 1 rollouts"):
        in_flight.create_missing(items, Manager(fail=ValueError("torn")))
    assert [item.rollout_id for item in items] == ["1.0", "1.1"]
    assert standing_at(in_flight, Standing.TO_CREATE) == {"1.0"}


def test_nothing_missing_posts_nothing() -> None:
    """An ordinary step costs no request."""
    manager = Manager()
    assert InFlight().create_missing([enqueued("a")], manager) == []
    assert manager.posted == []


# --- restore and admission -----------------------------------------------------------------------------------------


def ids(items: list[Any]) -> list[str]:
    """Rollout ids in order."""
    return [item.rollout_id for item in items]


def test_restored_groups_come_back_whole_and_in_order() -> None:
    """Every field of each rollout, about each of which the server has still to be asked."""
    in_flight = InFlight()
    groups = [row_group(1, 3), row_group(2, 3), row_group(3, 4)]
    in_flight.restore(groups, group_size=2)
    items = in_flight.admit([], room=3)
    assert [item.model_dump() for item in items] == [dict(r.enqueued) for g in groups for r in g.rollouts]
    assert standing_at(in_flight, Standing.UNDECIDED) == set(ids(items))
    assert in_flight.collect(items) == tuple(groups)


def test_restored_item_does_not_share_with_the_state() -> None:
    """agent-lightning writes into its items; the loaded state stays as loaded."""
    loaded = row_group(1, 3)
    before = copy.deepcopy(dict(loaded.rollouts[0].enqueued))
    in_flight = InFlight()
    in_flight.restore([loaded], group_size=2)
    item = in_flight.admit([], room=1)[0]
    item.input["index"] = 77
    item.finished_at = 9.0
    assert dict(loaded.rollouts[0].enqueued) == before


def test_request_that_was_not_seen_is_made_from_the_input() -> None:
    """For instance of a manager that posts in a way of its own."""
    in_flight = InFlight()
    in_flight.restore([group("d", in_file("r", request=None))], group_size=1)
    assert in_flight.tracked["r"].request == {
        "input": {"index": 1},
        "is_train": True,
        "config": None,
        "metadata": {},
    }


def test_room_bounds_what_is_admitted_and_the_rest_waits() -> None:
    """The oldest first; the others are part of every checkpoint while they wait."""
    in_flight = InFlight()
    groups = [row_group(row, step=1 + row // 2) for row in range(6)]
    in_flight.restore(groups, group_size=2)
    items = in_flight.admit([], room=4)
    assert ids(items) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]
    assert len(in_flight.waiting) == 2
    assert [g.data_id for g in in_flight.collect(items)] == [f"g{row}" for row in range(6)]


def test_oldest_groups_are_active_and_newer_ones_wait_in_their_turn() -> None:
    """What was pulled while older groups waited lets them pass: none waits for ever."""
    in_flight = InFlight()
    in_flight.restore([row_group(row, step=2) for row in range(5)], group_size=1)
    items = in_flight.admit([], room=3)
    assert ids(items) == ["0.0", "1.0", "2.0"]
    left = [items[2], enqueued("new", "n", step=7)]  # two groups were trained, one new input was pulled
    now = in_flight.admit(left, room=3)
    assert ids(now) == ["2.0", "3.0", "4.0"]
    assert [group.data_id for group in in_flight.collect(now)] == ["g2", "g3", "g4", "n"]
    now = in_flight.admit(now[1:], room=3)
    assert ids(now) == ["3.0", "4.0", "new"]
    assert in_flight.waiting == []
    assert in_flight.admit(now, room=1) is now, "nobody waits: the trainer's own list, as long as it is"


def test_groups_of_one_step_keep_the_order_in_which_they_were_pulled() -> None:
    """A group that has waited goes back to its place."""
    in_flight = InFlight()
    rows = [in_file(f"{i}", data_id=f"g{i}", step=2) for i in range(3)]
    for index, rollout in enumerate(rows):
        rows[index] = replace(rollout, enqueued={**rollout.enqueued, "sample_idx_in_step": index})
    in_flight.restore([group(f"g{i}", rollout) for i, rollout in enumerate(rows)], group_size=1)
    items = in_flight.admit([], room=2)
    assert ids(in_flight.admit([items[1]], room=1)) == ["1"]
    assert ids(in_flight.admit([], room=1)) == ["2"]
    in_flight.restore([group("g2", rows[2]), group("g0", rows[0])], group_size=1)
    assert ids(in_flight.admit([items[1]], room=3)) == ["0", "1", "2"]


def test_siblings_stay_together_when_groups_are_admitted() -> None:
    """The trainer reads a group's siblings one after another."""
    in_flight = InFlight()
    in_flight.restore([row_group(row, step=4, size=3) for row in range(3)], group_size=3)
    now = in_flight.admit([enqueued("a", "x", step=4), enqueued("b", "x", step=4), enqueued("c", "y", step=9)], room=9)
    data_ids = [item.data_id for item in now]
    assert data_ids == ["x", "x", *["g0"] * 3, *["g1"] * 3, *["g2"] * 3, "y"]


def test_restore_forgets_what_was_there() -> None:
    """A second `fit` of a trainer begins with the checkpoint's groups alone."""
    in_flight = InFlight()
    in_flight.restore([row_group(1, 1)], group_size=2)
    in_flight.settle(dict.fromkeys({"1.0"}, Fate.CREATED), doubted=False)
    in_flight.restore([row_group(2, 1)], group_size=2)
    assert set(in_flight.tracked) == standing_at(in_flight, Standing.UNDECIDED) == {"2.0", "2.1"}
    assert standing_at(in_flight, Standing.TO_CREATE) == set()
    assert [member.data_id for members in in_flight.waiting for member in members] == ["g2", "g2"]


def test_trained_rollouts_are_forgotten_and_waiting_ones_are_not() -> None:
    """Memory does not grow with the steps."""
    in_flight = InFlight()
    in_flight.restore([row_group(1, 1), row_group(2, 1)], group_size=2)
    items = in_flight.admit([], room=1)
    in_flight.forget_trained(items)
    assert set(in_flight.tracked) == {"1.0", "1.1", "2.0", "2.1"}
    in_flight.forget_trained([])
    assert set(in_flight.tracked) == {"2.0", "2.1"}


# --- size of a group -----------------------------------------------------------------------------------------------


def sizes(states: str) -> PromptGroup:
    """A group, ids `r<i>`, whose siblings run (`.`), have succeeded (`s`) or failed (`f`)."""
    ends = {".": None, "s": finished(), "f": finished(state="failed")}
    return group("d", *(in_file(f"r{i}", finished=ends[state]) for i, state in enumerate(states)))


@pytest.mark.parametrize(
    ("states", "size", "kept"),
    [
        ("..", 2, ["r0", "r1"]),
        (".s.s", 2, ["r1", "r3"]),
        (".s.", 2, ["r0", "r1"]),
        ("...", 1, ["r0"]),
        ("sss", 2, ["r0", "r1"]),
        ("..s", 1, ["r2"]),
        ("f.", 1, ["r0"]),
        ("ffs.", 2, ["r0", "r2"]),
        ("ff", 1, ["r0"]),
    ],
)
def test_shrinking_prefers_tokens_that_exist(states: str, size: int, kept: list[str]) -> None:
    """To those to come; what has failed runs again. The order stays."""
    assert [rollout.rollout_id for rollout in resized(sizes(states), size)] == kept


def test_growing_adds_fresh_siblings_of_the_first_request() -> None:
    """They were never on a server: no old id is named, and none is repeated."""
    template = in_file("r0", request={"input": {"index": 1}, "metadata": {"sibling": 0}})
    grown = resized(group("d", template, in_file("r1")), 4)
    assert [rollout.rollout_id for rollout in grown[:2]] == ["r0", "r1"]
    assert [rollout.is_fresh for rollout in grown] == [False, False, True, True]
    assert len({rollout.rollout_id for rollout in grown}) == 4
    for rollout in grown[2:]:
        assert rollout.request == template.request
        assert rollout.finished is None
        assert rollout.enqueued["data_id"] == "d"
        assert (rollout.enqueued["step"], rollout.enqueued["sample_idx_in_step"]) == (1, 0)
        assert rollout.enqueued["running_at"] is rollout.enqueued["finished_at"] is None


def test_fresh_siblings_are_created_without_asking_the_server() -> None:
    """Their creation names no old id."""
    in_flight = InFlight(default_config=DEFAULT_CONFIG)
    in_flight.restore([row_group(1, 1, size=1)], group_size=3)
    items = in_flight.admit([], room=1)
    assert standing_at(in_flight, Standing.UNDECIDED) == {"1.0"}
    assert standing_at(in_flight, Standing.TO_CREATE) == set(ids(items)[1:])
    manager = Manager()
    in_flight.create_missing(items, manager)
    assert [body["metadata"] for body in manager.posted] == [{}, {}]
    assert items[0].rollout_id == "1.0"


# --- what a save collects -------------------------------------------------------------------------------------------


def test_finished_siblings_are_collected_with_their_events() -> None:
    """And without them where only requests are to be saved."""
    for mode in ("keep", "regenerate"):
        in_flight = InFlight(mode=mode)
        in_flight.outgoing([request("a"), request("b")])
        in_flight.keep("a", finished("tokens"), 10, is_worth=True)
        in_flight.keep("b", finished(state="failed"), 10, is_worth=False)
        (saved,) = in_flight.collect([enqueued("a"), enqueued("b")])
        expected = [finished("tokens") if mode == "keep" else None, None]
        assert [rollout.finished for rollout in saved.rollouts] == expected
        assert all(rollout.request for rollout in saved.rollouts)


def keep(in_flight: InFlight, *names: str, num_bytes: int = 100) -> None:
    """Keep the ends of rollouts, each of a group of its own."""
    for name in names:
        in_flight.keep(name, finished(name), num_bytes, is_worth=True)


def held(in_flight: InFlight) -> str:
    """Names of the rollouts whose events are in memory."""
    return "".join(name for name, known in in_flight.tracked.items() if known.finished is not None)


@pytest.mark.parametrize(
    ("max_bytes", "kept"),
    [(300, "abc"), (299, "ab"), (200, "ab"), (199, "a"), (100, "a"), (99, ""), (0, "")],
)
def test_bound_holds_in_memory_and_in_the_file(max_bytes: int, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    """100 bytes a rollout: those that came first are kept, the number of the others is said once."""
    in_flight = InFlight(max_bytes=max_bytes)
    in_flight.outgoing([request(name) for name in "abc"])
    keep(in_flight, *"abc")
    assert held(in_flight) == kept
    saved = in_flight.collect([enqueued(name, data_id=name) for name in "abc"])
    assert "".join(g.data_id for g in saved if g.rollouts[0].finished) == kept
    assert all(g.rollouts[0].request for g in saved)
    left_out = 3 - len(kept)
    assert len(caplog.messages) == (left_out > 0)
    if left_out:
        assert (
            f"in_flight_max_bytes={max_bytes}: of {left_out} rollouts that have ended only the requests" in caplog.text
        )


def test_nothing_is_fetched_that_will_not_be_kept() -> None:
    """What did not fit is wanted again once there is room for it."""
    in_flight = InFlight(max_bytes=150)
    in_flight.outgoing([request(name) for name in "abc"])
    keep(in_flight, *"ab")
    assert held(in_flight) == "a"
    assert not in_flight.wants_events("b", hooks_act=True)
    assert in_flight.wants_events("c", hooks_act=False), "it may be smaller"
    in_flight.forget_trained([enqueued("b"), enqueued("c")])
    assert in_flight.wants_events("b", hooks_act=False)
    assert not InFlight(max_bytes=0, tracked={"a": Tracked()}).wants_events("a", hooks_act=False)
    assert not InFlight(mode="drop", tracked={"a": Tracked()}).wants_events("a", hooks_act=True)


def test_every_way_out_makes_room() -> None:
    """Trained, deleted, created again, or kept anew: the bound counts what is there."""
    in_flight = InFlight(max_bytes=100)
    in_flight.outgoing([request(name) for name in "abcd"])
    keep(in_flight, *"a")
    keep(in_flight, *"a", num_bytes=60)
    keep(in_flight, *"b", num_bytes=40)
    assert held(in_flight) == "ab"
    in_flight.forget("a")
    in_flight.settle(dict.fromkeys({"b"}, Fate.CREATED), doubted=False)
    in_flight.create_missing([enqueued("b")], Manager())
    keep(in_flight, *"c")
    in_flight.forget_trained([enqueued("d")])
    keep(in_flight, *"d")
    assert held(in_flight) == "d"


def test_what_is_served_stays_whatever_it_grows_to() -> None:
    """It is nowhere else."""
    in_flight = InFlight(max_bytes=100, tracked={"a": Tracked(standing=Standing.SERVED), "b": Tracked()})
    keep(in_flight, *"ab", num_bytes=70)
    keep(in_flight, "a", num_bytes=130)
    assert held(in_flight) == "a"


def test_size_of_restored_events_counts_for_the_bound() -> None:
    """A bound holds also for what an earlier life kept."""
    kept = finished("t" * 500)
    for max_bytes, expected in ((json_bytes(kept) - 1, None), (json_bytes(kept), kept)):
        in_flight = InFlight(max_bytes=max_bytes)
        in_flight.restore([group("d", in_file("r", finished=kept))], group_size=1)
        (saved,) = in_flight.collect(in_flight.admit([], room=1))
        assert saved.rollouts[0].finished == expected


def test_untracked_rollout_is_saved_with_its_input() -> None:
    """Better than to lose it: a resume makes the request from the input."""
    (saved,) = InFlight().collect([enqueued("unseen")])
    assert saved.rollouts[0].request is None
    assert saved.rollouts[0].enqueued["input"] == {"index": 1}


def test_events_are_wanted_until_they_hold_a_reward() -> None:
    """An agent may post it after its rollout has ended. A failure gets none, and hooks may always post something."""
    in_flight = InFlight()
    in_flight.outgoing([request("a")])
    assert in_flight.wants_events("a", hooks_act=False)
    unrewarded = FinishedRollout({}, ({"event_type": "model_request", "data": {}},))
    for kept, is_worth, wanted in ((unrewarded, True, True), (unrewarded, False, False), (finished(), True, False)):
        in_flight.keep("a", kept, 1, is_worth=is_worth)
        assert in_flight.wants_events("a", hooks_act=False) is wanted
        assert in_flight.wants_events("a", hooks_act=True)


def test_input_is_saved_as_it_was_posted() -> None:
    """Whatever object a hook has put there: its agent gets JSON, and what is created again gets the same."""
    in_flight = InFlight()
    in_flight.outgoing([request("a", input={"index": 1, "id": "00000000-0000-0000-0000-000000000007"})])
    (saved,) = in_flight.collect([enqueued("a", input={"index": 1, "id": uuid.UUID(int=7)})])
    posted = saved.rollouts[0].request
    assert posted is not None
    assert saved.rollouts[0].enqueued["input"] == posted["input"] == {"index": 1, "id": str(uuid.UUID(int=7))}
    (unseen,) = InFlight().collect([enqueued("a", input={"id": uuid.UUID(int=7)})])
    assert unseen.rollouts[0].enqueued["input"] == {"id": str(uuid.UUID(int=7))}


def test_request_without_a_config_is_created_without_one() -> None:
    """A hook has taken it away; the trainer's own would be another one."""
    in_flight = InFlight(default_config=copy.deepcopy(DEFAULT_CONFIG))
    posted = request("a")
    del posted["config"]
    in_flight.outgoing([posted])
    assert "config" not in creation(in_flight.tracked["a"], "a", "new", DEFAULT_CONFIG)
    assert "config" not in creation(Tracked(request=in_flight.tracked["a"].request), "a", "new", None)
