"""What lies in the checkpoint: readable by OpenRLHF alone, and never used when it is not whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from agl_async_ckpt.exceptions import DamagedStateError, StateMismatchError, UnsupportedVersionError
from agl_async_ckpt.openrlhf import client_state
from agl_async_ckpt.openrlhf.boundary import Boundary
from agl_async_ckpt.openrlhf.client_state import KEY, materialise, read_entry
from agl_async_ckpt.openrlhf.internals import root_cause
from agl_async_ckpt.openrlhf.settings import announcement, writes_checkpoints
from tests.openrlhf.rig.stage import Stage

BOUNDARY = Boundary(None, 0, True, {"dataset length": 8}, {"rollout.n_samples_per_prompt": 1}, {})
STATES = {"episode": 1, "global_step": 3, "data_loader_state_dict": {"position": 4}, KEY: BOUNDARY}


def saved(args: Any) -> Path:
    """The file of the newest checkpoint."""
    folder = Path(args.ckpt.path) / "_actor"
    return folder / (folder / "latest").read_text() / "states.pt"


def rewrite(args: Any, change: Any) -> None:
    """Change the client state of the newest checkpoint."""
    content = torch.load(saved(args), weights_only=False)
    change(content["client"])
    torch.save(content, saved(args))


def refusal(stage: Stage, args: Any) -> BaseException:
    """The error with which a resume ends."""
    with pytest.raises(RayTaskError) as caught:
        stage.live(args)
    return root_cause(caught.value)


def test_entry_comes_back_and_the_boundary_stays() -> None:
    """Materialising leaves the client states as they were: a best checkpoint may be written of them later."""
    entry = materialise(STATES)[KEY]
    assert STATES[KEY] is BOUNDARY
    state = read_entry(entry, "ckpt", 3)
    assert (state.global_step, state.epoch, state.exhausted, state.num_buffered) == (3, 2, True, 0)
    assert state.loader_state == {"position": 4}
    assert state.fingerprint.must_match == {"dataset length": 8}


def test_every_altered_byte_is_noticed() -> None:
    """A sample of positions over the whole entry."""
    entry = materialise(STATES)[KEY]
    for position in range(0, len(entry), 97):
        altered = entry.clone()
        altered[position] ^= 1
        with pytest.raises(DamagedStateError, match="ckpt/_actor, client state 'agl_async_ckpt'"):
            read_entry(altered, "ckpt/_actor", 3)


@pytest.mark.parametrize("entry", [None, {}, b"bytes", torch.zeros(3), torch.zeros(0, dtype=torch.uint8)], ids=str)
def test_entry_of_another_kind_is_damage(entry: Any) -> None:
    """Something else under our key is said, not skipped."""
    with pytest.raises(DamagedStateError, match="client state 'agl_async_ckpt'"):
        read_entry(entry, "ckpt", 3)


def test_entry_of_another_step_is_refused() -> None:
    """The entry and the client state around it belong together."""
    with pytest.raises(StateMismatchError, match="another step"):
        read_entry(materialise(STATES)[KEY], "ckpt", 4)


def test_newer_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, with the version that wrote it."""
    with monkeypatch.context() as patch:
        patch.setattr(client_state, "LAYOUT", 2)
        entry = materialise(STATES)[KEY]
    with pytest.raises(UnsupportedVersionError, match="layout 2; this agl-async-ckpt reads layout 1"):
        read_entry(entry, "ckpt", 3)


def test_damaged_checkpoint_stops_the_resume(stage: Stage, tmp_path: Path) -> None:
    """Before anything is generated, with the checkpoint named."""
    args = stage.args(tmp_path, 8)
    stage.live(args, crash_at=2)

    def damage(client: dict[str, Any]) -> None:
        client[KEY] = client[KEY].clone()
        client[KEY][100] ^= 1

    rewrite(args, damage)
    error = refusal(stage, args)
    assert isinstance(error, DamagedStateError)
    assert str(tmp_path) in str(error)
    assert ray.get(stage.machine.story.remote())["generated"] == []


