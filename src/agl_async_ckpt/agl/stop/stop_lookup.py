"""Whether somebody asks the trainer to stop: a file in the output folder, or a value in Ray's store.

Neither may end a training or hold up its steps: a store can answer errors, a file system can hang. So a thread looks,
and is waited for briefly; one that hangs is left to it, and nobody waits for it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.internals import ray_store
from agl_async_ckpt.config import AsyncCheckpointConfig
from agl_async_ckpt.folder.stop_request import StopRequest, read_request, remove_request

log = logging.getLogger(__name__)

PATIENCE_S = 1.0


class StopLookup:
    """Looks for a request to stop, for one trainer."""

    def __init__(self, config: AsyncCheckpointConfig, section: internals.TrainerSection) -> None:
        """Look at what was there before this trainer.

        Args:
            config: Settings; with `enabled: false` nothing is looked for.
            section: The config's `trainer`.
        """
        self._config = config
        self._section = section
        self._ray = _Place("Ray's store", lambda: ray_store.get_request())
        self._folder = _Place("the output folder", lambda: self._look_into_folder())
        # Told apart by what it is and not by its time: clocks of hosts differ, and are set back.
        self._left_before = self._look_into_folder()

    def look(self) -> StopRequest | None:
        """Return what asks for a stop now; None if nothing does, or if it cannot be told."""
        if not self._config.enabled:
            return None
        return self._ray.look() or self._request_in_folder()

    def answer(self) -> None:
        """Remove the request once all is done: whoever waits for it takes that for the answer."""
        if not internals.starts_training(self._section):
            return
        try:
            remove_request(self._output_dir)
        except OSError as error:
            log.warning("The request to stop in %s cannot be removed: %s.", self._output_dir, error.strerror)

    @property
    def _output_dir(self) -> Path:
        return Path(self._section.default_local_dir)

    def _request_in_folder(self) -> StopRequest | None:
        request = self._folder.look()
        if request is None or request != self._left_before:
            return request
        log.info("Ignored a request to stop by %s: it was there before this trainer.", request)
        self.answer()
        return None

    def _look_into_folder(self) -> StopRequest | None:
        if not self._config.enabled or not internals.starts_training(self._section):
            return None  # the folder is another trainer's, and so is the request
        return read_request(self._output_dir)


class _Place:
    """A place in which a request may be; nothing that a look there does reaches the caller."""

    def __init__(self, name: str, look: Callable[[], StopRequest | None]) -> None:
        self._name = name
        self._look = look
        self._thread: threading.Thread | None = None
        self._found: StopRequest | None = None
        self._is_silent = False

    def look(self) -> StopRequest | None:
        """Return what is there, or was at the last look that came back."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="agl-async-ckpt-lookup", daemon=True)
            self._thread.start()
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                self._silent(f"no answer within {PATIENCE_S:g} s")
        return self._found

    def _ask(self) -> None:
        try:
            self._found = self._look()
        except Exception as error:  # whatever Ray raises
            self._silent(f"{type(error).__name__}: {error}")
            return
        if self._is_silent:
            self._is_silent = False
            log.info("Requests to stop in %s can be looked up again.", self._name)

    def _silent(self, why: str) -> None:
        if not self._is_silent:
            self._is_silent = True
            log.warning("Whether to stop cannot be looked up in %s (%s). Training goes on.", self._name, why)
