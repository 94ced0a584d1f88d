"""How many models a run keeps, and which ones VERL's workers remove.

Each worker lists what it has saved in its life, and at a save removes the models at the front of that list, until as
many are left as the config's number says. It counts a step twice that is saved twice, and cannot be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agl_async_ckpt.agl.internals.configs import overridden
from agl_async_ckpt.agl.internals.protocols import Trainer
from agl_async_ckpt.storage.layout import MODEL_FOLDERS

_KEYS = {"actor": "max_actor_ckpt_to_keep", "critic": "max_critic_ckpt_to_keep"}
_KEEP_ONE = "remove_previous_ckpt_in_save"
"""Deprecated by VERL, and stronger than the numbers."""


def numbers_to_keep(trainer: Trainer) -> dict[str, int]:
    """Tell how many models of each role the run keeps, as VERL reads it; without a role of which it keeps all."""
    section = trainer.config.trainer
    keeps_one = bool(section.get(_KEEP_ONE, False))
    roles = MODEL_FOLDERS if trainer.use_critic else MODEL_FOLDERS[:1]
    numbers = {role: 1 if keeps_one else section.get(_KEYS[role]) for role in roles}
    return {role: int(number) for role, number in numbers.items() if isinstance(number, int) and number > 0}


class WorkerLists:
    """The steps in the lists of one trainer's workers, which last as long as the trainer does."""

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {role: [] for role in MODEL_FOLDERS}
        """The oldest first. One more than there are where a save has failed early: then too much is kept."""

    @contextmanager
    def held_back(self, trainer: Trainer, must_stay: Callable[[str, list[int]], set[int]]) -> Iterator[None]:
        """Have the workers remove, in the save that is the body, what comes before the first model that must stay.

        Args:
            trainer: Saves `global_steps`.
            must_stay: Called with a role and the steps of its list; returns those of them that stay.
        """
        told: dict[str, int | bool | None] = {}
        if trainer.config.trainer.get(_KEEP_ONE, False):
            told[_KEEP_ONE] = False
        num_removed: dict[str, int] = {}
        for role in numbers_to_keep(trainer):
            steps = self._steps[role]
            staying = must_stay(role, steps)
            num_removed[role] = next((i for i, step in enumerate(steps) if step in staying), len(steps))
            told[_KEYS[role]] = len(steps) + 1 - num_removed[role] if num_removed[role] else None
        try:
            with overridden(trainer.config.trainer, **told):
                yield
            for role, number in num_removed.items():
                del self._steps[role][:number]
        finally:
            for role in num_removed:
                self._steps[role].append(int(trainer.global_steps))
