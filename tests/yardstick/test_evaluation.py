"""Evaluations (`trainer.val_only`): each that the trainer alone carries out goes through, and touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.folder.lock import OutputLock
from agl_async_ckpt.folder.run_identity import read_run
from agl_async_ckpt.folder.stop_request import read_request, request_stop
from agl_async_ckpt.ledger.audit import audit
from agl_async_ckpt.ledger.reader import read_ledger
from agl_async_ckpt.storage.layout import (
    FILE_NAME,
    LEDGER_NAME,
    LOCK_FILE_NAME,
    RUN_FILE_NAME,
    SEAL_NAME,
    TRACKER_NAME,
)
from tests.rig.agents import AgentPlan
from tests.rig.in_flight import SiblingAgents
from tests.rig.life import run_life, stock_trainer
from tests.rig.runs import settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

RUN = settings("14/4/6")
VAL_ONLY = ("trainer.val_only=true",)


def evaluation(run: RunSettings, **changes: Any) -> RunSettings:
    """The same run, as an evaluation."""
    return replace(run, val_before_train=True, overrides=(*run.overrides, *VAL_ONLY), **changes)


@pytest.fixture
def out(server: AglServer, tmp_path: Path) -> Path:
    """An output folder with checkpoints of steps 1 and 2, whose trainer was killed."""
    server.agents = SiblingAgents(AgentPlan())
    run_life(RUN, tmp_path / "out", server.url, stop_after_step=2)
    return tmp_path / "out"


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file, with its time of change."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def evaluate(run: RunSettings, out: Path, server: AglServer, *, weights_of: int | None = 2) -> None:
    """Evaluate, alone and with the extension: the same weights and rows, and nothing changed anywhere."""
    files, rollouts = contents(out), server.rollouts()
    asked: list[list[int]] = []
    for trainer_cls in (stock_trainer(), None):
        starts = len(server.agents.starts)
        life = run_life(run, out, server.url, trainer_cls=trainer_cls)
        assert life.finished
        assert life.steps == {}
        assert life.weights.get("actor") == weights_of
        asked.append(server.agents.rows_started()[starts:])
        assert contents(out) == files
        assert server.rollouts() == rollouts
    assert asked[0] == asked[1] == [0, 1], "the rows of the validation"


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "rows": {"n": 8},
    "the seed": {"seed": 9},
    "a column": {"columns": ("level",)},
    "texts": {"text": "another"},
    "synchronous rollouts": {"async_mode": False},
    "loader workers": {"num_workers": 2},
    "the extension's switch": {"extension": {"enabled": False}},
    "steps": {"total_steps": 1},
}


@pytest.mark.parametrize("what", CHANGES)
def test_evaluation_with_another(what: str, out: Path, server: AglServer) -> None:
    """What the position in the training data depends on does not matter to a model; training then goes on exactly."""
    evaluate(evaluation(RUN, **CHANGES[what]), out, server)
    truth = uninterrupted(RUN, server)
    assert run_life(RUN, out, server.url).pulls == {step: rows for step, rows in truth.pulls.items() if step > 2}
    assert audit(out).holds


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a damaged input file": lambda out: (out / "global_step_2" / FILE_NAME).write_bytes(b"damaged"),
    "no input file": lambda out: (out / "global_step_2" / FILE_NAME).unlink(),
    "a damaged seal": lambda out: (out / "global_step_2" / SEAL_NAME).write_text("{"),
    "neither": lambda out: [(out / "global_step_2" / name).unlink() for name in (FILE_NAME, SEAL_NAME)],
    "the input file of another step": lambda out: (out / "global_step_1" / FILE_NAME).replace(
        out / "global_step_2" / FILE_NAME
    ),
    "a damaged run file": lambda out: (out / RUN_FILE_NAME).write_text("{"),
    "a damaged ledger": lambda out: (out / LEDGER_NAME).write_text("{\n"),
}


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("changes", [{}, {"async_mode": False}, {"extension": {"enabled": False}}], ids=str)
def test_evaluation_of_a_step_with(what: str, changes: dict[str, Any], out: Path, server: AglServer) -> None:
    """The model of the step that the tracker names is there, and that is what is evaluated."""
    DAMAGES[what](out)
    evaluate(evaluation(RUN, **changes), out, server)


def test_evaluation_by_path_and_of_no_checkpoint(out: Path, server: AglServer) -> None:
    """`resume_path`, also with the input file gone, and `disable`: the weights that were asked for."""
    by_path = {"resume_mode": "resume_path", "resume_from_path": str(out / "global_step_1")}
    (out / "global_step_1" / FILE_NAME).unlink()
    evaluate(evaluation(RUN, **by_path), out, server, weights_of=1)
    evaluate(evaluation(RUN, resume_mode="disable"), out, server, weights_of=None)


def test_evaluation_follows_a_torn_tracker_to_the_newest_complete_step(out: Path, server: AglServer) -> None:
    """The trainer alone dies of it; nothing is repaired either."""
    (out / TRACKER_NAME).write_text("")
    files = contents(out)
    life = run_life(evaluation(RUN), out, server.url)
    assert (life.finished, life.weights["actor"]) == (True, 2)
    assert contents(out) == files


def test_evaluation_goes_on_beside_a_trainer_and_leaves_its_requests_alone(out: Path, server: AglServer) -> None:
    """The lock and a request to stop in the folder are the trainer's."""
    lock = OutputLock(out, wait_s=0)
    try:
        request_stop(out, "a test")
        evaluate(evaluation(RUN), out, server)
        assert read_request(out) is not None
    finally:
        lock.release()