def test_checkpoint_without_our_entry_resumes_as_openrlhf_does(stage: Stage, tmp_path: Path) -> None:
    """Such as one that was saved before the extension; the tail is lost, and so it was before."""
    args = stage.args(tmp_path, 8)
    stage.live(args, crash_at=2, extended=False, in_order=True)
    assert stage.live(args, in_order=True).trained == [["4", "5"], ["6", "7"]]
    (warning,) = ray.get(stage.trainer.warnings.remote())
    assert f"{Path(args.ckpt.path) / '_actor'} holds no input state" in warning
    assert "by step 1 are skipped" in warning


def test_openrlhf_alone_reads_our_checkpoints(stage: Stage, tmp_path: Path) -> None:
    """The way back stays open: OpenRLHF resumes from them as from its own."""
    args = stage.args(tmp_path, 8)
    stage.live(args, crash_at=2, in_order=True)
    assert stage.live(args, in_order=True, extended=False).trained == [["4", "5"], ["6", "7"]]


def test_checkpoint_holds_samples_once_and_only_those_left(stage: Stage, tmp_path: Path) -> None:
    """As plain values: no class of OpenRLHF is named in the entry."""
    args = stage.args(tmp_path, 8, rollout__vllm_generate_batch_size=6)
    for crash_at, left in ((2, 4), (3, 2), (4, 0)):
        stage.live(args, crash_at=crash_at, in_order=True)
        client = torch.load(saved(args), weights_only=False)["client"]
        assert read_entry(client[KEY], "ckpt", client["global_step"]).num_buffered == left
        assert b"openrlhf.trainer" not in bytes(client[KEY].tolist())


def test_changed_batch_and_queue_sizes_are_exact(stage: Stage, tmp_path: Path) -> None:
    """Every prompt once, in the same order, in batches of the new size."""
    whole = stage.live(stage.args(tmp_path / "whole", 14))
    before = stage.live(stage.args(tmp_path / "killed", 14), crash_at=2)
    changed = {"rollout__batch_size": 3, "rollout__vllm_generate_batch_size": 7, "train__async_queue_size": 4}
    after = stage.live(stage.args(tmp_path / "killed", 14, **changed), seed=8)
    assert before.prompts + after.prompts == whole.prompts
    assert [len(batch) for batch in after.trained] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("num_prompts", "changed", "names"),
    [
        pytest.param(9, {}, ["dataset length", "8", "9"], id="another_dataset"),
        pytest.param(8, {"data__input_template": "x{}"}, ["dataset content"], id="other_prompts"),
        pytest.param(
            8, {"rollout__n_samples_per_prompt": 2}, ["rollout.n_samples_per_prompt", "1", "2"], id="group_size"
        ),
        pytest.param(8, {"data__dataloader_num_workers": 1}, ["data.dataloader_num_workers"], id="loader_workers"),
        pytest.param(8, {"correction": True}, ["log-probabilities"], id="correction"),
    ],
)
def test_changed_setting_is_refused_by_name(
    stage: Stage, tmp_path: Path, num_prompts: int, changed: dict[str, Any], names: list[str]
) -> None:
    """With both values, and with the number of samples that going on without the extension would skip."""
    stage.live(stage.args(tmp_path, 8), crash_at=2)
    correction = changed.pop("correction", False)
    args = stage.args(tmp_path, num_prompts, **changed)
    if correction:
        advantage = args.algo.advantage
        advantage.is_correction_level, advantage.is_correction_enable = "token", True
    error = refusal(stage, args)
    assert isinstance(error, StateMismatchError)
    for part in [*names, "skips the 2 generated samples"]:
        assert part in str(error)


def test_group_size_may_change_where_nothing_is_left_of_the_old_one(stage: Stage, tmp_path: Path) -> None:
    """At the end of a generation batch."""
    stage.live(stage.args(tmp_path, 8), crash_at=3, in_order=True)
    after = stage.live(stage.args(tmp_path, 8, rollout__n_samples_per_prompt=2), in_order=True)
    assert after.trained == [["4", "4", "5", "5"], ["6", "6", "7", "7"]]


