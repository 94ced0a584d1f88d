"""At the end of a step: whether to save out of turn, and whether to stop.

VERL's loop saves every `trainer.save_freq` steps. Here a step is saved as well if the last save is `save_every_minutes`
ago, if the machine's time runs out (VERL's own test, which agent-lightning's loop does not make), or if somebody asks
for a stop. The loop itself does that save, at its usual place: it reads `save_freq` at each step. A validation comes
before that place: what is due is saved before it, and it is left, and the step saved, as soon as a stop is asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.stop.leaving import ValidationLeft
from agl_async_ckpt.agl.stop.stop_lookup import StopLookup
from agl_async_ckpt.config import AsyncCheckpointConfig
from agl_async_ckpt.exceptions import TrainingStopped
from agl_async_ckpt.folder.stop_request import StopRequest

log = logging.getLogger(__name__)

ALWAYS, NEVER = 1, -1
"""Values of `trainer.save_freq`."""
LOOK_EVERY_S = 1.0
"""How often a validation looks for a request to stop, at most."""


class StepEnd:
    """Decides at the ends of steps, for one trainer.

    Attributes:
        request: What this `fit()` stops for, once it was seen.
        last_step: The last step that this `fit()` has trained; None before the first.
    """

    def __init__(
        self, config: AsyncCheckpointConfig, section: internals.TrainerSection, save: Callable[[], Any]
    ) -> None:
        """Look at nothing yet.

        Args:
            config: Settings; with `enabled: false` nothing here acts.
            section: The config's `trainer`.
            save: The trainer's save; saves step `global_steps`.
        """
        self._config = config
        self._section = section
        self._other_freq = ExitStack()  # entered while another `save_freq` than the usual one is in the config
        self._save = save
        self._lookup = StopLookup(config, section)
        self.on_fit_begins()

    def on_fit_begins(self) -> None:
        """Forget an earlier `fit()` of the same trainer."""
        self.request: StopRequest | None = None
        self.last_step: int | None = None
        self._saved_step: int | None = None
        self._due = False
        self._longest_step_s = 0.0
        self._validating: int | None = None  # in which thread
        self._step_began = self._saved_at = self._looked_at = time.monotonic()

    # --- what the trainer calls, in the order of its loop ----------------------------------------------------------

    def validate(self, trainer: internals.Trainer, run: Callable[[], Any]) -> Any:
        """Run a validation, unless a stop is asked for, and leave it once one is. It finds a due save done.

        Returns:
            Its metrics; none of one that was left.

        Raises:
            TrainingStopped: A stop was asked for, and nothing was trained before.
        """
        if not self._asked_to_stop():
            if self._due:
                self._save_ahead_of_loop(trainer)  # a validation can take longer than the machine has
            self._validating = threading.get_ident()
            try:
                metrics = run()
            except ValidationLeft:
                log.info("Left the validation of step %d.", trainer.global_steps)
            else:
                if self.request is None:  # else somebody has caught what was to leave it
                    return metrics
            finally:
                self._validating = None
        if self.last_step is None:
            raise self._stopped(int(trainer.global_steps))
        self._save_ahead_of_loop(trainer)  # whoever has asked for the metrics may fail of there being none
        return {}

    def leave_validation(self) -> None:
        """Leave a validation if a stop is asked for; whatever waits calls this.

        Raises:
            ValidationLeft: One is.
        """
        if self._validating != threading.get_ident():
            return
        if self.request is None and time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        if self._asked_to_stop():
            raise ValidationLeft

    def on_step_begins(self, trainer: internals.Trainer) -> None:
        """Save the step before if the loop has not: after one without a batch it never does. Then stop, if asked to.

        Raises:
            TrainingStopped: A stop was asked for.
        """
        self.put_freq_back()
        asked = self._asked_to_stop()
        if asked or self._due:
            self._save_last_step(trainer)
        if asked:
            raise self._stopped(int(trainer.global_steps) - 1)
        self._step_began = time.monotonic()

    def on_step_ends(self, trainer: internals.Trainer) -> None:
        """Decide about the step that has just ended, `trainer.global_steps`."""
        self.last_step = int(trainer.global_steps)
        self._longest_step_s = max(self._longest_step_s, time.monotonic() - self._step_began)
        reason = self._reason()
        self._due = reason is not None
        if self._due:
            log.info("Saving step %d: %s.", self.last_step, reason)
            self._set_freq(ALWAYS)

    def on_saved(self, trainer: internals.Trainer) -> None:
        """Note a save, in or out of turn."""
        self._saved_step = int(trainer.global_steps)
        self._saved_at = time.monotonic()
        self._due = False

    def on_loop_ends(self, trainer: internals.Trainer) -> None:
        """Save what is left to save after the last step.

        Raises:
            TrainingStopped: A stop was asked for in that step, so that its validation was left out.
        """
        self.put_freq_back()
        if self._due or self.request is not None or self._config.save_every_minutes is not None:
            self._save_last_step(trainer)
        if self.request is not None:
            raise self._stopped(int(trainer.global_steps))

    def answer(self) -> None:
        """Answer whoever has asked for the stop, once all is done."""
        self._lookup.answer()

    def put_freq_back(self) -> None:
        """Leave the config as it was."""
        self._other_freq.close()

    # --- decisions --------------------------------------------------------------------------------------------------

    def _asked_to_stop(self) -> bool:
        if self.request is None:
            self._looked_at = time.monotonic()
            self.request = self._lookup.look()
            if self.request is not None:
                log.info("Asked to stop by %s.", self.request)
        return self.request is not None

    def _reason(self) -> str | None:
        """Tell why the step that has just ended must be saved, whatever `save_freq` says; None if it need not be."""
        if self._asked_to_stop():
            return "the training is to stop"
        every = self._config.save_every_minutes
        if not self._config.enabled:
            return None
        if every is not None and time.monotonic() - self._saved_at >= 60 * every:
            return f"the last save is save_every_minutes={every:g} ago"
        saves = every is not None or self._section.save_freq > 0
        if saves and internals.capacity_expires(self._section, self._longest_step_s):
            return "the capacity of this machine is about to expire"
        return None

    # --- acts -------------------------------------------------------------------------------------------------------

    def _set_freq(self, save_freq: int) -> None:
        self.put_freq_back()
        self._other_freq.enter_context(internals.overridden(self._section, save_freq=save_freq))

    def _save_ahead_of_loop(self, trainer: internals.Trainer) -> None:
        """Save the step whose validation it is, and keep the loop from doing so after it."""
        self._save_last_step(trainer)
        self._set_freq(NEVER)

    def _save_last_step(self, trainer: internals.Trainer) -> None:
        """Save the last step, unless it is saved; `global_steps` may have gone on."""
        if self.last_step is None or self._saved_step == self.last_step:
            return
        global_steps, trainer.global_steps = trainer.global_steps, self.last_step
        try:
            self._save()
        finally:
            trainer.global_steps = global_steps

    def _stopped(self, loaded_step: int) -> TrainingStopped:
        """Return what to raise once everything is saved.

        Args:
            loaded_step: Where this `fit()` began; used if it has trained nothing.
        """
        if self.last_step is None:
            return TrainingStopped(f"Stopped by {self.request} before a step was trained.", loaded_step, False)
        # A `_save_checkpoint` of the user's may have left the step out.
        saved = self._saved_step == self.last_step
        return TrainingStopped(f"Stopped by {self.request} after step {self.last_step}.", self.last_step, saved)