def test_evaluation_accepts_a_sampler_that_no_training_could_resume(out: Path, server: AglServer) -> None:
    """A training with it is refused at the start; an evaluation draws nothing from it."""
    from torch.utils.data import Sampler

    from tests.rig.life import Parts

    class Reversed(Sampler[int]):
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __iter__(self) -> Any:
            return iter(range(len(self.dataset) - 1, -1, -1))

    parts = Parts(sampler=lambda _, dataset: Reversed(dataset))
    assert run_life(evaluation(RUN), out, server.url, parts=parts).finished


def test_evaluation_says_what_it_is(out: Path, server: AglServer) -> None:
    """Not that its checkpoints hold the position: it writes none."""
    log = [text for _, text in run_life(evaluation(RUN), out, server.url).log]
    assert any("evaluation" in text for text in log)
    assert not any("is active" in text or "synchronous training" in text for text in log)


def test_val_only_without_a_validation_before_training_trains(out: Path, server: AglServer) -> None:
    """agent-lightning reads `val_only` only where it validates before training: else it is a training."""
    life_before = read_run(out)
    seen: list[bool] = []

    def watch(point: str, step: int) -> bool:
        seen.append((out / LOCK_FILE_NAME).stat().st_size > 0)
        return False

    run = replace(RUN, overrides=VAL_ONLY)
    second = run_life(run, out, server.url, die_at=watch)
    truth = uninterrupted(run, server)
    assert second.pulls == {step: rows for step, rows in truth.pulls.items() if step > 2} != {}
    life = read_run(out)
    assert life is not None
    assert life_before is not None
    assert life.life == life_before.life + 1
    assert read_ledger(out).starts[-1].life == life.life
    assert all(seen)
    assert audit(out).holds
    assert (out / "global_step_3" / SEAL_NAME).exists()


def test_val_only_without_a_validation_before_training_sees_a_stop(out: Path, server: AglServer) -> None:
    """What trains can be asked to stop."""

    def ask(point: str, step: int) -> bool:
        if (point, step) == ("pulled", 3):
            request_stop(out, "a test")
        return False

    assert run_life(replace(RUN, overrides=VAL_ONLY), out, server.url, die_at=ask).stopped == 3


def test_switched_off_extension_keeps_no_start_away(out: Path, server: AglServer) -> None:
    """With `enabled: false` a damaged input file is no reason to refuse a training that VERL alone would begin."""
    (out / "global_step_2" / FILE_NAME).write_bytes(b"damaged")
    life = run_life(replace(RUN, extension={"enabled": False}), out, server.url)
    assert (life.finished, life.start) == (True, 2)
    assert any("cannot be read" in text or "damaged" in text for text in life.warnings)