def test_sync_training_refuses_to_skip_samples(stage: Stage, tmp_path: Path) -> None:
    """A synchronous resume of an asynchronous checkpoint; without samples in it, nothing is in the way."""
    from agl_async_ckpt.openrlhf.sync import GuardedPPOTrainer

    for crash_at, left in ((2, 2), (3, 0)):
        args = stage.args(tmp_path, 8)
        stage.live(args, crash_at=crash_at)
        ray.get(stage.machine.begin.remote(str(Path(args.ckpt.path) / "_actor"), None))
        trainer = GuardedPPOTrainer.__new__(GuardedPPOTrainer)
        trainer.args, trainer.actor_model_group = args, stage.group()
        if left:
            with pytest.raises(StateMismatchError, match="with 2 generated samples"):
                trainer.init_checkpoint_states()
        else:
            states = trainer.init_checkpoint_states()
            assert KEY not in states
            assert states["global_step"] == 2


def test_samples_are_fetched_only_when_a_checkpoint_is_written(stage: Stage) -> None:
    """Every other call to the models passes as it is; what is saved goes by reference, to every rank."""
    from agl_async_ckpt.openrlhf.trainer import _SavingGroup

    calls: list[tuple[str, dict[str, Any]]] = []
    group = SimpleNamespace(async_run_method=lambda method_name, **kwargs: calls.append((method_name, kwargs)))
    saving = _SavingGroup(group)
    tail = ray.put([])
    states = {**STATES, KEY: dataclasses.replace(BOUNDARY, tail=tail)}
    saving.async_run_method(method_name="fit", client_states=states)
    assert calls.pop() == ("fit", {"client_states": states})
    saving.async_run_method(method_name="save_checkpoint", tag="global_step3", client_states=states)
    name, kwargs = calls.pop()
    assert (name, kwargs["tag"]) == ("save_checkpoint", "global_step3")
    assert read_entry(ray.get(kwargs["client_states"])[KEY], "ckpt", 3).exhausted
    assert isinstance(states[KEY], Boundary)


def _arguments(save_steps: float, eval_steps: float, disable_ds: bool, dataset: str | None, metric: str) -> Any:
    return SimpleNamespace(
        ckpt=SimpleNamespace(save_steps=save_steps, disable_ds=disable_ds, best_metric_key=metric),
        eval=SimpleNamespace(steps=eval_steps, dataset=dataset),
    )


def test_runs_without_checkpoints_need_no_samples_that_can_be_saved() -> None:
    """Such a run must not fail on an input that no checkpoint will hold."""
    saved_by = {
        (save_steps, eval_steps, disabled): writes_checkpoints(
            _arguments(save_steps, eval_steps, disabled, "eval.jsonl", "")
        )
        for save_steps in (-1, 5)
        for eval_steps in (float("inf"), 5)
        for disabled in (False, True)
    }
    assert {key for key, saves in saved_by.items() if saves} == {
        (-1, 5, False),
        (5, float("inf"), False),
        (5, 5, False),
    }


def test_evaluations_save_only_with_prompts_of_their_own_and_a_metric_to_be_best_in() -> None:
    """OpenRLHF skips them without prompts, and saves no best one where the metric is `none`."""
    assert not writes_checkpoints(_arguments(-1, 5, False, None, ""))
    assert not writes_checkpoints(_arguments(-1, 5, False, "eval.jsonl", "none"))
    assert writes_checkpoints(_arguments(5, 5, False, None, "none"))


def test_run_that_writes_no_checkpoint_is_not_announced_as_one_that_resumes() -> None:
    """The reason is named."""
    assert (
        announcement(_arguments(5, -1, False, None, ""), "0.11.2") == "Exact resume of inputs is on (OpenRLHF 0.11.2)."
    )
    for arguments, why in (
        (_arguments(5, 5, True, None, ""), "disable_ds"),
        (_arguments(-1, -1, False, None, ""), "save_steps"),
    ):
        text = announcement(arguments, "0.11.2")
        assert "is on" not in text
        assert text.startswith("No checkpoint")
        assert why in text


def test_boundary_is_frozen() -> None:
    """It is shared by every batch of a generation."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        BOUNDARY.num_samples = 1  # pyright: ignore[reportAttributeAccessIssue]
