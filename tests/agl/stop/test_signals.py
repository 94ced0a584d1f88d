"""Signals at a driver: real signals to real processes, with a trainer that is a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agl_async_ckpt.agl.stop.signals import SAME_SIGNAL_S, THREAD, StopSignals, own_process_groups
from agl_async_ckpt.exceptions import EXIT_STOPPED, StopRequested
from agl_async_ckpt.folder.stop_request import StopRequest

DRIVER = """
import signal, sys, time
from agl_async_ckpt.agl.stop.signals import StopSignals
from agl_async_ckpt.exceptions import StopRequested

names, stops, grace_s, refusals = sys.argv[1].split(","), sys.argv[2] == "stops", float(sys.argv[3]), int(sys.argv[4])
asked = []

def publish(request):
    global refusals
    if refusals < 0:  # Ray hangs
        time.sleep(600)
    refusals -= 1
    if refusals >= 0:
        raise RuntimeError("not there yet")
    asked.append(request)
    print("asked", request.by, flush=True)

with StopSignals(names, publish, grace_s=grace_s):
    print("ready", flush=True)
    while not (asked and stops):
        time.sleep(0.01)
    print("saved", flush=True)
    time.sleep(0.3)  # further deliveries of the same signal
    raise StopRequested("stopped", 3, saved=True)
"""


class Driver:
    """The process, in a group of its own."""

    def __init__(
        self,
        names: str = "SIGTERM,SIGUSR1",
        *,
        stops: bool = True,
        grace_s: float = 60,
        refusals: int = 0,
        below: tuple[str, ...] = (),
    ) -> None:
        command = [sys.executable, "-c", DRIVER, names, "stops" if stops else "hangs", str(grace_s), str(refusals)]
        self.process = subprocess.Popen(
            [*below, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[3],
        )
        self.expect("ready")

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code, and what it wrote to stderr."""
        _, error = self.process.communicate(timeout=60)
        return self.process.returncode, error


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.process.kill()
        driver.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_asks_and_the_process_ends_with_the_code_of_a_stop(
    drivers: list[Driver], number: signal.Signals
) -> None:
    """Without a traceback, though nothing catches the StopRequested."""
    driver = Driver()
    drivers.append(driver)
    driver.send(number)
    driver.expect(f"asked {number.name}")
    driver.expect("saved")
    code, error = driver.end()
    assert code == EXIT_STOPPED == 75
    assert "Traceback" not in error


def test_signal_to_process_and_group_counts_once(drivers: list[Driver]) -> None:
    """As GNU timeout sends it: to its child, then to the group that the child is in."""
    driver = Driver()
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    driver.expect("asked SIGTERM")
    os.killpg(driver.process.pid, signal.SIGTERM)
    driver.expect("saved")
    os.killpg(driver.process.pid, signal.SIGTERM)
    assert driver.end()[0] == EXIT_STOPPED


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_second_signal_ends_the_process_at_once(drivers: list[Driver], second: signal.Signals) -> None:
    """By that signal, as the shell and the scheduler see it; a trainer that hangs does not matter."""
    driver = Driver(stops=False)
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    driver.expect("asked SIGTERM")
    time.sleep(SAME_SIGNAL_S + 0.2)
    driver.send(second)
    assert driver.end()[0] == -second


def test_second_interrupt_is_a_keyboard_interrupt(drivers: list[Driver]) -> None:
    """Ctrl-C twice, where SIGINT is among the signals."""
    driver = Driver("SIGINT", stops=False)
    drivers.append(driver)
    driver.send(signal.SIGINT)
    driver.expect("asked SIGINT")
    time.sleep(SAME_SIGNAL_S + 0.2)
    driver.send(signal.SIGINT)
    code, error = driver.end()
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in error


def test_interrupt_that_is_not_among_the_signals_ends_at_once(drivers: list[Driver]) -> None:
    """Also while a stop is under way: Ctrl-C stays what it is."""
    driver = Driver(stops=False)
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    driver.expect("asked SIGTERM")
    driver.send(signal.SIGINT)
    assert driver.end()[0] == -signal.SIGINT


def test_trainer_that_does_not_stop_is_left_after_the_grace(drivers: list[Driver]) -> None:
    """The same exit code: what there is to do is the same."""
    driver = Driver(stops=False, grace_s=0.2)
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    assert driver.end()[0] == EXIT_STOPPED


def test_grace_without_an_end_is_waited_for(drivers: list[Driver]) -> None:
    """`stop_grace_s: .inf`: the wait is longer than Python's own waits may be."""
    driver = Driver(grace_s=float("inf"))
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    driver.expect("asked SIGTERM")
    driver.expect("saved")
    code, error = driver.end()
    assert (code, "OverflowError" in error) == (EXIT_STOPPED, False)


def test_request_is_tried_again_until_it_gets_through(drivers: list[Driver]) -> None:
    """Ray may be starting, or its head node coming back."""
    driver = Driver(refusals=1)
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    driver.expect("asked SIGTERM")
    driver.expect("saved")
    assert driver.end()[0] == EXIT_STOPPED


