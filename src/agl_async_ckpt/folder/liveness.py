"""Proof of life: when a trainer of this run was there, on the server's clock.

A rollout that ended after its trainer had died may have met a dead, paused or missing model, and the gateway records
no event for that. So each life of a run keeps the time at which it was last there fresh in the output folder, and a
resume compares the server's times with it. They are the server's own, so two hosts' clocks need not agree: a life
begins with the first rollout that it creates, after its models are registered, and lasts to the last `Date` header. The
header counts whole seconds and may lag behind, so a little good work is run again; never the other way round. A server
that was restarted has forgotten whatever ended before, and perhaps another clock: what was noted goes with it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from agl_async_ckpt.exceptions import DamagedStateError
from agl_async_ckpt.storage.layout import ALIVE_FILE_NAME
from agl_async_ckpt.storage.small_json import read_json

log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
MAX_LIVES = 1000
_MAX_BYTES = 1024 * 1024
DATE_RESOLUTION_S = 1.0


@dataclass(frozen=True)
class Span:
    """A time in which one life of the run was there, Unix seconds on the server's clock."""

    first: float
    last: float

    def holds(self, *times: float) -> bool:
        """Tell whether all of `times` lie in it."""
        return all(self.first <= moment <= self.last for moment in times)


@dataclass(frozen=True)
class Record:
    """What the file holds.

    Attributes:
        run_id: Of the output folder.
        lives: The first and the last time of each life, oldest first.
    """

    run_id: str
    lives: tuple[tuple[float, float], ...]


class ProofOfLife:
    """Keeps this life's span fresh. Not synced to disk: a lost write only makes a resume run more again."""

    def __init__(self, output_dir: Path, run_id: str, is_latest: Callable[[], bool] = lambda: True) -> None:
        """Begin a life.

        Args:
            output_dir: An existing folder.
            run_id: Of that folder; spans of another run are forgotten.
            is_latest: Whether no newer life has begun: its record is not written over.
        """
        self._path = output_dir / ALIVE_FILE_NAME
        # Named like every temp file of ours, so that the next start removes what a kill has left.
        self._temp = self._path.with_name(f".{ALIVE_FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self._run_id = run_id
        self._is_latest = is_latest
        self._earlier = read_lives(output_dir, run_id)[-MAX_LIVES:]
        self._first: float | None = None
        self._seen: str | None = None
        self._written_at = 0.0
        self._failed = False

    @property
    def earlier_lives(self) -> tuple[Span, ...]:
        """The spans of the lives before this one."""
        return self._earlier

    @property
    def has_begun(self) -> bool:
        """Whether the first time of this life is known."""
        return self._first is not None

    def begin(self, server_time: float) -> None:
        """Note the server's time of the first rollout that this life has created: from then on agents find a model."""
        if self._first is None:
            self._first = server_time

    def seen(self, date_header: str | None) -> None:
        """Note that the server answered at `date_header` (RFC 9110 date, GMT)."""
        now = time.monotonic()
        if date_header is None or date_header == self._seen or now - self._written_at < WRITE_EVERY_S:
            return
        try:
            server_time = parsedate_to_datetime(date_header).timestamp()
        except ValueError:
            return
        if not self._is_latest():
            return
        self._seen, self._written_at = date_header, now
        if self._first is None:
            # Nothing was created. The header names the second that has begun: what ended earlier in it may have ended
            # without us.
            self._first = server_time + DATE_RESOLUTION_S
        self._write((*self._earlier, Span(self._first, server_time)))

    def forget(self) -> None:
        """Begin anew: the server is another one, with a clock of its own, and holds nothing of before."""
        if not self._earlier and self._first is None:
            return
        self._earlier, self._first, self._seen = (), None, None
        if self._is_latest():
            self._write(())

    def _write(self, spans: Sequence[Span]) -> None:
        record = Record(self._run_id, tuple((span.first, span.last) for span in spans))
        try:
            self._temp.write_text(json.dumps(asdict(record)))
            self._temp.replace(self._path)
            self._failed = False
        except OSError as error:
            if not self._failed:  # once, not every second
                log.warning("%s cannot be kept fresh (%s): a resume will run more rollouts again.", self._path, error)
            self._failed = True


def read_lives(output_dir: Path, run_id: str) -> tuple[Span, ...]:
    """Read the spans in which a trainer of this run was there; none if unknown, or of another run."""
    try:
        known = read_record(output_dir)
    except DamagedStateError:
        return ()
    return () if known is None or known.run_id != run_id else tuple(Span(*life) for life in known.lives)


def read_record(output_dir: Path) -> Record | None:
    """Read what lies in an output folder; None if there is nothing.

    Raises:
        DamagedStateError: It cannot be read.
    """
    return read_json(output_dir / ALIVE_FILE_NAME, Record, _MAX_BYTES)


def within_one_life(lives: Sequence[Span], *times: float) -> bool:
    """Tell whether all of `times` lie in the same life."""
    return any(span.holds(*times) for span in lives)
