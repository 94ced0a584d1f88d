"""What the ledger, the audit and the announcements say of trainers, samplers and folders out of the ordinary."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_async_ckpt.ledger.audit import Audit, audit
from agl_async_ckpt.ledger.entry import Step, position_of
from agl_async_ckpt.ledger.reader import read_ledger
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME
from tests.rig.life import Parts, run_life, stock_trainer
from tests.rig.runs import settings
from tests.rig.server import AglServer
from tests.yardstick.scene import (
    Account,
    Interruption,
    Scene,
    alone,
    assert_kept,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)

RUN = settings("14/4/6", epochs=2)


def kinds(result: Audit) -> list[str]:
    """Kinds of the problems that an audit names."""
    return [problem.kind for problem in result.problems]


def rows_enqueued(account: Account) -> dict[int, list[int | None]]:
    """Step -> dataset rows that it enqueued, as the ledger names them."""
    return {step.step: [position_of(name) for name in step.pulled] for step in audit(account.out_dir).lineage.steps}


# --- samplers -------------------------------------------------------------------------------------------------------


def with_replacement(data: Any, dataset: Any) -> Any:
    """As many draws as rows, each of any row."""
    return _random(data, dataset, replacement=True)


def twice_the_rows(data: Any, dataset: Any) -> Any:
    """Two permutations a pass."""
    return _random(data, dataset, num_samples=2 * len(dataset))


def fewer_rows(data: Any, dataset: Any) -> Any:
    """A part of a permutation a pass."""
    return _random(data, dataset, num_samples=10)


def _random(data: Any, dataset: Any, **kwargs: Any) -> Any:
    import torch
    from torchdata.stateful_dataloader.sampler import RandomSampler

    generator = torch.Generator()
    generator.manual_seed(3)
    return RandomSampler(dataset, generator=generator, **kwargs)


@pytest.mark.parametrize("sampler", [with_replacement, twice_the_rows, fewer_rows])
@pytest.mark.parametrize("step", [2, 5])
def test_resume_within_an_epoch_of_a_sampler_that_repeats_or_leaves_out_rows_is_kept(
    server: AglServer, tmp_path: Path, sampler: Callable[[Any, Any], Any], step: int
) -> None:
    """A row that is drawn twice is due twice."""
    scene = Scene(replace(RUN, epochs=3), parts=Parts(sampler=sampler))
    truth = alone(scene, server, tmp_path)
    assert_resumed(truth, interrupted(scene, server, tmp_path, Interruption("updated", step)))


def test_begun_over_order_of_a_sampler_with_replacement_is_no_promise_kept(server: AglServer, tmp_path: Path) -> None:
    """VERL alone begins the pass anew, where the loader's state is dropped: said without counting rows."""
    run = replace(RUN, extension={"on_mismatch": "reset"})
    parts = Parts(sampler=with_replacement)
    run_life(run, tmp_path, server.url, parts=parts, stop_after_step=2)
    run_life(replace(run, seed=9), tmp_path, server.url, parts=parts)
    assert not audit(tmp_path).holds


# --- forks ----------------------------------------------------------------------------------------------------------

RELABELS = '''
from agentlightning.hooks import RolloutHooks

class Hooks(RolloutHooks):
    """Changes every request."""

    def on_enqueue(self, request):
        return request.model_copy(update={"input": {**request.input, "style": "short"}})
'''


@pytest.mark.parametrize("parent_is_gone", [False, True])
def test_fork_of_a_run_whose_hooks_change_requests_is_kept(
    server: AglServer, tmp_path: Path, parent_is_gone: bool
) -> None:
    """Resumed in its own folder, it still holds groups that the parent has pulled: the ledger knows their names."""
    scene = Scene(settings("24/2/6"), hooks=RELABELS)
    truth = alone(scene, server, tmp_path)
    seen: list[Any] = []

    def own_trainer(base: type) -> type:
        seen.append(base)
        if parent_is_gone and len(seen) == 3:
            (tmp_path / "interrupted" / "out").rename(tmp_path / "elsewhere")
        return base

    scene = replace(scene, own_trainer=own_trainer)
    ends = (Interruption("saved", 3, back_to=3, fork=True), Interruption("updated", 5))
    account = interrupted(scene, server, tmp_path, *ends)
    assert account.samples == truth.samples
    assert_kept(account)


# --- trainers of one's own ------------------------------------------------------------------------------------------


def replaces_the_step(base: type) -> type:
    """A `_train_step` that does agent-lightning's work and calls nothing of the classes before it."""
    step: Any = stock_trainer()._train_step  # type: ignore[attr-defined]

    class Own(base):
        def _train_step(self, *args: Any, **kwargs: Any) -> Any:
            return step(self, *args, **kwargs)

    return Own


