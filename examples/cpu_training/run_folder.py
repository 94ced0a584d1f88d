"""The folder of one run: `runs/<name>`, replaced when a run of the same name starts again."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from cpu_training.services import DemoError
from cpu_training.settings import RUNS_DIR

MARKER = "made-by-cpu-training-demo"
"""A file that tells a folder of this demo from a user's own."""


@contextlib.contextmanager
def fresh_run_folder(name: str) -> Iterator[Path]:
    """An empty folder for run `name`, locked against a second demo of that name until the block ends.

    Raises:
        DemoError: A demo of that name is running, the folder is somebody else's, or it cannot be written.
    """
    folder = RUNS_DIR / name
    try:
        RUNS_DIR.mkdir(exist_ok=True)
        lock = (RUNS_DIR / f".{name}.lock").open("w")
    except OSError as error:
        raise DemoError(f"{RUNS_DIR} cannot be written: {error.strerror}. Run the demo in a writable clone.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DemoError(f"A demo named {name} is running already. Wait, or choose another --name.") from error
        if folder.exists() and not (folder / MARKER).exists():
            raise DemoError(f"{folder} was not made by this demo and is left alone. Choose another --name.")
        if folder.exists():
            shutil.rmtree(folder)
        for part in (folder, folder / "logs"):
            part.mkdir()
        (folder / MARKER).touch()
        yield folder
