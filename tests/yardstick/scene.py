"""A scene that runs three times: the trainer alone, with the extension, and interrupted and resumed.

    scene = Scene(settings("12/2/5"), hooks=POSTS_A_REWARD)
    truth = alone(scene, server, tmp_path)
    assert_same(truth, extended(scene, server, tmp_path))
    assert_resumed(truth, interrupted(scene, server, tmp_path, Interruption("saved", 2, server="restarted")))

What counts is what the update trains: prompt and response tokens, log-probs and score of every row. Beside it: what
was pulled, the epochs, agent-lightning's own counts (dropped rows among them), what agents were asked and how often
they were started, what is left on the server, and the verdict of the audit.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tests.rig.agents import AgentPlan, row_of
from tests.rig.in_flight import SiblingAgents, prove_life_until_now
from tests.rig.life import Parts, extended_trainer, run_life, stock_trainer
from tests.rig.record import Life, Step, lineage
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings

OUR_METADATA = ("agl_async_ckpt_run_id", "replaces")


@dataclass(frozen=True)
class Scene:
    """A training run and everything around it that may make a difference.

    Attributes:
        run: Sizes and settings.
        plan: How the agents behave; a `SiblingPlan` where siblings end one by one.
        hooks: Source text of a module with one subclass of agent-lightning's `RolloutHooks`; empty for none.
        own_trainer: Makes a user's trainer class from the one that agent-lightning's module holds, which is the
            extended one where the extension is on.
        parts: Data set, collate function and sampler of a user.
    """

    run: RunSettings
    plan: AgentPlan = field(default_factory=AgentPlan)
    hooks: str = ""
    own_trainer: Callable[[type], type] = lambda base: base
    parts: Parts = field(default_factory=Parts)

    def changed(self, **changes: Any) -> Scene:
        """Return the same scene with other settings of the run."""
        return replace(self, run=replace(self.run, **changes))


@dataclass(frozen=True)
class Interruption:
    """How a life ends, and how the next one begins.

    Attributes:
        point: Where, one of `tests.rig.life.POINTS`; for a stop on request, where it is asked for.
        step: In which step.
        how: `kill`, or `stop` for a request in the output folder.
        server: What the server is when the next life begins: `alive`, or `restarted` and empty.
        meanwhile: What becomes of the rollouts that run while no trainer is there; empty: they go on running.
        back_to: The next life resumes from this step by its path, not from the newest.
        fork: It does so into a folder of its own.
    """

    point: str
    step: int
    how: Literal["kill", "stop"] = "kill"
    server: Literal["alive", "restarted"] = "alive"
    meanwhile: str = ""
    back_to: int | None = None
    fork: bool = False


@dataclass
class Account:
    """What happened in all lives of a scene.

    Attributes:
        lives: In order.
        asked: What agents were asked, one JSON text per start of an agent for training, without this package's tags.
        num_validations: Agents started for validation.
        left: Rollouts on the server at the end: row, and state.
        out_dir: The output folder of the last life.
    """

    lives: list[Life]
    asked: list[str]
    num_validations: int
    left: Counter[tuple[int, str]]
    out_dir: Path

    @property
    def steps(self) -> dict[int, Step]:
        """What happened to the weights that survive."""
        return lineage(*self.lives)

    @property
    def samples(self) -> dict[int, list[str]]:
        """Step -> its rows of the update, as sorted texts: their order is that of the agents."""
        return {number: sorted(map(json.dumps, step.samples)) for number, step in self.steps.items()}


def alone(scene: Scene, server: AglServer, folder: Path) -> Account:
    """Run the trainer of agent-lightning, without the extension and without interruption."""
    return _run(scene, server, folder / "alone", (), stock_trainer())


def extended(scene: Scene, server: AglServer, folder: Path) -> Account:
    """Run the scene with the extension, without interruption."""
    return _run(scene, server, folder / "extended", (), extended_trainer())


def interrupted(scene: Scene, server: AglServer, folder: Path, *interruptions: Interruption) -> Account:
    """Run the scene with the extension; each interruption ends a life, and the last life comes to its end."""
    assert interruptions
    account = _run(scene, server, folder / "interrupted", interruptions, extended_trainer())
    for life, end in zip(account.lives, interruptions, strict=False):
        assert not life.finished, f"{end} never came"
    return account


def assert_same(truth: Account, account: Account) -> None:
    """The extension changed nothing that can be seen from outside."""
    _assert_steps(truth, account)
    assert account.asked == truth.asked, "what agents were asked"
    assert account.num_validations == truth.num_validations, "agents started for validation"
    assert account.left == truth.left, "left on the server"
    assert_kept(account)


def assert_resumed(truth: Account, account: Account, *, starts: bool | None = None, same_order: bool = True) -> None:
    """Interrupted and resumed, the run trained what the trainer alone trains.

    Args:
        truth: The trainer alone.
        account: The interrupted run.
        same_order: Each step trains the same groups. Not where a rollout that brings nothing runs again after a resume
            and ends later than others: then each input that both have trained has the same rows.
        starts: Whether no agent was started that the trainer alone did not start: where nothing is lost with a server
            or discarded with a step. None: not compared.
    """
    if not same_order:
        _assert_inputs(truth, account)
        return
    _assert_steps(truth, account)
    assert set(account.asked) == set(truth.asked), "what agents were asked"
    if starts:
        assert Counter(account.asked) == Counter(truth.asked), "how often agents were started"
    else:
        assert not Counter(truth.asked) - Counter(account.asked), "agents that were not started"
    assert not account.left - truth.left, "left on the server"
    missing = truth.left - account.left
    assert all(state in ("succeeded", "failed") for _, state in missing), (
        "missing on the server: only what had ended is served from the checkpoint"
    )
    assert_kept(account)


def assert_kept(account: Account) -> None:
    """The audit of the output folder says that the promise was kept."""
    from agl_async_ckpt.ledger.audit import audit

    verdict = audit(account.out_dir)
    assert verdict.holds, [problem.text for problem in verdict.problems]


def _assert_steps(truth: Account, account: Account) -> None:
    starts = [life.start for life in account.lives]
    steps, samples, expected_samples = account.steps, account.samples, truth.samples
    assert list(steps) == list(truth.steps), f"steps; lives started at {starts}"
    for number, expected in truth.steps.items():
        where = f"in step {number}; lives started at {starts}"
        step = steps[number]
        assert step.pulled == expected.pulled, f"pulled {where}"
        assert step.epoch == expected.epoch, f"epoch {where}"
        assert step.trained == expected.trained, f"finished groups {where}"
        assert samples[number] == expected_samples[number], f"rows of the update {where}"
        assert step.metrics == expected.metrics, f"counts {where}"


def _assert_inputs(truth: Account, account: Account) -> None:
    assert list(account.steps) == list(truth.steps), "steps"
    for number, expected in truth.steps.items():
        step = account.steps[number]
        assert (step.pulled, step.epoch) == (expected.pulled, expected.epoch), f"pulled in step {number}"
        assert len(step.trained) == len(expected.trained), f"number of finished groups in step {number}"
    assert set(account.asked) == set(truth.asked), "what agents were asked"
    mine, theirs = _rows_by_input(account), _rows_by_input(truth)
    assert mine.keys() & theirs.keys(), "no input was trained by both"
    for row in mine.keys() & theirs.keys():
        assert mine[row] == theirs[row], f"rows of the update for input {row}"
    assert_kept(account)


def _rows_by_input(account: Account) -> dict[int, set[str]]:
    rows: dict[int, set[str]] = {}
    for step in account.steps.values():
        for row, sample in zip(step.updated, step.samples, strict=True):
            rows.setdefault(row, set()).add(json.dumps(sample))
    return rows


def _run(scene: Scene, server: AglServer, folder: Path, interruptions: Sequence[Interruption], base: type) -> Account:
    server.reset()
    agents = server.agents = SiblingAgents(scene.plan)
    folder.mkdir()
    out_dir = folder / "out"
    run = replace(scene.run, overrides=(*scene.run.overrides, *_hook_override(scene, folder)))
    lives: list[Life] = []
    for number in range(len(interruptions) + 1):
        end = interruptions[number] if number < len(interruptions) else None
        _seed_process()
        life = run_life(
            run,
            out_dir,
            server.url,
            trainer_cls=scene.own_trainer(base),
            die_at=_ending(end, out_dir),
            parts=scene.parts,
        )
        lives.append(life)
        if end is None:
            break
        run, out_dir = _next_start(scene, run, server, out_dir, end, folder / f"fork-{number}")
    return Account(
        lives,
        [_asked(record) for record in agents.asked if record.is_train],
        sum(not record.is_train for record in agents.asked),
        Counter((row_of(record.input), record.status.state.value) for record in server.rollouts().values()),
        out_dir,
    )


def _seed_process() -> None:
    """Set the random generators as a user's script does: each process begins with the same state."""
    import numpy as np
    import torch

    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def _hook_override(scene: Scene, folder: Path) -> tuple[str, ...]:
    if not scene.hooks:
        return ()
    path = folder / "hooks.py"
    path.write_text(scene.hooks)
    return (f"agentlightning.hooks={path}",)


