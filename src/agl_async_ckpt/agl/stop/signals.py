"""Signals at the driver: the first one asks the trainer to stop, the second one ends the driver at once.

Nothing that is started here inherits a blocked or an ignored signal: what runs in a worker ends when it is told to end.
Whoever signals the driver's whole process group can have Ray started outside of it (`own_process_groups`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from agl_async_ckpt.exceptions import StopRequested
from agl_async_ckpt.folder.stop_request import StopRequest

log = logging.getLogger(__name__)

SAME_SIGNAL_S = 1.0
"""A signal so soon after the first is the first: `timeout` and others send it to a process, and to its group."""
RETRY_S = 1.0
UNHEARD_S = 10.0
"""When to say that a request has not reached Ray."""
THREAD = "agl-async-ckpt-stop"
_leaving = False
"""Whether a child that is forked now leaves the process group of its parent."""


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Have each process that Ray starts inside lead a process group of its own.

    A signal to the group of this process then reaches neither Ray's own processes, which would end of it with the step
    that is to be saved, nor what they start in turn. They end with this process all the same, as Ray has the kernel
    see to.
    """
    global _leaving
    _leaving = True
    try:
        yield
    finally:
        _leaving = False


def _leave_group() -> None:
    if _leaving:
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)  # `subprocess` calls it where a `preexec_fn` is given; Ray gives one


class StopSignals:
    """Handles signals in the main thread of a driver, while entered.

    Helper threads pass the request on: a Ray that hangs keeps neither the second signal nor the grace from working.
    """

    def __init__(self, names: Iterable[str], publish: Callable[[StopRequest], None], *, grace_s: float) -> None:
        """Handle nothing yet.

        Args:
            names: Of signals, such as SIGTERM.
            publish: Passes a request on to the trainer; tried again when it fails.
            grace_s: How long to wait for the trainer after that.
        """
        self._numbers = tuple(signal.Signals[name] for name in names)
        self._publish = publish
        self._grace_s = grace_s
        self._request: StopRequest | None = None
        self._asked_at = 0.0
        self._expired = False
        self._asked = threading.Event()
        self._passed_on = threading.Event()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if not self._numbers:
            return self
        if threading.current_thread() is not threading.main_thread():
            log.info("run_ppo is not called in the main thread: signals do not stop the training gently.")
            return self
        self._before = dict.fromkeys(self._numbers)
        self.install()
        threading.Thread(target=self._count_down, name=THREAD, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._ending:
            self._over.set()
        self._asked.set()
        self._passed_on.set()
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @property
    def request(self) -> StopRequest | None:
        """What a signal has asked for."""
        return self._request

    def install(self) -> None:
        """Set the handlers, again where another library has set its own (`ray.init` takes SIGTERM)."""
        for number in self._before:
            found = signal.signal(number, self._handle)
            if found != self._handle:
                self._before[number] = found

    @contextmanager
    def around_init(self) -> Iterator[None]:
        """Stay in charge around `ray.init`, which takes SIGTERM for itself and ends this process at one.

        Raises:
            StopRequested: One came meanwhile.
        """
        try:
            yield
        except SystemExit as error:
            by = next((number for number in self._before if number == error.code), None)  # as Ray's handler sets it
            if by is None:
                raise
            raise StopRequested(f"Stopped by {by.name} while Ray was starting.") from None
        finally:
            self.install()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._expired:
            self._expired = False
            raise StopRequested(
                f"The trainer has not stopped within stop_grace_s={self._grace_s:g} of {signal.Signals(number).name}.\n"
                "Start the same command again: it resumes from the last checkpoint."
            )
        now = time.monotonic()
        if self._request is None:
            self._request, self._asked_at = StopRequest.now(signal.Signals(number).name), now
            self._asked.set()
        elif now - self._asked_at > SAME_SIGNAL_S:
            self._end_at_once(number)

    @staticmethod
    def _end_at_once(number: int) -> None:
        """End as if nobody had handled the signal: a shell and a scheduler see which one it was."""
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
        signal.raise_signal(number)
        os._exit(128 + number)  # process 1 of a container: the kernel does nothing there by default

    def _count_down(self) -> None:
        self._asked.wait()
        request = self._request
        if request is None:
            return
        log.warning(
            "%s: asking the trainer to finish its step, save and stop; waiting up to %g s. "
            "Another signal ends this process at once; the last checkpoint stays.",
            request.by,
            self._grace_s,
        )
        # In a thread of its own: a Ray that hangs must not use up more than the grace.
        threading.Thread(target=self._pass_on, args=(request,), name=f"{THREAD}-request", daemon=True).start()
        # A wait that is longer than Python can wait (292 years) is for ever.
        give_up_at = time.monotonic() + min(self._grace_s, threading.TIMEOUT_MAX - 1)
        if not self._passed_on.wait(min(self._grace_s, UNHEARD_S)) and not self._over.is_set():
            log.warning(
                "The request has not reached Ray. If the signal was sent to the whole process group, Ray has got it "
                "and shuts down: agentlightning.async_checkpoint.shield_ray=true has it start outside of the group."
            )
        self._over.wait(max(0.0, give_up_at - time.monotonic()))
        with self._ending:  # the handler must still be ours when the signal arrives
            if not self._over.is_set():
                self._expired = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals[request.by])

    def _pass_on(self, request: StopRequest) -> None:
        told = False
        while not self._over.is_set():
            try:
                self._publish(request)
                self._passed_on.set()
                return
            except Exception as error:  # whatever Ray raises while it starts, or comes back
                if not told:
                    log.warning("The request has not reached Ray yet (%s).", error)
                told = True
                self._over.wait(RETRY_S)
