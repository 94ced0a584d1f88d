"""Time and memory of a few calls, in a way that a busy machine disturbs least.

Sides that are to be compared take turns within one run, so that a slow minute hits all of them; a ratio is that of
their medians. Where nothing blocks, the CPU time of the process is taken: neighbours do not count in it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Clock = Callable[[], float]


def once(act: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Seconds that one call takes; what it returns is released outside the time."""
    gc.collect()
    started = clock()
    result = act()
    seconds = clock() - started
    del result
    return seconds


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    clock: Clock = time.perf_counter,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Time the sides in turns.

    Args:
        sides: Name -> what to time.
        repeats: Rounds; in each one every side is called once, the order turning by one place per round.
        clock: `time.perf_counter`, or `time.process_time` where nothing blocks.
        before: Called before each call, outside the time.

    Returns:
        Name -> (repeats,) seconds.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            before()
            seconds[name].append(once(sides[name], clock))
    return seconds


def median(seconds: list[float]) -> float:
    """The middle one: a stall of the disk or a neighbour moves it little."""
    return statistics.median(seconds)


def peak_memory(act: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of this process grows at most during a call.

    The kernel's own high-water mark, set back before the call (proc(5), clear_refs): memory that torch or zlib takes is
    in it, which Python's own accounting does not see.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = act()
    peak = _status("VmHWM")
    del result
    return peak - before


def resident() -> int:
    """Resident memory of this process, bytes, once garbage is collected."""
    gc.collect()
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)
