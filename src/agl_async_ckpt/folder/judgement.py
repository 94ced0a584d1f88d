"""Whether a resume can take a step: the one judgement that the resume, `plan` and `verify` act on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agl_async_ckpt.exceptions import (
    AsyncCheckpointError,
    DamagedStateError,
    MissingStateError,
    StateFormatError,
)
from agl_async_ckpt.folder.lock import read_holder
from agl_async_ckpt.folder.run_identity import RunIdentity, read_run
from agl_async_ckpt.folder.steps import StepInfo, inspect_step, list_steps, read_tracker
from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage.container import Trailer, read_verified
from agl_async_ckpt.storage.layout import (
    FILE_NAME,
    LOADER_FILE_NAME,
    MODEL_FOLDERS,
    SEAL_NAME,
    parse_step,
)


@dataclass(frozen=True)
class StepJudgement:
    """What a resume from a step would find.

    Attributes:
        step_dir: `global_step_<N>`.
        state: The decoded input state, if it is whole and of this step.
        error: Why the input state cannot be used, or that it is missing though the step was saved with one.
        problems: What is wrong with the rest of a step that has an input state, in words.
    """

    step_dir: Path
    state: InputState | None = None
    error: AsyncCheckpointError | None = None
    problems: tuple[str, ...] = ()

    @property
    def refusal(self) -> AsyncCheckpointError | None:
        """The error with which a resume refuses the step; None if it takes it."""
        if isinstance(self.error, StateFormatError):
            acts = (self.error.act, other_step(self.step_dir))
            error = type(self.error)(self.error.fact, self.error.rows, "\n".join(filter(None, acts)))
            error.__cause__ = self.error
            return error
        if self.error is not None or not self.problems:
            return self.error
        return DamagedStateError(
            f"The checkpoint {self.step_dir} is incomplete: its input position and its model need not belong together.",
            [("problem", problem) for problem in self.problems],
            other_step(self.step_dir),
        )

    @property
    def is_plain(self) -> bool:
        """Whether the step was saved while the extension was not active: it has no input state, and needs none."""
        return self.state is None and self.error is None


def judge_step(step_dir: Path) -> StepJudgement:
    """Judge a step as a resume from it does; what is compared with the seal are the bytes that are decoded.

    Takes twice the size of the input state in memory while it decodes.

    Raises:
        DamagedStateError: The step has no input state, and the run's identity cannot be read.
    """
    if not has_state(step_dir):
        return StepJudgement(step_dir, error=missing_state(step_dir))
    trailer, state, error = _read(step_dir / FILE_NAME)
    info = inspect_step(step_dir, read_tracker(step_dir.parent), found=trailer or error)
    return StepJudgement(step_dir, state, error, info.about_rest)


def judge_file(path: Path) -> StepJudgement:
    """Judge an input state that lies in no step folder: there is nothing to compare it with."""
    _, state, error = _read(path)
    return StepJudgement(path.parent, state, error)


def _read(path: Path) -> tuple[Trailer | None, InputState | None, AsyncCheckpointError | None]:
    """Read an input state once: the trailer of what was verified, the state, and why there is none."""
    from agl_async_ckpt.storage.commit import decode_verified  # here: it takes torch, which `inspect` does not need

    trailer = None
    try:
        trailer, content = read_verified(path)
        with content:
            return trailer, decode_verified(trailer, content, path), None
    except AsyncCheckpointError as error:
        return trailer, None, error


def has_state(step_dir: Path) -> bool:
    """Tell whether a step has an input state, whole or not, or a link in its place.

    In a step that may not be looked into it has one: reading it says why it cannot be used.
    """
    path = step_dir / FILE_NAME
    return _may_exist(path) or path.is_symlink()


def missing_state(step_dir: Path) -> MissingStateError | None:
    """Return the error of a step that has nothing at all, or no input state though it must have one; else None.

    Raises:
        DamagedStateError: The run's identity cannot be read.
    """
    if not must_have_state(step_dir, read_run(step_dir.parent)):
        if not is_pruned(step_dir) or _may_exist(step_dir / LOADER_FILE_NAME):
            return None
        return MissingStateError(
            f"{step_dir} holds nothing to resume from: no model, no {LOADER_FILE_NAME} and no input position.",
            act=f"{other_step(step_dir)}",
        )
    return MissingStateError(
        f"{step_dir} has no {FILE_NAME}, though this run wrote them before: it was removed, or the step was saved "
        "while the extension was not loaded.",
        act="Buffered and in-flight inputs of that step cannot be reconstructed. Resume from a step that has the file, "
        "or set agentlightning.async_checkpoint.on_mismatch=reset to go on with what VERL saved.",
    )


def must_have_state(step_dir: Path, run: RunIdentity | None) -> bool:
    """Tell whether a step was saved with an input state, so that one without it has lost it."""
    step = parse_step(step_dir)
    assert step is not None
    wrote_before = run is not None and run.first_step is not None and run.first_step <= step
    return wrote_before or _may_exist(step_dir / SEAL_NAME)


def being_saved(info: StepInfo, holder: str | None) -> str | None:
    """Say who is saving a step at this moment; None if nobody is, as far as the lock of the folder tells.

    The seal is written last, and a save that fails ends its trainer: so a step without a seal that has changed since
    the trainer came is being saved.

    Args:
        info: From a look at the step.
        holder: `current_holder` of its output folder, asked before that look.
    """
    if holder is None or info.complete or (info.path / SEAL_NAME).exists():
        return None
    process = read_holder(info.path.parent)
    return holder if process is not None and _changed_at(info.path) >= process.since else None


def _changed_at(folder: Path) -> float:
    """Tell when something in a folder was last written, Unix seconds. What a start has removed does not count."""
    try:
        return max((entry.stat().st_mtime for entry in folder.iterdir()), default=folder.stat().st_mtime)
    except OSError:  # renamed between the two looks
        return float("inf")


def is_pruned(step_dir: Path) -> bool:
    """Tell whether retention has left an empty shell: neither model nor input state nor seal."""
    return not any(_may_exist(step_dir / name) for name in (FILE_NAME, SEAL_NAME, *MODEL_FOLDERS))


def _may_exist(path: Path) -> bool:
    """Tell whether something is there, or its folder may not be looked into."""
    try:
        return path.exists()
    except PermissionError:
        return True


def plain_step_text(step_dir: Path) -> str:
    """Say what a resume from a step that was saved while the extension was not active cannot restore."""
    return (
        f"{step_dir} was saved without the input position, before the extension was loaded or while it was off. VERL "
        "restores what it saved; the buffered rows, the prompts in flight and the epoch at that save cannot be "
        "reconstructed and are skipped. Later checkpoints are exact."
    )


def other_step(step_dir: Path) -> str:
    """Say which step beside an unusable one a user can resume from; the steps are looked at, not hashed."""
    others = [step for step in list_steps(step_dir.parent) if step.complete and step.path.name != step_dir.name]
    complete = [step.path for step in sorted(others, key=lambda step: not step.abandoned)]  # of this branch last
    if not complete:
        return f"Nothing was changed. There is no other complete checkpoint in {step_dir.parent}."
    return (
        f"Nothing was changed. Newest other complete checkpoint: {complete[-1]}; resume from it with "
        "trainer.resume_mode=resume_path and trainer.resume_from_path."
    )


def dropped_text(state: InputState, step_dir: Path) -> str | None:
    """Say that `in_flight: drop` has left prompt groups out of the checkpoint; None if it has not."""
    if not state.num_dropped_groups:
        return None
    return (
        f"{step_dir} was saved with in_flight=drop: {state.num_dropped_groups} prompt groups in flight at that save "
        "are not trained."
    )
