"""What the extension relies on in a rollout of agent-lightning and in its rollout managers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agentlightning.verl import trainer as trainer_module
from agentlightning.verl.agl_rollout_manager import (
    AglAsyncRolloutManager,
    AglRolloutManager,
    EnqueuedRollout,
)
from omegaconf import OmegaConf

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.in_flight import carry_over
from tests.contract import agl
from tests.rig.bare import bare_trainer, enqueued

Trainer: Any = trainer_module.AgentLightningRayPPOTrainer


class ReachedError(Exception):
    """The call got as far as the test wants to see."""


# --- the rollout --------------------------------------------------------------------------------------------------


class NotingManager:
    """Stands for a rollout manager; notes the calls, and changes the carry-over when models are registered."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def delete_model(self) -> None:
        self._trainer.notes.append("delete_model")

    def register_model(self, server_addresses: list[str]) -> None:
        self._trainer.notes.append("register_model")
        self._trainer._carry_over_rollouts = [enqueued("restored", "new id")]

    def enqueue_and_wait_until_group_completed(self, data: Any, carried: list[Any], **_: Any) -> None:
        self._trainer.notes.append(f"enqueue with {[item.rollout_id for item in carried]}")
        raise ReachedError

    def enqueue_and_wait_until_completed(self, data: Any, **_: Any) -> None:
        self._trainer.notes.append("enqueue validation")
        raise ReachedError


class NotingTrainer(Trainer):
    """The real `_rollout`, without replicas and gateway."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.is_async = True
        self.global_steps = 1
        self.config = OmegaConf.create({"data": {"train_batch_size": 1}})
        self._carry_over_rollouts = [enqueued("restored", "old id")]
        self.llm_server_manager = SimpleNamespace(get_addresses=lambda: ["127.0.0.1:1"])

    def _resume_all_rollout_generation(self) -> None:
        self.notes.append("resume generation")

    def _resume_gateway(self) -> None:
        self.notes.append("resume gateway")

    def _make_rollout_manager(self, manager_cls: type) -> NotingManager:
        self.notes.append(manager_cls.__name__)
        return NotingManager(self)


def test_rollout_reads_the_carry_over_after_models_are_registered() -> None:
    """The hook in `register_model` renews it; and the gateway is open before the manager is made."""
    trainer = NotingTrainer()
    with pytest.raises(ReachedError):
        trainer._rollout(SimpleNamespace(non_tensor_batch={}), is_train=True)
    assert trainer.notes == [
        "resume generation",
        "resume gateway",
        "AglAsyncRolloutManager",
        "delete_model",
        "register_model",
        "enqueue with ['new id']",
    ], agl("_rollout deletes and registers models, then reads the carry-over", "agl/in_flight/rollout_manager.py")


def test_validation_registers_models_too_before_it_enqueues() -> None:
    """So in-flight rollouts are settled in the first rollout of any kind."""
    trainer = NotingTrainer()
    with pytest.raises(ReachedError):
        trainer._rollout(SimpleNamespace(non_tensor_batch={}), is_train=False)
    assert trainer.notes[2:] == ["AglRolloutManager", "delete_model", "register_model", "enqueue validation"]


def test_manager_is_an_instance_of_the_class_that_is_passed() -> None:
    """A subclass that is handed on is what the trainer works with."""
    made: list[dict[str, Any]] = []
    config = OmegaConf.create(
        {
            "agentlightning": {
                "agl_base_url": "http://127.0.0.1:1",
                "agl_key": "",
                "rollout_timeout_seconds": 1,
                "local": {"agent_class": None, "env_map": {}},
                "k8s": {"job_template_path": None},
                "hooks": None,
            },
            "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 2}},
        }
    )
    trainer = bare_trainer(config=config, global_steps=3, _hooks=None)
    trainer._make_rollout_manager(lambda **settings: made.append(settings))
    assert made[0]["step"] == 3
    assert made[0]["train_rollout_n"] == 2
    assert set(made[0]) <= set(inspect.signature(AglAsyncRolloutManager.__init__).parameters)


def test_drain_waits_for_the_state_that_is_judged() -> None:
    """`_pause_and_drain_gateway` polls `/proxy/state` through the client until `inflight` is 0."""
    asked: list[str] = []
    counts = iter([1, 0])

    class Client:
        def post_with_retry(self, url: str, **_: Any) -> Any:
            asked.append(url)
            return SimpleNamespace(json=lambda: {"inflight": 1})

        def get(self, url: str) -> Any:
            asked.append(url)
            return SimpleNamespace(json=lambda: {internals.NUM_PROXIED: next(counts)}, raise_for_status=lambda: None)

    bare_trainer(_agl_client=Client())._pause_and_drain_gateway(reason="test")
    assert asked == ["/proxy/pause", internals.GATEWAY_STATE_URL, internals.GATEWAY_STATE_URL], agl(
        "the drain polls /proxy/state", "agl/in_flight/server_client.py"
    )


# --- the rollout managers -----------------------------------------------------------------------------------------


def manager(cls: type = AglAsyncRolloutManager, **settings: Any) -> Any:
    made = cls(agl_base_url="http://127.0.0.1:1", agl_key="", model="m", step=7, poll_interval_seconds=0.0, **settings)
    made.client.close()
    return made


def test_enqueued_rollout_has_the_known_fields() -> None:
    """All are saved by name; a new one may need thought: is it still right after a resume?"""
    known = {
        *("data_id", "rollout_id", "step", "sample_idx_in_step"),
        *("enqueue_time", "input", "running_at", "finished_at"),
    }
    assert set(EnqueuedRollout.model_fields) == known, agl(
        f"EnqueuedRollout has the fields {known}", "agl/in_flight/carry_over.py"
    )


def test_enqueued_rollout_comes_back_from_its_fields() -> None:
    """Fields of another version are left out, and it can be changed in place."""
    item = enqueued("a", "1")
    again = internals.enqueued_rollout({**item.model_dump(), "of_another_version": 1})
    assert again == item
    internals.renew_enqueued(again, "2", 5.0)
    assert (again.rollout_id, again.enqueue_time, again.data_id, again.step) == ("2", 5.0, "a", 1)


class PostingClient:
    """Notes what is posted and answers as the server does."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, list[dict[str, Any]]]] = []

    def post_with_retry(self, url: str, *, json: list[dict[str, Any]]) -> Any:
        self.posted.append((url, json))
        status = {"state": "queuing", "created_at": 1.0, "updated_at": 1.0}
        answer = [{"config": {}, **item, "status": status} for item in json]
        return SimpleNamespace(json=lambda: answer)


