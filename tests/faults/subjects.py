"""What is put to the test: the shipped writer alone, and a whole `_save_checkpoint` of the real trainer in the rig.

A subject has a folder with earlier checkpoints in it, can save one more step into it (in a child that may be killed),
can begin the next start there, and can put the folder back for the next case.
"""

from __future__ import annotations

import contextlib
import shutil
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.locate import accept
from agl_async_ckpt.agl.retention import remove_leftovers
from agl_async_ckpt.folder import models, run_identity, seal
from agl_async_ckpt.folder.decision import decide_latest
from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage import commit, files
from agl_async_ckpt.storage.commit import load_state
from agl_async_ckpt.storage.layout import FILE_NAME, TRACKER_NAME, step_name
from tests.faults.children import run_child
from tests.golden.sample import objects, sample_state
from tests.rig.life import Death, build_trainer, pull_on, quiet, run_life
from tests.rig.record import Life, Recorder
from tests.rig.runs import settings, uninterrupted
from tests.rig.server import AglServer

STEP = 3
"""The step that is saved, beside complete steps 1 and 2 (but for a first save)."""

STOPPED_CLOCK = types.SimpleNamespace(time=lambda: 1.7e9)
"""For the time in a trailer: two saves of one state are equal in every byte, so that a folder can be recognised."""


@dataclass(frozen=True)
class Start:
    """Where the next start begins.

    Attributes:
        step: Of the checkpoint that it resumes from; 0: from scratch.
        problems: What is not as it was saved, in words: weights, input position, the rest of the stream.
    """

    step: int
    problems: tuple[str, ...] = ()


class Subject(Protocol):
    """A save under test.

    Attributes:
        name: For messages.
        folder: The output folder.
        step: The step that `save` saves.
        before: The step that a start takes before the save begins; 0: none.
        known: Step -> the states that may be read there, oldest first.
        removes_older: Once the step is complete, older ones may go.
    """

    name: str
    folder: Path
    step: int
    before: int
    known: dict[int, list[InputState]]
    removes_older: bool

    def reset(self) -> None:
        """Put the folder back as it was before the save."""
        ...

    def save(self) -> None:
        """Save `step`; to be called in a child."""
        ...

    def start(self) -> Start:
        """Begin the next life in the folder, and leave it again."""
        ...


