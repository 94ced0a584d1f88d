"""Hooks that post traces and rewards: while the server knows a rollout it is right; what is kept is for when not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.folder.stop_request import request_stop
from tests.rig.agents import AgentPlan
from tests.rig.in_flight import SiblingAgents, SiblingPlan, end, ids_of
from tests.rig.life import run_life, stock_trainer
from tests.rig.runs import settings
from tests.rig.server import AglServer
from tests.yardstick.scene import (
    Interruption,
    Scene,
    alone,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)

BEGIN = """
import httpx
from agentlightning.hooks import RolloutHooks
from tests.rig.agents import model_request, row_of

SERVER = {server!r}

def direct(rollout, kind, data):
    url = f"{{SERVER}}/api/rollouts/{{rollout.rollout_id}}/attempt/0/events"
    return httpx.post(url, json={{"event_type": kind, "data": data}})

def trace(rollout, token=None):
    data = model_request(row_of(rollout.input))
    if token is not None:
        data["response"]["choices"][0]["token_ids"][0] = token
    return data

class Hooks(RolloutHooks):
"""

TRACES = """
    def on_succeeded(self, rollout, events, store):
        store.add_event(rollout.rollout_id, "0", "model_request", trace(rollout))
        store.add_event(rollout.rollout_id, "0", "reward", {"value": row_of(rollout.input) / 8, "message": "long"})
"""
CORRECTS = """
    def on_succeeded(self, rollout, events, store):
        store.add_event(rollout.rollout_id, "0", "model_request", trace(rollout, token=9))
"""
REWARDS_A_HIDDEN_ATTEMPT = """
    def on_succeeded(self, rollout, events, store):
        store.add_event(rollout.rollout_id, "retry-1", "reward", {"value": 7.0})
        store.add_event(rollout.rollout_id, "retry-1", "model_request", trace(rollout, token=9))
"""
ASKS_A_JUDGE = """
    def on_succeeded(self, rollout, events, store):
        direct(rollout, "reward", {"value": 0.125})
"""
RAISES_HALF_WAY = """
    def on_succeeded(self, rollout, events, store):
        store.add_event(rollout.rollout_id, "0", "reward", {"value": 0.5})
        direct(rollout, "model_request", trace(rollout, token=9))
        raise RuntimeError("half of it is posted")
"""
EXPLAINS_FAILURES = """
    def on_failed(self, rollout, store):
        store.add_event(rollout.rollout_id, "0", "model_request", trace(rollout, token=8))
        store.add_event(rollout.rollout_id, "0", "reward", {"value": -1.0})
