"""Which models an output folder keeps, so that one complete checkpoint exists at every instant.

VERL's retention counts saves: it counts a step twice that is saved twice, and one whose save failed; it removes a model
before the next step is published, and forgets what earlier lives have saved. So VERL is told to keep what is needed
while it saves, and the surplus goes here: before a save what VERL would remove for it, but never the last complete
step, and the rest once the new step is sealed.

What only VERL can reach stays VERL's to remove: models on other machines' own disks, and models that are saved in the
background, where VERL alone knows when a save has finished. For these it is told a number at each save with which it
removes the right ones of those that it knows.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from agl_async_ckpt.agl import internals
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.folder.seal import read_seal, seal_problems
from agl_async_ckpt.folder.steps import StepInfo, list_steps
from agl_async_ckpt.storage.files import remove_files, remove_leftover_temps
from agl_async_ckpt.storage.layout import FILE_NAME, MODEL_FOLDERS, SEAL_NAME, step_name

log = logging.getLogger(__name__)


class Retention:
    """Keeps and removes models for one trainer object, over all of its `fit()` calls: its workers remember as long."""

    def __init__(self) -> None:
        self._workers = internals.WorkerLists()
        self._sealed: set[int] = set()
        self._seen: dict[str, bool] = dict.fromkeys(MODEL_FOLDERS, False)
        """Whether the driver saw models at the last save."""
        self._warned: set[Path] = set()

    def during_save(self, trainer: internals.Trainer) -> AbstractContextManager[None]:
        """Make room for a save, and have VERL's workers remove nothing in it that must stay."""
        numbers, folder = internals.numbers_to_keep(trainer), internals.step_folder(trainer).parent
        in_background = internals.saves_asynchronously(trainer)
        self._sealed.discard(int(trainer.global_steps))
        if not in_background:  # what goes after the save anyway goes before: a disk that is enough for VERL is enough
            self._remove_surplus(trainer, {role: max(1, number - 1) for role, number in numbers.items()})

        def must_stay(role: str, known: list[int]) -> set[int]:
            # Where the driver sees the models, it removes them after the save. Elsewhere only VERL does, at the next
            # save: there it keeps no more than by itself, and one beside the new one, or none in the background, where
            # it removes once the new one is there.
            beside = numbers[role] if self._seen[role] else max(0 if in_background else 1, numbers[role] - 1)
            newest = sorted(self._sealed.intersection(known), reverse=True)[:beside]
            pinned = (step for step in known if _is_pinned(trainer, folder / step_name(step)))
            return {int(trainer.global_steps), *newest, *pinned}

        return self._workers.held_back(trainer, must_stay)

    def after_seal(self, trainer: internals.Trainer) -> None:
        """Note that the step is sealed, and remove the models beyond the number to keep.

        What cannot be removed, or looked at, takes up space; it is no reason to end a training that has saved.
        """
        self._sealed.add(int(trainer.global_steps))
        try:
            seal = read_seal(internals.step_folder(trainer))
        except AsyncCheckpointError as error:
            log.warning("Models beyond the number to keep stay for now: %s", error)
            return
        self._seen = {role: bool(seal.files_of(role)) for role in MODEL_FOLDERS}
        if not seal.async_save:
            self._remove_surplus(trainer, internals.numbers_to_keep(trainer))

    def _remove_surplus(self, trainer: internals.Trainer, numbers: dict[str, int]) -> None:
        """Remove models beyond `numbers`, without the step that is being saved if that is to be built anew."""
        if not numbers:
            return
        folder, step = internals.step_folder(trainer).parent, int(trainer.global_steps)
        try:
            usable = [info for info in list_steps(folder) if info.has_state]
            steps = [info for info in usable if info.step != step or step in self._sealed]
            surplus = choose_surplus(steps, numbers)
        except OSError as error:
            log.warning("Models beyond the number to keep stay in %s for now: %s", folder, error)
            return
        for info, roles in surplus:
            try:
                if not _is_pinned(trainer, info.path):
                    _remove(info, roles)
            except OSError as error:
                if info.path not in self._warned:
                    text = "%s cannot be cleaned up: %s. It takes up space until it is."
                    log.warning(text, info.path, error.strerror)
                self._warned.add(info.path)


def choose_surplus(steps: list[StepInfo], numbers: dict[str, int]) -> list[tuple[StepInfo, list[str]]]:
    """Choose the models that are older than as many complete steps as the run keeps.

    Only steps of the branch that goes on count, and a step that was left behind by it counts as older than what the
    branch has saved since. Where actors and critics are kept in different numbers, the smaller one says how many steps
    can be complete, and for the other role a step counts that lacks nothing else.

    Args:
        steps: Of the output folder, in ascending order, from a cheap look.
        numbers: Role -> how many to keep.

    Returns:
        Each step that has something to remove, with the roles.
    """
    branch = [info for info in reversed(steps) if not info.abandoned]
    complete = [info.step for info in branch if info.complete]
    least = min(numbers.values())
    if len(complete) < least:
        return []
    oldest: dict[str, int] = {}
    for role, number in numbers.items():
        standing = [info.step for info in branch if info.complete or _stands(info, role)]
        if len(standing) >= number:
            oldest[role] = min(standing[number - 1], complete[least - 1])
    found = [(info, [role for role, step in oldest.items() if _is_older(info, step)]) for info in steps]
    return [(info, roles) for info, roles in found if roles]


def _is_older(info: StepInfo, step: int) -> bool:
    return info.step < step if info.left_at is None else info.left_at < step


def _stands(info: StepInfo, role: str) -> bool:
    """Tell whether a step lacks at most models of other roles."""
    if info.seal is None or info.trailer is None:
        return False
    return not seal_problems(info.seal, info.path, info.trailer, hashes=False, models=[role])


def _is_pinned(trainer: internals.Trainer, step_dir: Path) -> bool:
    """Tell whether a step is the one that `trainer.resume_from_path` names, or a link.

    The next start with these settings begins at that step again; what a link leads to may be an archive.
    """
    section = trainer.config.trainer
    if step_dir.is_symlink():
        return True
    return section.resume_mode == "resume_path" and os.path.realpath(str(section.resume_from_path)) == os.path.realpath(
        step_dir
    )


def _remove(info: StepInfo, roles: list[str]) -> None:
    """Remove models of a step, then what is of no use without them.

    A cut in between leaves a step that is looked at again: its seal goes first, its input file last. Models that are
    not there may have been moved away and come back, so a step that has a seal keeps it then. A link is left alone, as
    VERL leaves it.

    Raises:
        OSError: Something is left.
    """
    folder, names = info.path, {path.name for path in info.path.iterdir()}
    there = [role for role in MODEL_FOLDERS if role in names]
    going = [role for role in there if role in roles and not (folder / role).is_symlink()]
    if going != there:
        for role in going:
            _remove_tree(folder / role)
    elif there or SEAL_NAME not in names:
        remove_files(folder, (SEAL_NAME,))
        for role in going:
            _remove_tree(folder / role)
        remove_files(folder, (FILE_NAME,))
        log.info("Removed step %d, as enough newer ones are complete: its model and its input position.", info.step)


def _remove_tree(folder: Path) -> None:
    """Remove what can be removed, as VERL does, and say then that something is left."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        raise OSError(errno.ENOTEMPTY, "not all of it can be removed", str(folder))


def remove_leftovers(output_dir: Path) -> None:
    """Remove temporary files of writers that were killed, in the output folder and its steps."""
    for path in remove_leftover_temps(output_dir):
        log.info("Removed %s, left behind by a writer that was killed.", path)
