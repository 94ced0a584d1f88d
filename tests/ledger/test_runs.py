"""Ledger and audit of the real trainer, loader and server, over kills and resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.exceptions import StateWriteError
from agl_async_ckpt.ledger.audit import Audit, audit
from agl_async_ckpt.ledger.entry import Step, position_of
from agl_async_ckpt.ledger.reader import read_ledger
from agl_async_ckpt.storage.layout import LEDGER_NAME
from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.life import run_life, stock_trainer
from tests.rig.record import Life, lineage, rows_trained
from tests.rig.runs import settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

HOOKS = Path(__file__).with_name("hooks.py")


def lives(run: RunSettings, out: Path, server: AglServer, *deaths: tuple[str, int], **kwargs: Any) -> list[Life]:
    """One life per death, and one to the end."""
    found = [run_life(run, out, server.url, die_at=death, **kwargs) for death in deaths]
    return [*found, run_life(run, out, server.url, **kwargs)]


def positions(names: Any) -> list[int | None]:
    """Dataset rows of inputs."""
    return [position_of(name) for name in names]


def rows(names: Any) -> list[int]:
    """The same, all known."""
    return [row for row in positions(names) if row is not None]


def assert_same_as_recorded(result: Audit, *found: Life) -> None:
    """The ledger says, step by step, what the rig has seen the trainer do."""
    seen = lineage(*found)
    steps = {step.step: step for step in result.lineage.steps}
    assert sorted(steps) == sorted(number for number, step in seen.items() if step.trained)
    for number, step in steps.items():
        assert positions(step.pulled) == seen[number].pulled
        assert step.epoch == seen[number].epoch
        assert sorted(rows([*step.trained, *step.dropped_by_trainer])) == sorted(seen[number].trained)
    for life in found:
        for number, position in life.saves.items():
            if number in steps:
                assert tuple(positions(steps[number].in_flight)) == position.in_flight
                assert tuple(positions(steps[number].buffered)) == position.buffered


def test_run_of_several_kills_has_no_problem_and_the_ledger_says_what_the_trainer_did(
    server: AglServer, tmp_path: Path
) -> None:
    """Two siblings per group, slow rows, three epochs with a remainder, deaths at four kinds of instants."""
    run = settings("15/2/5", epochs=3, rollout_n=2, shuffle=True, save_freq=2)
    server.agents = AgentTable(AgentPlan(rank={3: 5, 7: 3}))
    found = lives(run, tmp_path, server, ("pulled", 4), ("trained", 7), ("saved", 10), ("save", 14))
    result = audit(tmp_path)
    assert result.problems == []
    assert result.holds
    assert result.is_finished
    assert_same_as_recorded(result, *found)
    assert [start.step for start in result.walk.resumes] == [2, 6, 10, 12]
    for epoch in result.epochs[:2]:
        assert (epoch.num_inputs, epoch.num_trained[2], epoch.num_left_out) == (15, 0, 1)
        assert epoch.num_trained[1] + len(epoch.in_flight) == 14
        assert len(epoch.left_out) == 1
    assert sum(len(step.trained) for step in result.lineage.steps) == 2 * result.last_step


def test_ledger_of_a_switched_off_extension_shows_exactly_the_rows_that_resumes_lose(
    server: AglServer, tmp_path: Path
) -> None:
    """`enabled: false` leaves the checkpoints to VERL: the audit names the rows that the stock trainer would lose."""
    run = settings("26/2/5", save_freq=2, extension={"enabled": False})
    found = lives(run, tmp_path, server, ("pulled", 3), ("trained", 7))
    result = audit(tmp_path)
    assert_same_as_recorded(result, *found)
    truth = uninterrupted(run, server)
    trained = set(rows_trained(lineage(*found)))
    lost = [row for row in dict.fromkeys(rows_trained(truth.steps)) if row not in trained]
    assert lost
    assert sorted(rows(result.lost)) == sorted(lost)
    assert {problem.kind for problem in result.problems} == {"lost"}
    assert [(problem.life, problem.step) for problem in result.problems] == [(2, 2), (2, 2), (3, 6), (3, 6)]
    assert not list(tmp_path.rglob("agentlightning_input.pt"))


def test_epoch_that_the_stock_trainer_replays_is_named(server: AglServer, tmp_path: Path) -> None:
    """Without our checkpoints VERL 0.8.0 begins the pass again at a step that is a multiple of its length."""
    from tests.rig.runs import verl_version

    run = settings("12/4/6", epochs=2, extension={"enabled": False})
    lives(run, tmp_path, server, ("saved", 3))
    result = audit(tmp_path)
    if verl_version() >= (0, 8):
        assert {"epoch", "repeated"} & {problem.kind for problem in result.problems}
    assert not result.holds


def test_step_without_a_batch_and_dropped_inputs_are_the_trainers(server: AglServer, tmp_path: Path) -> None:
    """Everything of step 2 and row 7 is dropped; the step still has its line, and nothing is called lost."""
    run = settings("16/2/4", save_freq=1)
    server.agents = AgentTable(AgentPlan(step_outcome={2: "overlong"}, outcome={7: "overlong"}))
    lives(run, tmp_path, server, ("saved", 3))
    result = audit(tmp_path)
    assert result.problems == []
    steps = {step.step: step for step in result.lineage.steps}
    assert steps[2].trained == ()
    assert sorted(rows(result.epochs[0].dropped_by_trainer)) == [2, 3, 7]


def test_samples_that_do_not_fill_a_mini_batch_are_dropped_not_lost(server: AglServer, tmp_path: Path) -> None:
    """B = 3 and mini batches of 2: agent-lightning drops one input of each step at random."""
    run = settings("18/3/6", mini_batch=2)
    found = lives(run, tmp_path, server, ("pulled", 4))
    result = audit(tmp_path)
    assert result.problems == []
    assert [len(step.dropped_by_trainer) for step in result.lineage.steps] == [1] * len(result.lineage.steps)
    assert_same_as_recorded(result, *found)


def test_inputs_whose_request_a_hook_changed_keep_their_name_over_a_resume(server: AglServer, tmp_path: Path) -> None:
    """What is in flight at the resume is named by the ledger's own line of its pull."""
    run = settings("16/2/5", rollout_n=2, overrides=(f"agentlightning.hooks={HOOKS}",))
    lives(run, tmp_path, server, ("pulled", 4))
    result = audit(tmp_path)
    assert result.problems == []
    assert all(position_of(row.name) is not None for row in result.walk.rows)


