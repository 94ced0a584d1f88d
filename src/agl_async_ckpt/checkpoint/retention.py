"""Keep one complete checkpoint at every instant, also when the run keeps one only; remove what no step can use.

With `max_actor_ckpt_to_keep: 1` VERL removes the previous model inside the worker's save, before the new step is
published: a kill in that window leaves nothing to resume from. So VERL keeps one more while it saves, and the surplus
goes once the new step is sealed. From 2 on VERL's own order is safe.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.storage.files import remove_files, remove_leftover_temps
from agl_async_ckpt.storage.layout import FILE_NAME, MODEL_FOLDERS, SEAL_NAME, parse_step, step_name
from agl_async_ckpt.storage.seal import read_seal

log = logging.getLogger(__name__)

KEEP_KEYS = {"actor": "max_actor_ckpt_to_keep", "critic": "max_critic_ckpt_to_keep"}
DEPRECATED_KEEP_ONE = "remove_previous_ckpt_in_save"


@contextmanager
def keep_one_more(trainer: Any) -> Iterator[list[str]]:
    """Have VERL keep two where the run keeps one, for the time of a save.

    Not when the model is saved in the background: its previous one has to stay until that has finished, and only VERL
    knows when.

    Yields:
        The model folders whose previous step the caller has to remove once the new step is published.
    """
    section = trainer.config.trainer
    if capture.saves_asynchronously(trainer):
        yield []
        return
    keeps_one = bool(section.get(DEPRECATED_KEEP_ONE, False))
    roles = [role for role, key in KEEP_KEYS.items() if keeps_one or section.get(key) == 1]
    changed = {KEEP_KEYS[role]: 2 for role in roles} | ({DEPRECATED_KEEP_ONE: False} if keeps_one else {})
    before = {key: section.get(key) for key in changed}
    for key, value in changed.items():
        section[key] = value
    try:
        yield roles
    finally:
        for key, value in before.items():
            section[key] = value


def remove_surplus(output_dir: Path, saved_steps: list[int], roles: list[str]) -> None:
    """Remove the models of this life's earlier steps, as VERL would have done during the save.

    One that cannot be removed is warned about, and tried again after the next save.

    Args:
        output_dir: The output folder.
        saved_steps: Steps that this life has saved, the newest last; earlier lives' are VERL's to forget.
        roles: Model folders of which the run keeps one.
    """
    for step in saved_steps[:-1]:
        for role in roles:
            folder = output_dir / step_name(step) / role
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s cannot be removed: %s. It takes up space until it is.", folder, error.strerror)


def remove_unusable_inputs(output_dir: Path, newest: int) -> None:
    """Remove the input files of steps whose model is gone: no resume can use them. Never the newest step's.

    Where the driver saw no model at the save (node-local disks), nothing is known and nothing is removed. What cannot
    be removed, or looked at, takes up space; it is no reason to end a training that has saved.
    """
    for folder in output_dir.iterdir():
        step = parse_step(folder)
        if step is None or step == newest:
            continue
        try:
            if (folder / FILE_NAME).exists() and _has_lost_a_model(folder):
                remove_files(folder, (SEAL_NAME, FILE_NAME))
                log.info("Removed the input position of step %d: its model was removed by retention.", step)
        except OSError as error:
            log.warning("%s cannot be cleaned up: %s. It takes up space until it is.", folder, error.strerror)


def _has_lost_a_model(folder: Path) -> bool:
    try:
        sealed = read_seal(folder).model_files
    except AsyncCheckpointError:
        return False
    had = {role for role in MODEL_FOLDERS if any(name.startswith(f"{role}/") for name in sealed)}
    return any(not (folder / role).exists() for role in had)


def remove_leftovers(output_dir: Path) -> None:
    """Remove temporary files of writers that were killed, in the output folder and its steps."""
    for path in remove_leftover_temps(output_dir):
        log.info("Removed %s, left behind by a writer that was killed.", path)