"""
HOOKS = {
    "posts the whole trace": (TRACES, "silent"),
    "corrects a trace": (CORRECTS, "ok"),
    "rewards an attempt that is hidden": (REWARDS_A_HIDDEN_ATTEMPT, "ok"),
    "has a judge post to the server": (ASKS_A_JUDGE, "ok"),
    "raises half way": (RAISES_HALF_WAY, "ok"),
    "explains failures": (EXPLAINS_FAILURES, "failed"),
}
EVERY = pytest.mark.parametrize("name", HOOKS)


def scene_of(name: str, server: AglServer, case: str = "12/2/5", **changes: Any) -> Scene:
    """A run with a hook, and agents whose every rollout ends so that the hook has to do its work."""
    text, outcome = HOOKS[name]
    plan = AgentPlan(outcome=dict.fromkeys(range(12), outcome))
    return Scene(settings(case, **changes), plan, hooks=BEGIN.format(server=server.url) + text)


def siblings(scene: Scene, *rows: int, until: int) -> Scene:
    """The scene with two siblings, one of which ends early for some rows, and the other in a later step."""
    outcome = scene.plan.outcome[0]
    plan = SiblingPlan(
        outcome=scene.plan.outcome,
        hold=dict.fromkeys(rows, until),
        early=dict.fromkeys(rows, 1),
        early_outcome=dict.fromkeys(rows, outcome),
    )
    changed = scene.changed(rollout_n=2)
    return Scene(changed.run, plan, hooks=scene.hooks)


@EVERY
def test_what_a_hook_posts_is_trained(server: AglServer, tmp_path: Path, name: str) -> None:
    """As by the trainer alone, with a single sibling: it is read once its hook has run."""
    scene = scene_of(name, server)
    assert_same(alone(scene, server, tmp_path), extended(scene, server, tmp_path))


@EVERY
def test_what_a_hook_posts_for_siblings_is_trained(server: AglServer, tmp_path: Path, name: str) -> None:
    """Some of them wait for several steps, and the hook runs in each of them."""
    scene = siblings(scene_of(name, server), 3, 4, until=4)
    assert_same(alone(scene, server, tmp_path), extended(scene, server, tmp_path))


@pytest.mark.parametrize("name", ["posts the whole trace", "has a judge post to the server"])
def test_what_a_hook_posts_is_validated(server: AglServer, tmp_path: Path, name: str) -> None:
    """A validation before the training reads rollouts as the trainer alone does."""
    scene = scene_of(name, server, val_before_train=True)
    assert_same(alone(scene, server, tmp_path), extended(scene, server, tmp_path))


@pytest.mark.parametrize("state", ["alive", "restarted"])
@pytest.mark.parametrize("name", [name for name in HOOKS if name != "explains failures"])  # those run again
def test_what_a_hook_has_posted_outlives_trainer_and_server(
    server: AglServer, tmp_path: Path, name: str, state: str
) -> None:
    """Siblings of rows 4 and 5 have ended early; killed after step 2, resumed on the old server or on a new one."""
    scene = siblings(scene_of(name, server), 4, 5, until=4)
    truth = alone(scene, server, tmp_path)
    assert len(truth.samples[4]) == 4
    assert_resumed(truth, interrupted(scene, server, tmp_path, Interruption("saved", 2, server=state)))


@pytest.mark.parametrize("name", ["posts the whole trace", "has a judge post to the server", "corrects a trace"])
def test_what_ended_unseen_before_a_stop_is_trained_as_its_hook_would_have_it(
    server: AglServer, tmp_path: Path, name: str
) -> None:
    """Its hook runs when the training goes on, on what was kept, or on what runs again."""
    scene = scene_of(name, server)
    truth = alone(scene, server, tmp_path)
    server.reset()
    server.agents = SiblingAgents(scene.plan)
    out = tmp_path / "stopped"
    hooks = tmp_path / "hooks.py"
    hooks.write_text(scene.hooks)
    run = scene.changed(overrides=(f"agentlightning.hooks={hooks}",)).run

    def here(point: str, step: int) -> bool:
        if (point, step) == ("updated", 2):
            end(server, *ids_of(server, 4, 5, state="running"), outcome=HOOKS[name][1])
            request_stop(out, "the test")
        return False

    first = run_life(run, out, server.url, die_at=here)
    assert first.stopped == 2
    assert server.rollouts() == {}
    second = run_life(run, out, server.url)
    for number, step in second.steps.items():
        assert sorted(step.samples) == sorted(truth.steps[number].samples), f"rows of the update in step {number}"


def test_a_judge_that_is_gone_with_the_server_is_not_replaced_by_the_fill_in_value(
    server: AglServer, tmp_path: Path
) -> None:
    """A success without a reward, whose hook cannot post one to a server that does not know it, is run again."""
    text = BEGIN.format(server=server.url) + ASKS_A_JUDGE
    plan = SiblingPlan(hold={4: 4}, early={4: 1}, early_outcome={4: "unrewarded"})
    scene = Scene(settings("12/2/5", rollout_n=2), plan, hooks=text)
    truth = alone(scene, server, tmp_path)
    account = interrupted(scene, server, tmp_path, Interruption("pulled", 2, server="restarted"))
    assert account.samples == truth.samples


class Reads:
    """How often the server was asked for the events of each rollout."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from agentlightning.server.routes import events

        self.counts: Counter[str] = Counter()
        query = events._query_events

        def counting(*, rollout_id: str, **kwargs: Any) -> Any:
            self.counts[rollout_id] += 1
            return query(rollout_id=rollout_id, **kwargs)

        monkeypatch.setattr(events, "_query_events", counting)

    def of(self, scene: Scene, server: AglServer, out: Path, trainer_cls: type | None = None) -> Counter[int]:
        """Number of requests -> rollouts of a run that were read so often."""
        self.counts.clear()
        server.reset()
        server.agents = SiblingAgents(scene.plan)
        run = scene.run
        if scene.hooks:
            path = out.with_suffix(".py")
            path.write_text(scene.hooks)
            run = scene.changed(overrides=(f"agentlightning.hooks={path}",)).run
        run_life(run, out, server.url, trainer_cls=trainer_cls)
        return Counter(self.counts.values())