def names_its_groups_anew(base: type) -> type:
    """Likewise, and no row of the batch that it returns can be traced to a group."""
    step: Any = stock_trainer()._train_step  # type: ignore[attr-defined]

    class Own(base):
        def _train_step(self, *args: Any, **kwargs: Any) -> Any:
            result = step(self, *args, **kwargs)
            if result is not None:
                ids = [str(uuid.uuid4()) for _ in range(len(result[1]))]
                result[1].non_tensor_batch["uid"] = np.array(ids, dtype=object)
            return result

    return Own


def has_no_ids(base: type) -> type:
    """Likewise, with a batch that holds no ids at all."""
    step: Any = stock_trainer()._train_step  # type: ignore[attr-defined]

    class Own(base):
        def _train_step(self, *args: Any, **kwargs: Any) -> Any:
            result = step(self, *args, **kwargs)
            if result is not None:
                result[1].non_tensor_batch.pop("uid")
            return result

    return Own


def test_trainer_that_replaces_the_step_is_followed_like_any_other(server: AglServer, tmp_path: Path) -> None:
    """Killed, and resumed: its surplus rows are dropped as by the trainer alone, since the generators are put back."""
    run = settings("24/4/7", rollout_n=2, mini_batch=3)
    scene = Scene(run, own_trainer=replaces_the_step)
    truth = alone(scene, server, tmp_path)
    assert any(step.metrics["training/n_sample_dropped/same_reward"] for step in truth.steps.values())
    assert_same(truth, extended(scene, server, tmp_path))
    assert_resumed(truth, interrupted(scene, server, tmp_path, Interruption("saved", 2)))
    assert set(rows_enqueued(interrupted_account(tmp_path))) == set(truth.steps)


def interrupted_account(folder: Path) -> Account:
    """Where `interrupted` has trained."""
    return Account([], [], 0, None, folder / "interrupted" / "out")  # type: ignore[arg-type]


@pytest.mark.parametrize("own_trainer", [replaces_the_step, names_its_groups_anew])
def test_trainer_that_replaces_the_step_sees_a_stop(
    server: AglServer, tmp_path: Path, own_trainer: Callable[[type], type]
) -> None:
    """It saves the step and ends, and the next start goes on."""
    scene = Scene(replace(RUN, save_freq=100), own_trainer=own_trainer)
    account = _run_interrupted(scene, server, tmp_path, Interruption("pulled", 2, how="stop"))
    assert [life.stopped for life in account.lives] == [2, None]
    assert account.lives[0].saves.keys() == {2}
    assert account.lives[1].start == 2


def _run_interrupted(scene: Scene, server: AglServer, folder: Path, *ends: Interruption) -> Account:
    return interrupted(scene, server, folder, *ends)


@pytest.mark.parametrize("own_trainer", [names_its_groups_anew, has_no_ids])
@pytest.mark.parametrize("save_freq", [1, 2])
def test_trainer_that_does_not_show_what_it_trains_cannot_be_audited(
    server: AglServer, tmp_path: Path, own_trainer: Callable[[type], type], save_freq: int
) -> None:
    """Said at the first step; the audit says that it cannot tell, after a kill as at the end. Training is the same."""
    scene = Scene(replace(RUN, save_freq=save_freq), own_trainer=own_trainer)
    truth = alone(scene, server, tmp_path)
    account = interrupted(scene, server, tmp_path, Interruption("updated", 4))
    assert account.samples == truth.samples
    for life in account.lives:
        assert sum("ledger" in text for text in life.warnings) == 1
    entries = read_ledger(account.out_dir).entries
    assert not any(isinstance(entry, Step) for entry in entries)
    result = audit(account.out_dir)
    assert set(kinds(result)) == {"gap"}
    died = interrupted_before_the_end(scene, server, tmp_path / "killed")
    assert set(kinds(audit(died))) == {"gap"}


def interrupted_before_the_end(scene: Scene, server: AglServer, folder: Path) -> Path:
    """A life that was killed after its second save, and no other."""
    server.reset()
    run_life(scene.run, folder, server.url, trainer_cls=_own(scene), die_at=("save", 4))
    return folder


def _own(scene: Scene) -> type:
    from tests.rig.life import extended_trainer

    return scene.own_trainer(extended_trainer())


def _picked(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: value[rows] for name, value in batch.items()}


