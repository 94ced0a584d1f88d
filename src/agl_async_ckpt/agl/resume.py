"""One resume: decide the folder, verify our file, let VERL load, put the input position back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.extension import Extension
from agl_async_ckpt.agl.inputs.fingerprint import refusal
from agl_async_ckpt.agl.inputs.loader_position import loader_differences, open_loader, order_differences
from agl_async_ckpt.agl.life import Life
from agl_async_ckpt.agl.locate import accept, choose_start, locate, output_folder, verl_choice
from agl_async_ckpt.agl.retention import remove_leftovers
from agl_async_ckpt.codec.loader_state import pass_has_ended, rows_yielded
from agl_async_ckpt.config import SECTION
from agl_async_ckpt.exceptions import AsyncCheckpointError, MissingStateError, StateFormatError, StateMismatchError
from agl_async_ckpt.folder.branch import begin_branch
from agl_async_ckpt.folder.decision import tracker_to_write
from agl_async_ckpt.folder.judgement import dropped_text, judge_step, plain_step_text
from agl_async_ckpt.folder.mismatch import differences
from agl_async_ckpt.folder.run_identity import begin_life
from agl_async_ckpt.folder.steps import TrackerProblem, list_steps, read_branch, read_tracker
from agl_async_ckpt.ledger.entry import ResumeKind
from agl_async_ckpt.state import InputState, num_rows
from agl_async_ckpt.storage.container import verify
from agl_async_ckpt.storage.files import make_folders, publish, unwritable, write_all
from agl_async_ckpt.storage.layout import FILE_NAME, TRACKER_NAME, parse_step
from agl_async_ckpt.storage.trailer import Branch

log = logging.getLogger(__name__)


def load_checkpoint(trainer: internals.Trainer, extension: Extension, verl_load: Callable[[], Any]) -> Any:
    """Load a checkpoint, or begin a run, so that the input stream continues where it was saved.

    Args:
        verl_load: The framework's own `_load_checkpoint`.

    Raises:
        FolderInUseError: Another trainer writes into the output folder.
        StateFormatError, StateMismatchError, CheckpointNotFoundError: Nothing was loaded, and no checkpoint changed.
    """
    extension.forget_earlier_fit()
    if not extension.trains:
        return _load_for_evaluation(trainer, extension, verl_load)
    if not extension.active or internals.loads_from_hdfs(trainer):
        _guard_inactive(trainer, extension)
        result = verl_load()
        _begin_plain_ledger(trainer, extension)
        return result
    internals.set_buffered_batch(trainer, None)
    folder = output_folder(trainer)
    _enter(trainer, extension, folder)
    decision = choose_start(trainer)
    step_dir = accept(decision)
    state = None if step_dir is None else verified_state(step_dir, extension.config.on_mismatch)
    fits = state is None or step_dir is None or _check_fit(trainer, extension, state, step_dir)
    own_folder = step_dir is None or (step_dir.parent.resolve() == folder.resolve())
    if step_dir is not None and (step := tracker_to_write(folder, step_dir)) is not None:
        publish(folder / TRACKER_NAME, lambda fd: write_all(fd, str(step).encode()))
    remove_leftovers(folder)
    branch = _next_branch(folder, step_dir, own_folder=own_folder)
    run = begin_life(folder, parent_run_id=state.run_id if state else None, branch=branch)
    goes_on = own_folder and (state is None or state.run_id == run.run_id)
    life = extension.begin_life(trainer, folder, run, own_folder=goes_on)
    with _resume_from(trainer, step_dir):
        result = verl_load()
    if state is not None and step_dir is not None and fits:
        _put_back(trainer, life, state, step_dir, decision.reason)
    elif state is not None:
        # VERL has loaded `data.pt` at most steps: a position in the old inputs, with the old sampler's order.
        internals.reset_loader(trainer)
        life.pending_rng = state.rng_state
    _begin_ledger(trainer, extension, step_dir, state, fits)
    return result


def _next_branch(folder: Path, step_dir: Path | None, *, own_folder: bool) -> Branch:
    """Return the branch that a life from `step_dir` goes on with; `own_folder` tells whether that lies in `folder`."""
    steps = [(info, info.trailer.branch) for info in list_steps(folder) if info.trailer is not None]
    origin = (parse_step(step_dir) if step_dir is not None else None) or 0
    # A step that has no seal, and is not named, can never be resumed from.
    existing = {info.step: named for info, named in steps if info.seal is not None or info.selected}
    named = {info.step: named for info, named in steps}
    base = named.get(origin, ()) if own_folder and step_dir is not None else None
    return begin_branch(read_branch(folder) or (), base, origin, existing)


def _load_for_evaluation(trainer: internals.Trainer, extension: Extension, verl_load: Callable[[], Any]) -> Any:
    """Load the model that VERL would load, whatever has become of the input position beside it.

    Only where VERL finds no step, and may die of that, the step that a training would resume from.
    """
    step_dir = verl_choice(trainer)
    if step_dir is None and extension.config.enabled:
        decision = choose_start(trainer)
        if decision.error is None:
            step_dir = accept(decision)
        else:
            log.warning("%s", decision.error)
    if step_dir is None and trainer.config.trainer.resume_mode != "disable":
        return verl_load()
    with _resume_from(trainer, step_dir):
        return verl_load()


def _begin_ledger(
    trainer: internals.Trainer, extension: Extension, step_dir: Path | None, state: InputState | None, fits: bool
) -> None:
    """Note in the ledger what this life begins with."""
    rows: int | None = 0
    num_ahead = 0
    if step_dir is None:
        kind: ResumeKind = "none"
    elif state is None:
        kind, rows = "verl", _rows_of(internals.loaded_loader_state(trainer))
    elif fits:
        kind = "drop" if state.num_dropped_groups else "exact"
        rows = _rows_of(state.loader_state)
        num_ahead = num_rows(internals.buffered_batch(trainer)) - state.num_buffered
    else:
        kind = "reset"
    extension.open_ledger(
        trainer, output_folder(trainer), resume=kind, resumed_from=step_dir, loader_rows=rows, num_ahead=num_ahead
    )


def _begin_plain_ledger(trainer: internals.Trainer, extension: Extension) -> None:
    """Note in the ledger what a life begins with that VERL alone has loaded."""
    step_dir = verl_choice(trainer) if trainer.global_steps else None
    kind: ResumeKind = "none"
    if trainer.global_steps:
        kind = "verl" if extension.config.enabled else "off"
    rows = _rows_of(internals.loaded_loader_state(trainer))
    extension.open_ledger(trainer, output_folder(trainer), resume=kind, resumed_from=step_dir, loader_rows=rows)


def _rows_of(loader_state: Mapping[str, Any] | None) -> int | None:
    """Return the rows of the pass that the loader has handed out; a state after its end opens a new one."""
    if not loader_state or pass_has_ended(loader_state):
        return 0
    return rows_yielded(loader_state)


def _enter(trainer: internals.Trainer, extension: Extension, folder: Path) -> None:
    """Keep other trainers out of the output folder before anything in it is looked at."""
    try:
        if not folder.is_dir():
            locate(trainer)  # a wrong path is refused before a folder is made for it
            make_folders(folder)
    except AsyncCheckpointError:
        raise
    except OSError as error:  # also a name that is too long, or a folder on the way that may not be passed
        raise unwritable(folder, error) from error
    extension.enter_folder(folder)


def verified_state(step_dir: Path, on_mismatch: Literal["error", "reset"]) -> InputState | None:
    """Return the verified state of a step; None if it has none, and need not have one or is to go on without it.

    Raises:
        AsyncCheckpointError: The step is refused.
    """
    judgement = judge_step(step_dir)
    may_lack_it = on_mismatch == "reset" and isinstance(judgement.error, MissingStateError)
    if judgement.refusal is not None and not may_lack_it:
        raise judgement.refusal
    if judgement.state is None:
        log.warning("%s", plain_step_text(step_dir))
    return judgement.state


def _check_fit(trainer: internals.Trainer, extension: Extension, state: InputState, step_dir: Path) -> bool:
    """Return whether a state is put back; False if it does not fit this run and is dropped, with a warning.

    Raises:
        StateMismatchError: It does not fit, and is not to be dropped.
    """
    found = [*differences(state.fingerprint, extension.fingerprint), *loader_differences(trainer, state)]
    found = found or order_differences(trainer, state)
    if not found:
        return True
    error = refusal(found, state, step_dir)
    if extension.config.on_mismatch == "error":
        raise error
    log.warning(
        "%s\n%s.on_mismatch=reset: dropping the saved position as a whole: loader position, epoch %d, %d buffered "
        "inputs and %d prompt groups in flight. Step, weights and generators stay.",
        error.said,
        SECTION,
        state.epoch,
        state.num_buffered,
        state.num_in_flight,
    )
    return False


def _put_back(trainer: internals.Trainer, life: Life, state: InputState, step_dir: Path, reason: str) -> None:
    if trainer.global_steps != state.global_step:
        raise StateMismatchError(
            f"VERL loaded another step than the input state in {step_dir}.",
            [("loaded by VERL", trainer.global_steps), ("in the input state", state.global_step)],
            "Nothing was trained. Report this with both versions of the packages.",
        )
    buffered = open_loader(trainer, state)
    internals.set_buffered_batch(trainer, buffered)
    trainer.epoch = state.epoch - 1  # fit() adds 1 after loading
    life.restore(state, buffered, step_dir, reason)
    dropped = dropped_text(state, step_dir)
    if dropped is not None:
        log.warning("%s", dropped)


def _guard_inactive(trainer: internals.Trainer, extension: Extension) -> None:
    """Refuse to skip saved inputs silently when the position will not be put back."""
    if internals.loads_from_hdfs(trainer):
        return
    step_dir = verl_choice(trainer)
    if step_dir is None or not (step_dir / FILE_NAME).exists():
        return
    try:
        trailer = verify(step_dir / FILE_NAME)
    except StateFormatError as error:
        if extension.config.enabled:
            raise
        log.warning("%s.enabled=false: %s", SECTION, error)
        return
    pending = [
        ("buffered inputs", trailer.counts["num_buffered_inputs"]),
        ("prompt groups in flight", trailer.counts["num_carry_over_groups"]),
    ]
    if not any(count for _, count in pending):
        return
    if extension.config.enabled:
        raise StateMismatchError(
            f"{step_dir} holds inputs that asynchronous training has pulled and not trained; "
            "synchronous training would skip them.",
            pending,
            "Resume with agentlightning.async_rollout.enabled=true, or set "
            f"{SECTION}.enabled=false to skip them knowingly.",
        )
    log.warning(
        "%s.enabled=false: skipping %d buffered inputs and %d prompt groups in flight of %s.",
        SECTION,
        pending[0][1],
        pending[1][1],
        step_dir,
    )


def _resume_from(trainer: internals.Trainer, step_dir: Path | None) -> AbstractContextManager[None]:
    """Have VERL's load take exactly `step_dir`: it parses paths and trackers less tolerantly than `locate`."""
    is_torn = isinstance(read_tracker(output_folder(trainer)), TrackerProblem)
    return internals.loading(trainer, step_dir, past_tracker=is_torn)