def test_fork_is_audited_from_the_parents_checkpoint_and_names_what_it_took_over(
    server: AglServer, tmp_path: Path
) -> None:
    """Names come from the parent's ledger; without it, from the requests in the checkpoint."""
    run = settings("20/2/5")
    parent = tmp_path / "parent"
    first = run_life(run, parent, server.url, die_at=("saved", 3))
    fork = settings("20/2/5", resume_mode="resume_path", resume_from_path=str(parent / "global_step_3"))
    for name in ("fork", "fork_of_a_run_without_a_ledger"):
        server.reset()
        run_life(fork, tmp_path / name, server.url)
        result = audit(tmp_path / name)
        assert result.problems == []
        assert result.first.is_fork
        assert positions(result.first.in_flight) == list(first.saves[3].in_flight)
        assert positions(result.first.buffered) == list(first.saves[3].buffered)
        assert "parent" in result.notes[0]
        (parent / LEDGER_NAME).unlink(missing_ok=True)


def test_dropped_positions_are_named_with_their_cause(server: AglServer, tmp_path: Path) -> None:
    """`in_flight: drop` at a save, `on_mismatch: reset` at a resume."""
    run = settings("24/2/5", extension={"in_flight": "drop"})
    run_life(run, tmp_path, server.url, die_at=("saved", 3))
    run_life(run, tmp_path, server.url, die_at=("saved", 5))
    result = audit(tmp_path)
    assert [(p.kind, positions(p.inputs)) for p in result.problems] == [("lost", [6, 7, 8])]
    assert "in_flight=drop" in result.problems[0].text
    run_life(settings("24/2/5", seed=2, extension={"on_mismatch": "reset"}), tmp_path, server.url)
    result = audit(tmp_path)
    assert "on_mismatch=reset" in result.problems[-1].text
    assert [(epoch.stream, epoch.epoch) for epoch in result.epochs][:2] == [(0, 1), (1, 1)]


def test_run_that_began_without_the_extension_is_audited_from_the_first_line(server: AglServer, tmp_path: Path) -> None:
    """Steps of the plain trainer are no gap; a life with `ledger: false` is one."""
    run_life(settings("24/2/4"), tmp_path, server.url, trainer_cls=stock_trainer(), die_at=("saved", 2))
    run_life(settings("24/2/4"), tmp_path, server.url, die_at=("saved", 4))
    result = audit(tmp_path)
    assert (result.problems, result.first.step, result.last_step) == ([], 2, 4)
    assert "step 2" in result.notes[0]
    run_life(settings("24/2/4", extension={"ledger": False}), tmp_path, server.url, die_at=("saved", 6))
    run_life(settings("24/2/4"), tmp_path, server.url)
    assert [problem.kind for problem in audit(tmp_path).problems] == ["gap"]


