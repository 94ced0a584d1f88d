"""A process that has imported the frameworks once, and forks a child for each life.

Importing VERL takes ten seconds; a fork takes a few milliseconds and is a process of its own all the same, in a session
of its own, so that loader workers can be killed with it. `python -m tests.rig.nursery <module>:<function>` names what a
child runs. Requests come as JSON lines on stdin: what that function takes, with `log` and `status`, paths of files. The
pid of the child goes to stdout; its wait status goes to the file once it has ended. At the end of stdin every child is
killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.rig.processes import fork, start_process

Entry = Callable[[dict[str, Any]], None]


class Nursery:
    """Handle of the process; one serves all lives.

    Args:
        folder: Its log goes there.
        entry: `<module>:<function>`, what a child calls with its request.
    """

    def __init__(self, folder: Path, entry: str) -> None:
        self.log = folder / "nursery.log"
        self._process = start_process(
            "-m", "tests.rig.nursery", entry, log=self.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")  # it has ended: nobody waits for an answer any more

    def wait_ready(self) -> None:
        """Wait until the frameworks are imported."""
        answer = self._answers.get(timeout=300)
        assert answer == b"ready\n", self.log.read_text()

    def fork(self, request: dict[str, Any]) -> int:
        """Start a life; its pid."""
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._answers.get(timeout=30))

    def stop(self) -> None:
        """End it, and every child that is left."""
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()


@contextlib.contextmanager
def nursery_of(entry: str, folder: Path) -> Iterator[Nursery]:
    """Start a nursery; once it is ready it serves until the end of the block."""
    nursery = Nursery(folder, entry)
    try:
        nursery.wait_ready()
        yield nursery
    finally:
        nursery.stop()


def preload(entry: str) -> Entry:
    """Import what a life needs; the function that a child runs."""
    import agl_async_ckpt.agl.async_checkpoint_trainer  # noqa: F401
    from tests.rig.life import warm_up
    from tests.rig.standins import _retention_class

    _retention_class()
    module, _, function = entry.partition(":")
    found = getattr(importlib.import_module(module), function)
    warm_up()
    return found


def live(entry: Entry, request: dict[str, Any]) -> None:
    """Run the life, in the child."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request.get("env") or {})
    try:
        entry(request)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()


def main(argument: str) -> None:
    """Fork on demand until stdin ends."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    entry = preload(argument)
    # The answers' own channel: what the frameworks print must not mix in.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    living: dict[int, Path] = {}
    answers.write("ready\n")
    answers.flush()
    buffer = b""
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status_file = living.pop(ended[0])
                temp = status_file.with_suffix(".tmp")
                temp.write_text(str(ended[1]))
                temp.replace(status_file)
        if not select.select([0], [], [], 0.02)[0]:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            request = json.loads(line)
            pid = fork(partial(live, entry, request))
            living[pid] = Path(request["status"])
            answers.write(f"{pid}\n")
            answers.flush()
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