def sorts(base: type) -> type:
    """Last rows first."""

    class Own(base):
        def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
            batch = super()._next_train_batch_dict_for_rollout()
            return _picked(batch, sorted(range(len(batch["index"])), key=lambda row: -batch["index"][row]))

    return Own


def filters(base: type) -> type:
    """Every third row of the dataset is left out."""

    class Own(base):
        def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
            batch = super()._next_train_batch_dict_for_rollout()
            return _picked(batch, [row for row, index in enumerate(batch["index"]) if index % 3] or [0])

    return Own


def pulls_twice(base: type) -> type:
    """Of twice the rows the later ones in the dataset are taken."""

    class Own(base):
        def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
            one, two = (super(Own, self)._next_train_batch_dict_for_rollout() for _ in range(2))
            batch = {name: _joined(value, two[name]) for name, value in one.items()}
            rows = sorted(range(len(batch["index"])), key=lambda row: -batch["index"][row])
            return _picked(batch, rows[: len(one["index"])])

    return Own


def pulls_by_size(base: type) -> type:
    """The trainer's own pull is replaced: it asks for rows until enough of them pass."""

    class Own(base):
        def _next_train_batch_dict_for_rollout(self: Any) -> dict[str, Any]:
            size = 6 - len({rollout.data_id for rollout in self._carry_over_rollouts})
            batch = self._next_train_batch_dict_with_size(size)
            kept = _picked(batch, [row for row, index in enumerate(batch["index"]) if index % 3])
            more = self._next_train_batch_dict_with_size(1)
            return {name: _joined(value, more[name]) for name, value in kept.items()}

    return Own


def adds_a_column(base: type) -> type:
    """And rewrites another."""

    class Own(base):
        def _next_train_batch_dict_for_rollout(self) -> dict[str, Any]:
            batch = super()._next_train_batch_dict_for_rollout()
            num_rows = len(batch["index"])
            words = np.array([f"{text}, please" for text in batch["question"]], dtype=object)
            return {**batch, "level": np.arange(num_rows), "question": words}

    return Own


def _joined(one: Any, two: Any) -> Any:
    import torch

    return torch.cat([one, two]) if torch.is_tensor(one) else np.concatenate([one, two])


OWN_PULLS = [sorts, filters, pulls_twice, pulls_by_size, adds_a_column]


@pytest.mark.parametrize("own_trainer", OWN_PULLS)
def test_audit_names_what_was_enqueued(server: AglServer, tmp_path: Path, own_trainer: Callable[[type], type]) -> None:
    """A trainer that changes what it pulls: what went to agents is in the ledger, and nothing is lost."""
    scene = Scene(settings("26/4/6", epochs=2), own_trainer=own_trainer)
    truth = alone(scene, server, tmp_path)
    account = extended(scene, server, tmp_path)
    assert_same(truth, account)
    assert rows_enqueued(account) == {number: step.pulled for number, step in truth.steps.items()}
    account = interrupted(scene, server, tmp_path, Interruption("saved", 2), Interruption("updated", 4))
    assert_resumed(truth, account)
    assert rows_enqueued(account) == {number: step.pulled for number, step in truth.steps.items()}


@pytest.mark.parametrize("own_trainer", [filters, pulls_twice])
def test_rows_that_a_trainer_leaves_out_are_counted_as_its_own(
    server: AglServer, tmp_path: Path, own_trainer: Callable[[type], type]
) -> None:
    """They came out of the loader and were not enqueued: dropped by the trainer."""
    scene = Scene(settings("26/4/6"), own_trainer=own_trainer)
    result = audit(extended(scene, server, tmp_path).out_dir)
    enqueued = {position_of(row.name) for row in result.walk.rows if row.pulled_step is not None}
    dropped = {position_of(name) for name in result.epochs[0].dropped_by_trainer}
    assert dropped
    assert not dropped & enqueued


def reads_the_loader(base: type) -> type:
    """A pull that asks neither of the trainer's own."""

    class Own(base):
        def _next_train_batch_dict_for_rollout(self: Any) -> dict[str, Any]:
            if self._train_dataloader_iter is None:
                self._train_dataloader_iter = iter(self.train_dataloader)
            return next(self._train_dataloader_iter)

    return Own


def test_pull_that_nobody_saw_cannot_be_told(server: AglServer, tmp_path: Path) -> None:
    """What it took from the loader is unknown: neither lost nor kept."""
    scene = Scene(settings("24/2/4", total_steps=4), own_trainer=reads_the_loader)
    result = audit(extended_without_verdict(scene, server, tmp_path))
    assert set(kinds(result)) == {"unexplained"}


def extended_without_verdict(scene: Scene, server: AglServer, folder: Path) -> Path:
    """The output folder of the scene with the extension."""
    return extended(scene, server, folder).out_dir


