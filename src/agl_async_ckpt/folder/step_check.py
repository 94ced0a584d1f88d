"""What a resume checks of one step before it uses it, without a trainer; `verify` and `plan` ask the same."""

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
from agl_async_ckpt.storage.layout import (
    FILE_NAME,
    LOADER_FILE_NAME,
    MODEL_FOLDERS,
    SEAL_NAME,
    parse_step,
)


@dataclass(frozen=True)
class StepCheck:
    """What was found in a step that has an input state.

    Attributes:
        step_dir: `global_step_<N>`.
        state: The decoded state, if it is whole.
        error: Why the file cannot be used.
        problems: What is wrong with the rest of the step, in words.
    """

    step_dir: Path
    state: InputState | None
    error: AsyncCheckpointError | None
    problems: tuple[str, ...]

    @property
    def refusal(self) -> AsyncCheckpointError | None:
        """The error with which a resume refuses the step; None if it takes it."""
        if isinstance(self.error, StateFormatError):
            acts = (self.error.act, other_step(self.step_dir))
            error = type(self.error)(self.error.fact, self.error.rows, "\n".join(filter(None, acts)))
            error.__cause__ = self.error
            return error
        if self.error is not None:
            return self.error
        if not self.problems:
            return None
        fact = (
            f"The checkpoint {self.step_dir} is incomplete: its input position and its model need not belong together."
        )
        return DamagedStateError(fact, [("problem", problem) for problem in self.problems], other_step(self.step_dir))


def check_step(step_dir: Path) -> StepCheck:
    """Verify every byte of a step's input state, decode it, and compare the rest of the step with its seal.

    Takes twice the size of the file in memory while it decodes.
    """
    found = check_file(step_dir / FILE_NAME)
    info = inspect_step(step_dir, read_tracker(step_dir.parent))
    problems = info.problems
    if found.error is not None:  # each thing is said once
        said = str(found.error)
        problems = tuple(p for p in problems if p not in said and not p.startswith(f"{FILE_NAME} is of step"))
    return StepCheck(step_dir, found.state, found.error, problems)


def check_file(path: Path) -> StepCheck:
    """Verify every byte of an input state and decode it; if it lies in a step folder, it has to be of that step."""
    from agl_async_ckpt.storage.commit import load_state  # here, since it takes torch, which `inspect` does not need

    state, error = None, None
    try:
        state = load_state(path)
    except AsyncCheckpointError as found:
        error = found
    return StepCheck(path.parent, state, error, ())


def has_state(step_dir: Path) -> bool:
    """Tell whether a step has an input state, whole or not; a link that leads nowhere is none.

    In a step that may not be looked into it has one: reading it says why it cannot be used.
    """
    return _may_exist(step_dir / FILE_NAME)


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