@pytest.mark.parametrize("hooks", [False, True], ids=["no hooks", "hooks"])
def test_a_rollout_is_read_no_more_often_than_by_the_trainer_alone(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooks: bool
) -> None:
    """With a single sibling: raw and triplets, and once more for a hook."""
    scene = scene_of("corrects a trace", server)
    if not hooks:
        scene = Scene(scene.run)
    reads = Reads(monkeypatch)
    stock = reads.of(scene, server, tmp_path / "stock", stock_trainer())
    ours = reads.of(scene, server, tmp_path / "ours")
    num_trained = 2 * scene.run.n // 2 - 4
    assert stock[3 if hooks else 2] >= num_trained
    assert ours == stock


def test_of_siblings_only_those_that_others_are_awaited_for_are_read_twice(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a group is read by the trainer at once: what was fetched a moment ago serves."""
    reads = Reads(monkeypatch)
    counts = reads.of(Scene(settings("8/2/4", rollout_n=2)), server, tmp_path / "out")
    assert counts[2] == counts[4] > 0
    assert set(counts) == {2, 4}


# --- what hooks put into requests ----------------------------------------------------------------------------------

PUTS = """
import collections, enum, pathlib, uuid
from pydantic import AnyUrl
from agentlightning.hooks import RolloutHooks

class Kind(enum.StrEnum):
    HARD = "hard"

class Level(enum.IntEnum):
    TWO = 2

class Text(str):
    pass

VALUES = {
    "uuid": uuid.UUID(int=7), "path": pathlib.Path("/data/x"), "kind": Kind.HARD, "level": Level.TWO,
    "text": Text("t"), "deque": collections.deque([1, 2]), "counter": collections.Counter("aab"),
    "url": AnyUrl("http://host/path"), "keys": {Kind.HARD: {Level.TWO: (1, 2)}},
}

class Hooks(RolloutHooks):
    def on_enqueue(self, request):
        added = {name: VALUES[name] for name in NAMES}
        return request.model_copy(update={"input": {**request.input, **added}, "metadata": {"of": added}})
"""
NAMES = ["uuid", "path", "kind", "level", "text", "deque", "counter", "url", "keys"]


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_a_hook_puts_into_an_input_is_kept_as_it_was_posted(
    server: AglServer, tmp_path: Path, name: str
) -> None:
    """Agents get JSON, again after two resumes; the run trains on."""
    scene = Scene(settings("8/2/5"), hooks=PUTS.replace("for name in NAMES", f"for name in [{name!r}]"))
    ends = (Interruption("saved", 1, server="restarted"), Interruption("saved", 2, server="restarted"))
    assert_resumed(alone(scene, server, tmp_path), interrupted(scene, server, tmp_path, *ends))


NO_CONFIG = """
from agentlightning.hooks import RolloutHooks

class Hooks(RolloutHooks):
    def on_enqueue(self, request):
        return request.model_copy(update={"config": None} if request.input["index"] % 2 else {})
"""


def test_a_request_without_a_config_is_created_again_without_one(server: AglServer, tmp_path: Path) -> None:
    """And not with the trainer's own, which is what the others get."""
    run = settings("8/2/5", overrides=("agentlightning.rollout_timeout_seconds=77",))
    scene = Scene(run, hooks=NO_CONFIG)
    truth = alone(scene, server, tmp_path)
    assert {'"timeout_seconds": 77' in asked for asked in truth.asked} == {True, False}
    assert_resumed(truth, interrupted(scene, server, tmp_path, Interruption("saved", 1, server="restarted")))