# --- switched off and on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", [{"extension": {"enabled": False}}, {"async_mode": False}], ids=str)
def test_steps_that_were_saved_while_the_extension_was_off_are_no_lost_files(
    server: AglServer, tmp_path: Path, meanwhile: dict[str, Any]
) -> None:
    """On, off, on: the start says what such a step lacks and goes on, and later steps are exact again."""
    run = settings("40/2/5")
    off = replace(run, **meanwhile)
    if not off.async_mode:
        run_life(replace(run, extension={"in_flight": "drop"}), tmp_path, server.url, stop_after_step=2)
        off = replace(off, extension={"enabled": False})
    else:
        run_life(run, tmp_path, server.url, stop_after_step=2)
    run_life(off, tmp_path, server.url, stop_after_step=4)
    back = run_life(run, tmp_path, server.url, stop_after_step=6)
    assert back.start == 4
    assert any("without the input position" in text for text in back.warnings)
    assert not any("missing" in text or "wrote them before" in text for text in back.warnings)
    again = run_life(run, tmp_path, server.url)
    assert again.start == 6
    assert again.warnings == []


def test_audit_tells_a_start_that_was_switched_off_from_a_step_without_a_position(
    server: AglServer, tmp_path: Path
) -> None:
    """Each loss has its own cause."""
    run = settings("40/2/5")
    run_life(run, tmp_path, server.url, stop_after_step=2)
    run_life(replace(run, extension={"enabled": False}), tmp_path, server.url, stop_after_step=4)
    run_life(run, tmp_path, server.url)
    causes = {problem.life: problem.text for problem in audit(tmp_path).problems if problem.kind == "lost"}
    assert "enabled=false" in causes[2]
    assert "saved" in causes[3]
    assert "enabled=false" in causes[3]


@pytest.mark.parametrize("first", ["on", "off"])
def test_input_file_that_was_lost_is_still_missed_after_a_time_of_being_off(
    server: AglServer, tmp_path: Path, first: str
) -> None:
    """A sealed step has had one, and so has each step since the extension is on again."""
    run = settings("40/2/5")
    run_life(
        run if first == "on" else replace(run, extension={"enabled": False}), tmp_path, server.url, stop_after_step=2
    )
    run_life(replace(run, extension={"enabled": False}), tmp_path, server.url, stop_after_step=4)
    run_life(run, tmp_path, server.url, stop_after_step=6)
    (tmp_path / "global_step_6" / FILE_NAME).unlink()
    (tmp_path / "global_step_6" / SEAL_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="not loaded"):
        run_life(run, tmp_path, server.url)


def test_run_that_has_done_no_step_is_not_said_to_be_kept(
    server: AglServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to tell yet, and nothing is wrong."""
    from agl_async_ckpt.cli.main import main

    run_life(RUN, tmp_path, server.url, die_at=("loaded", 0))
    assert main(["audit", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "kept" not in text
    assert "no step" in text


# --- trainers that load or save by themselves -----------------------------------------------------------------------


def loads_by_itself(base: type) -> type:
    """VERL's load, and nothing of the classes before it."""
    load: Any = stock_trainer()._load_checkpoint  # type: ignore[attr-defined]

    class Own(base):
        def _load_checkpoint(self) -> Any:
            return load(self)

    return Own


def saves_by_itself(base: type) -> type:
    """VERL's save, likewise."""
    save: Any = stock_trainer()._save_checkpoint  # type: ignore[attr-defined]

    class Own(base):
        def _save_checkpoint(self) -> Any:
            return save(self)

    return Own


@pytest.mark.parametrize("own_trainer", [loads_by_itself, saves_by_itself])
@pytest.mark.parametrize("val_before_train", [False, True])
def test_trainer_that_loads_or_saves_by_itself_trains_as_alone(
    server: AglServer, tmp_path: Path, own_trainer: Callable[[type], type], val_before_train: bool
) -> None:
    """No position is saved, and the run is that of the trainer alone."""
    scene = Scene(replace(RUN, val_before_train=val_before_train), own_trainer=own_trainer)
    truth = alone(scene, server, tmp_path)
    account = extended(scene, server, tmp_path)
    assert account.samples == truth.samples
    assert account.left == truth.left
    assert list(account.lives[0].saves) == list(truth.lives[0].saves)
    assert not list(account.out_dir.glob(f"global_step_*/{FILE_NAME}"))
    if own_trainer is loads_by_itself:
        [warning] = account.lives[0].warnings
        assert warning.startswith("This trainer loads checkpoints by itself")
