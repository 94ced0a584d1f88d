"""A request to stop, left in the output folder: `agentlightning_stop.json`.

Anybody who can write into the folder can leave one: the command `agl-async-ckpt stop`, a scheduler's epilogue, or
`touch` where Python is not at hand. The trainer looks for it at the ends of steps and in validations, and removes it
once it has stopped.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from agl_async_ckpt.exceptions import DamagedStateError
from agl_async_ckpt.storage.files import publish, remove_files, write_all
from agl_async_ckpt.storage.layout import STOP_NAME
from agl_async_ckpt.storage.small_json import parse_json, read_json

_MAX_BYTES = 4096


@dataclass(frozen=True)
class StopRequest:
    """Who asks a trainer to stop.

    Attributes:
        requested_at: Unix seconds, on the clock of whoever asks.
        by: What asks, for people: a command, or the name of a signal.
        host: Where it runs.
        pid: Its process there.
    """

    requested_at: float
    by: str
    host: str = ""
    pid: int = 0

    @classmethod
    def now(cls, by: str) -> StopRequest:
        """Make a request of this process at this moment."""
        return cls(time.time(), by, socket.gethostname(), os.getpid())

    @classmethod
    def from_json(cls, text: str | bytes) -> StopRequest:
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is not the text of a request.
        """
        return parse_json(text, cls, "a request to stop")

    def to_json(self) -> str:
        """Write one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        return f"{self.by} (process {self.pid} on {self.host})" if self.host else self.by


def request_stop(output_dir: Path, by: str) -> StopRequest:
    """Ask the trainer that writes into an output folder to stop; an earlier request is replaced.

    Raises:
        OSError: The folder cannot be written.
    """
    request = StopRequest.now(by)
    publish(output_dir / STOP_NAME, lambda fd: write_all(fd, request.to_json().encode()))
    return request


def read_request(output_dir: Path) -> StopRequest | None:
    """Read the request in an output folder; None if there is none.

    A file with any other content counts as well, from the time at which it was changed: `touch` is enough.
    """
    path = output_dir / STOP_NAME
    try:
        info = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    try:
        return read_json(path, StopRequest, _MAX_BYTES)
    except DamagedStateError:
        return StopRequest(info.st_mtime, by=f"the file {path}")


def remove_request(output_dir: Path) -> None:
    """Remove the request, if there is one.

    Raises:
        OSError: It cannot be removed.
    """
    remove_files(output_dir, (STOP_NAME,))