class Hooks:
    """A user's hooks: changes each sibling's request."""

    def __init__(self) -> None:
        self.num_enqueued = 0

    def on_enqueue(self, request: Any) -> Any:
        self.num_enqueued += 1
        return request.model_copy(update={"metadata": {"sibling": self.num_enqueued}})


def test_rollouts_are_posted_as_json_keyword_to_the_known_url() -> None:
    """The tagging client looks at the url and changes `json`; ids are assigned before the post, after the hooks."""
    maker = manager(train_rollout_n=2, hooks=Hooks())
    maker.client = PostingClient()
    made = maker._create_rollouts({"question": np.array(["a", "b"], dtype=object)}, is_train=True)
    [(url, requests)] = maker.client.posted
    assert url == internals.ROLLOUTS_URL, agl(
        "rollouts are posted to /api/rollouts", "agl/in_flight/rollout_manager.py"
    )
    assert [item["rollout_id"] for item in requests] == [item.rollout_id for item in made]
    assert [item["metadata"]["sibling"] for item in requests] == [1, 2, 3, 4]
    expected = {*carry_over.REQUEST_KEYS, "rollout_id"}
    assert set(requests[0]) == expected, agl(f"a posted rollout has the keys {expected}", "agl/in_flight/carry_over.py")
    assert [item.sample_idx_in_step for item in made] == [0, 0, 1, 1]
    assert requests[0]["config"] == internals.default_rollout_config(maker), agl(
        "_rollout_config is what is posted when no hook changes it", "agl/internals/rollouts.py"
    )


class Polled:
    """A manager whose server is this object: states by id; notes what is asked, answers with empty events."""

    def __init__(self, states: dict[str, str], train_rollout_n: int, base: Any = AglAsyncRolloutManager) -> None:
        self.asked: list[str] = []
        self.after_look: Callable[[], None] = lambda: None
        owner = self

        class Manager(base):
            def _get_rollout(self, rollout_id: str) -> Any:
                owner.asked.append(f"get {rollout_id}")
                owner.after_look()
                status = {"state": states[rollout_id], "created_at": 1.0, "updated_at": 2.0}
                return internals.rollout_record(
                    {
                        "rollout_id": rollout_id,
                        "input": 1,
                        "is_train": True,
                        "metadata": {},
                        "config": {},
                        "status": status,
                    }
                )

            def _get_events(self, rollout_id: str, **kwargs: Any) -> list[Any]:
                owner.asked.append(f"events {rollout_id} {kwargs.get('format') or 'raw'}")
                return []

            def _run_succeeded_hook(self, rollout: Any) -> None:
                owner.asked.append(f"hook {rollout.rollout_id}")

            def _run_failed_hook(self, rollout: Any) -> None:
                owner.asked.append(f"failed hook {rollout.rollout_id}")

            def _delete_rollout(self, rollout_id: str) -> None:
                owner.asked.append(f"delete {rollout_id}")

        self.manager = manager(Manager, train_rollout_n=train_rollout_n)


