"""One checkpoint: our file, then VERL's save, then the seal (the order of docs/commit-order.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.extension import Extension
from agl_async_ckpt.agl.inputs.loader_position import with_next_rows
from agl_async_ckpt.agl.life import Life
from agl_async_ckpt.exceptions import ActivationError, AsyncCheckpointError, ForeignFormatError, StateFormatError
from agl_async_ckpt.folder.models import sync_models
from agl_async_ckpt.folder.run_identity import note_first_step, note_step_without_state, require_latest_life
from agl_async_ckpt.folder.seal import write_seal
from agl_async_ckpt.state import InputState
from agl_async_ckpt.storage.commit import commit_state
from agl_async_ckpt.storage.container import read_trailer
from agl_async_ckpt.storage.files import remove_files, write_error
from agl_async_ckpt.storage.layout import FILE_NAME, SEAL_NAME

log = logging.getLogger(__name__)


def take_state(trainer: internals.Trainer, extension: Extension, life: Life) -> InputState:
    """Read the input position of a trainer that has finished `trainer.global_steps` steps."""
    rng = life.pending_rng or internals.rng_state()  # before the loader's state, which may draw a seed
    loader_state = internals.loader_state(trainer)
    groups = life.keeper.groups.collect(internals.carry_over(trainer))
    dropped = len(groups) if extension.config.in_flight == "drop" else 0
    return InputState(
        global_step=int(trainer.global_steps),
        epoch=int(trainer.epoch) + (0 if life.in_loop else 1),  # a validation before the first step may save
        exhausted=internals.is_exhausted(trainer, loader_state),
        loader_state=loader_state,
        buffered_batch=internals.buffered_batch(trainer),
        carry_over=() if dropped else groups,
        rng_state=rng,
        fingerprint=with_next_rows(trainer, extension.fingerprint, loader_state),
        run_id=life.run.run_id,
        parent_run_id=life.run.parent_run_id,
        written_by=internals.written_by(),
        num_dropped_groups=dropped,
    )


def save_checkpoint(trainer: internals.Trainer, extension: Extension, verl_save: Callable[[], Any]) -> Any:
    """Save a step, with the input position where checkpoints are to hold it.

    Args:
        trainer: The trainer.
        extension: Its extension.
        verl_save: The framework's own `_save_checkpoint`; publishes the step through its tracker at its end.

    Raises:
        FolderInUseError: A newer life of this run has begun; before VERL starts, or before the step is sealed.
        StateWriteError: Before VERL starts, so the previous checkpoint stays selected.
        UnencodableValueError: The same, of a value that no checkpoint can hold.
    """
    step_dir = internals.step_folder(trainer)
    extension.stand_back_without_life()
    if not extension.trains:
        return _save_evaluated(trainer, step_dir, verl_save)
    if extension.life is None:
        return _save_without_position(trainer, extension, step_dir, verl_save)
    return _save_with_position(trainer, extension, extension.life, step_dir, verl_save)


def _save_with_position(
    trainer: internals.Trainer, extension: Extension, life: Life, step_dir: Path, verl_save: Callable[[], Any]
) -> Any:
    """Commit the input position, let VERL save, seal both."""
    require_latest_life(step_dir.parent, life.run)
    started = time.monotonic()
    extension.sync_ledger(int(trainer.global_steps))
    state = take_state(trainer, extension, life)
    _refuse_foreign_file(step_dir)
    life.run = note_first_step(step_dir.parent, life.run, state.global_step)
    path = commit_state(state, step_dir, branch=life.run.branch)
    seconds, num_bytes = time.monotonic() - started, path.stat().st_size
    is_async = internals.saves_asynchronously(trainer)
    with (
        extension.retention.during_save(trainer),
        internals.once_models_are_written(trainer, lambda: _sync(step_dir, is_async)),
    ):
        result = verl_save()
    require_latest_life(step_dir.parent, life.run)
    _confirm_ours(path, state)
    write_seal(step_dir, use_critic=bool(trainer.use_critic), async_save=is_async)
    life.note_save(seconds, num_bytes)
    extension.retention.after_seal(trainer)
    if state.num_dropped_groups:
        log.warning(
            "in_flight=drop: step %d does not hold its %d prompt groups in flight; a resume from it never trains them.",
            state.global_step,
            state.num_dropped_groups,
        )
    log.info(
        "Saved the input position of step %d (epoch %d, %d buffered, %d prompt groups in flight) to %s.",
        state.global_step,
        state.epoch,
        state.num_buffered,
        state.num_in_flight,
        path,
    )
    return result


def _save_without_position(
    trainer: internals.Trainer, extension: Extension, step_dir: Path, verl_save: Callable[[], Any]
) -> Any:
    """Let VERL save; a step folder that is written again must not keep the input position of an earlier life."""
    remove_files(step_dir, (SEAL_NAME, FILE_NAME))
    try:
        note_step_without_state(step_dir.parent)
    except AsyncCheckpointError as error:  # a later start with the extension says more; this save is VERL's
        log.warning("%s", error)
    extension.sync_ledger(int(trainer.global_steps))
    return verl_save()


def _save_evaluated(trainer: internals.Trainer, step_dir: Path, verl_save: Callable[[], Any]) -> Any:
    """Let a validation of the user's that saves do so in an evaluation; the position of that step stays what it was."""
    is_sealed = (step_dir / SEAL_NAME).exists()
    result = verl_save()
    if is_sealed:
        write_seal(step_dir, use_critic=bool(trainer.use_critic), async_save=internals.saves_asynchronously(trainer))
    return result


def _sync(step_dir: Path, is_async: bool) -> None:
    """Make the models durable before the tracker can be: after a power cut a step that it names has whole models."""
    if is_async:  # still being written, and VERL does not name the step yet
        return
    try:
        sync_models(step_dir)
    except OSError as error:
        raise write_error(step_dir, error) from error


def _refuse_foreign_file(step_dir: Path) -> None:
    path = step_dir / FILE_NAME
    if not path.exists():
        return
    try:
        read_trailer(path)
    except ForeignFormatError as error:
        raise ActivationError(
            f"{path} is of another format (agent-lightning's own?) and was not written over.",
            act="Set trainer.default_local_dir to a new folder, or switch off one of the two writers.",
        ) from error
    except StateFormatError:
        return  # damaged, ours: replaced by a good one


def _confirm_ours(path: Path, state: InputState) -> None:
    try:
        run_id = read_trailer(path).run_id
    except ForeignFormatError:
        run_id = None
    except AsyncCheckpointError as error:
        raise write_error(path, error) from error
    if run_id != state.run_id:
        raise ActivationError(
            f"{path} was written over while VERL saved step {state.global_step}: "
            "this agent-lightning saves a file of that name itself.",
            act="Take this extension out of the config; the saved input position of this step is lost.",
        )