def _ending(end: Interruption | None, out_dir: Path) -> Callable[[str, int], bool]:
    def reached(point: str, step: int) -> bool:
        if end is None or (point, step) != (end.point, end.step):
            return False
        if end.how == "stop":
            (out_dir / "agentlightning_stop.json").touch()
        return end.how == "kill"

    return reached


def _next_start(
    scene: Scene, run: RunSettings, server: AglServer, out_dir: Path, end: Interruption, fork: Path
) -> tuple[RunSettings, Path]:
    """Let time pass, and return settings and output folder of the next life."""
    if (out_dir / "agentlightning_run.json").exists():
        prove_life_until_now(out_dir)  # the rig plays a whole life within the second that a proof resolves
    agents: Any = server.agents
    running = [rollout_id for rollout_id, record in server.rollouts().items() if record.status.state.value == "running"]
    if end.meanwhile:
        server.call(lambda: agents.end(running, end.meanwhile))
    if end.server == "restarted":
        server.reset_store()
    if end.back_to is None:
        return replace(run, resume_mode="auto", resume_from_path=None) if not end.fork else run, out_dir
    step_dir = out_dir / f"global_step_{end.back_to}"
    return replace(run, resume_mode="resume_path", resume_from_path=str(step_dir)), fork if end.fork else out_dir


def _asked(record: Any) -> str:
    """What the agent of a rollout is given, as one text."""
    values = record.model_dump(mode="json")
    metadata = {name: value for name, value in values["metadata"].items() if name not in OUR_METADATA}
    return json.dumps([values["input"], values["config"], metadata], sort_keys=True)