def test_ledger_is_durable_before_the_checkpoint_that_refers_to_it(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of a step is synced before its input file is published; a ledger that cannot be refuses the save."""
    from agl_async_ckpt.agl import save
    from agl_async_ckpt.ledger.writer import LedgerWriter

    order: list[tuple[str, int]] = []
    sync, commit = LedgerWriter.sync, save.commit_state

    def noted_sync(self: LedgerWriter) -> None:
        sync(self)
        last = read_ledger(tmp_path).last
        assert last is not None
        order.append(("synced", last.step))

    def noted_commit(state: Any, step_dir: Any, **kwargs: Any) -> Any:
        order.append(("committed", state.global_step))
        return commit(state, step_dir, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LedgerWriter, "sync", noted_sync)
        patch.setattr(save, "commit_state", noted_commit)
        run_life(settings("12/2/4", total_steps=2), tmp_path, server.url)
    assert order == [("synced", 1), ("committed", 1), ("synced", 2), ("committed", 2), ("synced", 2)]

    def fail(self: LedgerWriter) -> None:
        raise StateWriteError("The ledger cannot be written.")

    monkeypatch.setattr(LedgerWriter, "sync", fail)
    with pytest.raises(StateWriteError, match="ledger"):
        run_life(settings("12/2/4"), tmp_path, server.url)
    assert not (tmp_path / "global_step_3").exists()
    monkeypatch.undo()
    run_life(settings("12/2/4"), tmp_path, server.url)
    assert audit(tmp_path).holds


def test_ledger_can_be_switched_off(server: AglServer, tmp_path: Path) -> None:
    """`ledger: false` writes none, on or off."""
    for extension in ({"ledger": False}, {"ledger": False, "enabled": False}):
        run_life(settings("12/2/4", total_steps=1, extension=extension), tmp_path, server.url)
    assert not (tmp_path / LEDGER_NAME).exists()


def test_last_save_is_in_the_metrics_of_its_own_step(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and seconds are logged with the step that saved, and repeated until the next save."""
    from agentlightning.verl import trainer

    logged: dict[int, dict[str, Any]] = {}

    class Tracking:
        def __init__(self, **kwargs: Any) -> None:
            pass

        def log(self, data: dict[str, Any], step: int) -> None:
            logged[step] = dict(data)

    monkeypatch.setattr(trainer, "Tracking", Tracking)
    run_life(settings("16/2/4", total_steps=3, save_freq=2), tmp_path, server.url)
    name = "training/async_ckpt/last_save_"
    assert f"{name}bytes" not in logged[1]
    saved = (tmp_path / "global_step_2" / "agentlightning_input.pt").stat().st_size
    assert logged[2][f"{name}bytes"] == saved
    assert logged[2][f"{name}s"] > 0
    assert logged[3][f"{name}bytes"] == (tmp_path / "global_step_3" / "agentlightning_input.pt").stat().st_size
    assert logged[3]["training/async_ckpt/num_in_flight_groups"] == 2


def test_lines_hold_names_and_no_inputs(server: AglServer, tmp_path: Path) -> None:
    """The ledger is small, and shows nothing of what is in a row."""
    run_life(settings("12/2/4", total_steps=2), tmp_path, server.url)
    text = (tmp_path / LEDGER_NAME).read_text()
    assert "question" not in text
    assert sum(isinstance(entry, Step) for entry in read_ledger(tmp_path).entries) == 2


@pytest.mark.parametrize("batch", [3, 6])
def test_rows_read_ahead_under_another_batch_size_are_accounted_for(
    server: AglServer, tmp_path: Path, batch: int
) -> None:
    """A resume with a batch size that does not divide the rest reads some rows at once: the first step draws them."""
    run = settings("14/4/8", epochs=3, total_steps=6)
    first = run_life(run, tmp_path, server.url, stop_after_step=1)
    second = run_life(replace(run, B=batch, A=batch + 4), tmp_path, server.url)
    result = audit(tmp_path)
    assert result.problems == []
    assert_same_as_recorded(result, first, second)


def test_life_numbers_are_not_taken_twice_by_starts_with_and_without_the_extension(
    server: AglServer, tmp_path: Path
) -> None:
    """A life with enabled=false is in the ledger only; what it has lost is named under its own number."""
    run = settings("24/2/5", extension={"on_mismatch": "reset"})
    run_life(run, tmp_path, server.url, stop_after_step=2)
    run_life(replace(run, extension={"enabled": False}), tmp_path, server.url, stop_after_step=4)
    run_life(run, tmp_path, server.url, stop_after_step=6)
    starts = read_ledger(tmp_path).starts
    assert [start.life for start in starts] == [1, 2, 3]
    result = audit(tmp_path)
    assert {problem.life for problem in result.problems if problem.kind == "lost"} >= {2}
    assert [step.step for step in result.lineage.steps] == [1, 2, 3, 4, 5, 6]
