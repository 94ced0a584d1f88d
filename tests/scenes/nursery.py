"""A process that has imported the frameworks once, and forks a trainer for each life of each scene.

Importing VERL takes ten seconds; a fork takes a few milliseconds and is a process of its own all the same. Requests
come as JSON lines on stdin: what `run_life` takes, with `log` and `status`, paths of files. The pid of the child goes
to stdout; its wait status goes to the file once it has ended. At the end of stdin every child is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def preload() -> None:
    """Import what a life needs."""
    import verl.single_controller.ray
    import verl.trainer.main_ppo  # noqa: F401

    import agl_async_ckpt.trainer
    from tests.rig.settings import _base_config
    from tests.rig.standins import _retention_class
    from tests.scenes import trainer  # noqa: F401

    assert agl_async_ckpt.trainer.AsyncCheckpointTrainer
    _base_config()
    _retention_class()


def live(request: dict[str, Any]) -> None:
    """In the child: run the life; never returns."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(request.get("env") or {})
        from tests.scenes.trainer import run_life

        run_life(request)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Fork on demand until stdin ends."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    preload()
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
            pid = os.fork()
            if pid == 0:
                live(request)
            living[pid] = Path(request["status"])
            answers.write(f"{pid}\n")
            answers.flush()
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