def test_groups_are_awaited_read_and_deleted_through_the_managers_methods() -> None:
    """A group is read (both forms of events) and deleted once all siblings have ended; objects of the rest are kept."""
    polled = Polled({"a1": "succeeded", "a2": "failed", "b1": "running", "b2": "succeeded"}, train_rollout_n=2)
    items = [enqueued("b", "b1"), enqueued("b", "b2"), enqueued("a", "a1", 2), enqueued("a", "a2", 2)]
    completed, carried = polled.manager.enqueue_and_wait_until_group_completed(
        {}, items, is_train=True, target_finished_group_num=1
    )
    assert [item.rollout_id for item in completed] == ["a1", "a2"]
    assert all(kept is item for kept, item in zip(carried, items[:2], strict=True)), agl(
        "the carry-over keeps the EnqueuedRollout objects, oldest first", "agl/life.py"
    )
    assert [line for line in polled.asked if "get" not in line and "hook" not in line] == [
        *("events a1 raw", "events a1 triplet", "events a2 raw", "events a2 triplet", "delete a1", "delete a2"),
    ], agl(
        "a finished group is read through _get_events and deleted through _delete_rollout",
        "agl/in_flight/rollout_manager.py",
    )
    assert sorted(line for line in polled.asked if "get" in line) == ["get a1", "get a2", "get b1", "get b2"]


@pytest.mark.parametrize("base", [AglAsyncRolloutManager, AglRolloutManager])
def test_step_reads_the_id_of_each_rollout_anew(base: type) -> None:
    """A rollout that is created again in the middle of a step has another id, in the same object."""
    polled = Polled({"old": "running", "new": "succeeded"}, train_rollout_n=1, base=base)
    [item] = items = [enqueued("a", "old")]

    def renew() -> None:
        item.rollout_id = "new"

    polled.after_look = renew
    polled.manager._create_rollouts = lambda data, is_train: items
    if base is AglRolloutManager:
        [completed] = polled.manager.enqueue_and_wait_until_completed({}, is_train=False)
    else:
        wait = polled.manager.enqueue_and_wait_until_group_completed
        [completed], _ = wait({}, [], is_train=True, target_finished_group_num=1)
    assert completed.rollout_id == "new"
    asked = ["get old", "get new", "hook new", "events new raw", "events new triplet", "delete new"]
    assert polled.asked == asked, agl("a step reads ids at each look", "agl/in_flight/keeper.py")


def test_hook_follows_the_look_and_the_last_siblings_sample_follows_its_hook() -> None:
    """Our look runs the hook itself, so that this call may be left out; what it has fetched is read at once."""
    polled = Polled({"a1": "succeeded", "a2": "failed", "b1": "running", "b2": "succeeded"}, train_rollout_n=2)
    items = [enqueued("b", "b1"), enqueued("b", "b2"), enqueued("a", "a1", 2), enqueued("a", "a2", 2)]
    polled.manager.enqueue_and_wait_until_group_completed({}, items, is_train=True, target_finished_group_num=1)
    assert polled.asked[:8] == [
        *("get b1", "get b2", "hook b2", "get a1", "hook a1", "get a2", "failed hook a2", "events a1 raw"),
    ], agl("the hook of a rollout is run right after the look that finds it ended", "agl/in_flight/rollout_manager.py")


def test_manager_holds_the_hooks_that_it_calls() -> None:
    """Whether they may post something decides whether events are fetched again."""

    from agentlightning.hooks import RolloutHooks

    class Posts(RolloutHooks):
        def on_failed(self, rollout: Any, store: Any) -> None:
            store.add_event(rollout.rollout_id, "0", "reward", {"value": 0.0})

    posts = Posts()
    assert manager(hooks=posts)._hooks is posts, agl("the manager's _hooks", "agl/internals/rollouts.py")
    assert internals.hooks_act(manager(hooks=posts))
    assert not internals.hooks_act(manager(hooks=RolloutHooks()))
    assert not internals.hooks_act(manager())


def test_group_of_another_size_is_refused_by_the_manager() -> None:
    """Why restored groups are brought to the current rollout.n."""
    with pytest.raises(AssertionError):
        Polled({"a1": "running"}, train_rollout_n=2).manager.enqueue_and_wait_until_group_completed(
            {}, [enqueued("a", "a1")], is_train=True, target_finished_group_num=1
        )


def test_hooks_post_through_the_managers_method() -> None:
    """A reward that a hook posts for a rollout goes through `_post_event` and can be kept."""
    from agentlightning.verl.agl_rollout_manager import _TraceEventHelper

    posted: list[Any] = []
    helper = _TraceEventHelper()
    helper.add_event("id", "0", "reward", {"value": 1.0})
    helper.flush(SimpleNamespace(_post_event=lambda *event: posted.append(event)))  # type: ignore[arg-type]
    [(rollout_id, attempt_id, event)] = posted
    assert (rollout_id, attempt_id, event.event_type, event.data) == ("id", "0", "reward", {"value": 1.0})