def test_grace_ends_though_ray_hangs(drivers: list[Driver]) -> None:
    """While the request is being passed on: nobody has seen it. The log says so, and what to do; the driver ends."""
    driver = Driver(grace_s=0.2, refusals=-1)
    drivers.append(driver)
    driver.send(signal.SIGTERM)
    code, error = driver.end()
    assert code == EXIT_STOPPED
    assert "The request has not reached Ray." in error
    assert "shield_ray=true has it start outside of the group" in error


IN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")


def may_unshare() -> bool:
    with suppress(OSError):
        return subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not may_unshare(), reason="this user may not make a PID namespace (unshare --pid)")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_second_signal_ends_process_1_of_a_container(drivers: list[Driver], second: signal.Signals) -> None:
    """The kernel ignores there what a signal does by default; the exit code is that of an end by it."""
    driver = Driver(stops=False, grace_s=600, below=IN_NAMESPACE)
    drivers.append(driver)
    [first_process] = map(
        int, Path(f"/proc/{driver.process.pid}/task/{driver.process.pid}/children").read_text().split()
    )
    os.kill(first_process, signal.SIGTERM)
    driver.expect("asked SIGTERM")
    time.sleep(SAME_SIGNAL_S + 0.2)
    os.kill(first_process, second)
    assert driver.end()[0] == 128 + second


def nothing(request: StopRequest) -> None:
    """Publish to nobody."""


def test_handlers_are_put_back_and_set_again_after_another_library() -> None:
    """`ray.init` takes SIGTERM in between; what is started meanwhile inherits no signal blocked or ignored."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)

    def of_the_library(number: int, frame: object) -> None:
        raise SystemExit(number)

    with StopSignals(("SIGTERM", "SIGUSR1"), nothing, grace_s=1) as signals:
        ours = signal.getsignal(signal.SIGTERM)
        with signals.around_init():
            signal.signal(signal.SIGTERM, of_the_library)
            status = Path("/proc/self/status").read_text()
            inherited = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
        assert signal.getsignal(signal.SIGTERM) == ours != before[0]
    for text in (status, inherited):
        assert not (masks(text, "SigBlk") | masks(text, "SigIgn")) & {signal.SIGTERM, signal.SIGUSR1}
    assert signal.signal(signal.SIGTERM, before[0]) == of_the_library
    assert signal.getsignal(signal.SIGUSR1) == before[1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD) and stays(thread)]


def masks(status: str, field: str) -> set[int]:
    """Signal numbers in a mask of /proc/PID/status."""
    [line] = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_signal_while_ray_starts_is_a_stop() -> None:
    """Ray's own handler ends the process with the signal's number as its exit code; another exit is left alone."""

    def of_ray(number: int, frame: object) -> None:
        sys.exit(number)

    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(("SIGTERM",), nothing, grace_s=1) as signals:

        def init() -> None:
            with signals.around_init():
                signal.signal(signal.SIGTERM, of_ray)
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(StopRequested, match="Stopped by SIGTERM while Ray was starting") as stopped:
            init()
        assert (stopped.value.code, stopped.value.step, stopped.value.saved) == (75, None, False)
        assert signal.getsignal(signal.SIGTERM) not in (of_ray, before)
        with pytest.raises(SystemExit) as other, signals.around_init():
            sys.exit(1)
        assert (type(other.value), other.value.code) == (SystemExit, 1)
    signal.signal(signal.SIGTERM, before)


def test_processes_that_ray_starts_can_be_out_of_the_group() -> None:
    """Those that are started with a `preexec_fn`, as Ray does; outside of the context nothing changes."""

    def group_of_a_child() -> int:
        done = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid(), os.getppid(), os.getpgrp())"],
            preexec_fn=lambda: None,
            capture_output=True,
            text=True,
            check=True,
        )
        leads, parent, group = done.stdout.split()
        assert (int(parent), leads == "True") == (os.getpid(), int(group) != os.getpgrp())
        return int(group)

    assert group_of_a_child() == os.getpgrp()
    with own_process_groups():
        assert group_of_a_child() != os.getpgrp()
    assert group_of_a_child() == os.getpgrp()


def stays(thread: threading.Thread) -> bool:
    thread.join(10)
    return thread.is_alive()


def test_no_signal_is_handled_outside_the_main_thread_or_without_names() -> None:
    """Python forbids the one; `stop_signals: []` is the other."""
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def look(names: tuple[str, ...]) -> None:
        with StopSignals(names, nothing, grace_s=1) as signals, signals.around_init():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look, args=(("SIGTERM",),))
    thread.start()
    thread.join()
    look(())
    assert found == [before, before]


def test_stop_requested_passes_handlers_of_failures_and_ends_nothing_as_finished() -> None:
    """A SystemExit: past `except Exception`, through `finally`, with step and exit code."""
    ran: list[str] = []

    def script() -> None:
        try:
            raise StopRequested("stopped", 3, saved=True)
        except Exception:
            ran.append("taken for a failure")
        finally:
            ran.append("finally")
        ran.append("taken for the end")

    with pytest.raises(SystemExit) as caught:
        script()
    assert ran == ["finally"]
    assert isinstance(caught.value, StopRequested)
    assert (caught.value.code, caught.value.step, caught.value.saved) == (75, 3, True)
