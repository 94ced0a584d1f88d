"""Proof of life: the last instant, on the server's clock, at which the trainer was there.

A rollout that ended after its trainer had died may have met a dead, paused or missing model, and the gateway records
no event for that. So the trainer keeps a time fresh in the output folder, and a resume compares the server's end times
with it. The time is taken from the server's own `Date` header: two hosts' clocks need not agree. The header counts
whole seconds, so up to a second of good work is run again; never the other way round.
"""

from __future__ import annotations

import json
import logging
import os
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE_NAME = "agentlightning_alive.json"
WRITE_EVERY_S = 1.0


class ProofOfLife:
    """Keeps the file fresh. Not synced to disk: a lost write only makes a resume run more again."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._path = output_dir / FILE_NAME
        self._run_id = run_id
        self._seen: str | None = None
        self._written_at = 0.0

    def seen(self, date_header: str | None) -> None:
        """Note that the server answered at `date_header` (RFC 9110 date, GMT)."""
        now = time.monotonic()
        if date_header is None or date_header == self._seen or now - self._written_at < WRITE_EVERY_S:
            return
        try:
            server_time = parsedate_to_datetime(date_header).timestamp()
        except ValueError:
            return
        self._seen, self._written_at = date_header, now
        temp = self._path.with_name(f".{FILE_NAME}.{os.getpid()}.tmp")
        try:
            temp.write_text(json.dumps({"run_id": self._run_id, "server_time": server_time}))
            temp.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be kept fresh (%s): a resume will run more rollouts again.", self._path, error)


def last_proof(output_dir: Path, run_id: str) -> float | None:
    """Read the last time at which a trainer of this run was there.

    Returns:
        Unix seconds on the server's clock; None if unknown, or of another run.
    """
    try:
        values: Any = json.loads((output_dir / FILE_NAME).read_bytes())
        return float(values["server_time"]) if values["run_id"] == run_id else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