def refill(folder: Path, template: Path) -> None:
    """Give a folder the content of another one; the folder itself stays, and so does its inode."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(template, folder, dirs_exist_ok=True, symlinks=True)


# --- the writer alone -------------------------------------------------------------------------------------------------


class WriterSubject:
    """`commit_state`, a model and a loader state written in place as VERL does, `write_seal`, the tracker.

    Args:
        kind: `first` (an empty folder), `next` (complete steps 1 and 2), or `again` (step 3 is there as well, complete,
            with another content).
        base: A folder of its own.
    """

    def __init__(self, kind: str, base: Path) -> None:
        self.name = f"writer, {kind}"
        self.removes_older = False
        self.folder = base / "out"
        self.step = STEP
        self.before = {"first": 0, "next": STEP - 1, "again": STEP}[kind]
        self._template = base / "template"
        self._template.mkdir(parents=True)
        run_identity.note_first_step(self._template, run_identity.begin_life(self._template), self.step)
        self.known: dict[int, list[InputState]] = {}
        for step in range(1, self.before + 1):
            self.known[step] = [writer_state(step, "old")]
            self.write(self._template, self.known[step][0])
        self._new = writer_state(STEP, "new")
        self.write(base / "elsewhere", self._new)  # whatever is imported late is imported now, and not in each child
        self.known[STEP] = [*self.known.get(STEP, []), self._new]
        self.reset()

    def reset(self) -> None:
        """Put the folder back as it was before the save."""
        refill(self.folder, self._template)

    def save(self) -> None:
        """Save step 3."""
        self.write(self.folder, self._new)

    def start(self) -> Start:
        """Decide, as a start does, and read everything that the chosen step holds."""
        step_dir = accept(decide_latest(self.folder))
        remove_leftovers(self.folder)
        if step_dir is None:
            return Start(0)
        state = load_state(step_dir)
        parts = _read_parts(step_dir)
        told = {_tag(state)}
        return Start(state.global_step, () if set(parts) == told else (f"the step mixes {sorted({*parts, *told})}",))

    @staticmethod
    def write(folder: Path, state: InputState) -> None:
        """The order of a save, with the least that VERL writes."""
        import torch

        commit.time = STOPPED_CLOCK  # type: ignore[attr-defined]
        tag, step_dir = _tag(state), folder / step_name(state.global_step)
        commit.commit_state(state, step_dir)
        (step_dir / "actor").mkdir(exist_ok=True)
        (step_dir / "actor" / "model.pt").write_bytes(tag.encode() * 3000)
        models.sync_models(step_dir)
        torch.save({"tag": tag}, step_dir / "data.pt")
        files.publish(folder / TRACKER_NAME, lambda fd: files.write_all(fd, str(state.global_step).encode()))
        seal.write_seal(step_dir, use_critic=False, async_save=False)


def writer_state(step: int, version: str) -> InputState:
    """A state that says in one column which it is."""
    return replace(sample_state(step), buffered_batch={"tag": objects(f"{step} {version};")})


def _tag(state: InputState) -> str:
    assert state.buffered_batch is not None
    return str(state.buffered_batch["tag"][0])


def _read_parts(step_dir: Path) -> list[str]:
    """What the model and the loader state of a step say they belong to."""
    import torch

    data = (step_dir / "actor" / "model.pt").read_bytes()
    tag = data.partition(b";")[0] + b";"
    assert data == tag * 3000, f"the model of {step_dir} is torn"
    return [tag.decode(), torch.load(step_dir / "data.pt", weights_only=True)["tag"]]


# --- a whole save -----------------------------------------------------------------------------------------------------


class TrainerSubject:
    """The real trainer at the end of a step, about to run the real `_save_checkpoint`.

    Args:
        kind: `first` (step 1, nothing saved before), `next` (step 3, after 1 and 2), `again` (step 3 is there,
            complete, of an earlier life; this one resumed from step 2), or `keep_one` (step 3 of a run with a critic
            that keeps one checkpoint).
        base: A folder of its own.
        server: Used while the trainers are built.
    """

    def __init__(self, kind: str, base: Path, server: AglServer) -> None:
        self.name = f"whole save, {kind}"
        self.folder = base / "out"
        self.step = 1 if kind == "first" else STEP
        self.before = {"first": 0, "next": STEP - 1, "again": STEP, "keep_one": STEP - 1}[kind]
        keeps_one = kind == "keep_one"
        run = settings("14/2/5", use_critic=keeps_one, max_ckpt_to_keep=1 if keeps_one else None)
        self._truth = uninterrupted(run, server)
        at = run
        if kind == "again":
            run_life(run, self.folder, server.url, stop_after_step=STEP)
            at = replace(run, resume_mode="resume_path", resume_from_path=str(self.folder / step_name(STEP - 1)))
        server.reset_store()
        self._trainer = build_trainer(
            at, self.folder, server.url, die_at=lambda point, step: (point, step) == ("save", self.step)
        )
        with quiet(), contextlib.suppress(Death):
            self._trainer.fit()
        _hang_up(self._trainer)
        self._rng = internals.rng_state()
        assert self._trainer.global_steps == self.step
        self._fresh = build_trainer(run, self.folder, server.url, die_at=lambda point, step: point == "loaded")
        OmegaConf.resolve(self._fresh.config)  # `fit` resolves its config, which takes longer than all the rest
        self._template = base / "template"
        shutil.copytree(self.folder, self._template, symlinks=True)
        self.removes_older = keeps_one
        self.known = {
            step: [load_state(self.folder / step_name(step))]
            for step in range(1, self.before + 1)
            if (self.folder / step_name(step) / FILE_NAME).exists()
        }
        self.known.setdefault(self.step, []).append(self._saved_state())
        self.reset()

    def _saved_state(self) -> InputState:
        """What an undisturbed save commits."""
        ended = run_child(lambda: self.save() or load_state(self.folder / step_name(self.step)))
        assert ended.returned, ended.error
        return ended.value

    def reset(self) -> None:
        """Put the folder back as it was before the save."""
        refill(self.folder, self._template)

    def save(self) -> None:
        """Run `_save_checkpoint`."""
        internals.set_rng_state(self._rng)  # Python seeds its own anew in a forked child, and `start` moves torch's
        commit.time = STOPPED_CLOCK  # type: ignore[attr-defined]
        self._trainer.rig._die_at = lambda point, step: False
        with quiet():
            self._trainer._save_checkpoint()

    def start(self) -> Start:
        """Run `fit` of a new trainer to the end of its load, then pull the rest of the stream with its own code."""
        trainer, events = self._fresh, Recorder()
        trainer.rig.recorder = events
        trainer.actor_rollout_wg.loaded_step = trainer.critic_wg.loaded_step = None
        try:
            with quiet():
                with contextlib.suppress(Death):
                    trainer.fit()
                trainer.epoch += 1  # as `fit` goes on
                step = trainer.global_steps
                pull_on(trainer, max(self._truth.steps))
        finally:
            _hang_up(trainer)
            trainer._async_ckpt.leave_folder()
        return Start(step, tuple(self._differences(Life.from_events(events.events))))

    def _differences(self, life: Life) -> list[str]:
        found: list[str] = []
        truth = self._truth
        if any(step != life.start for step in life.weights.values()) or (life.start and not life.weights):
            found.append(f"weights of {life.weights} with the inputs of step {life.start}")
        if life.start:
            saved, restored = truth.saves[life.start], life.restored
            assert restored is not None
            if (restored.in_flight, restored.buffered) != (saved.in_flight, saved.buffered):
                found.append(f"in flight and buffered: {restored}, saved were {saved}")
        wanted = {number: rows for number, rows in truth.pulls.items() if number > life.start}
        if life.start and life.pulls != wanted:
            found.append(f"pulls {life.pulls}, the uninterrupted run {wanted}")
        return found


def _hang_up(trainer: Any) -> None:
    """Close its connections; the loader, whose position counts, stays as it is."""
    if trainer._agl_client is not None:
        trainer._agl_client.close()
    while trainer.rig.clients:
        trainer.rig.clients.pop().close()
