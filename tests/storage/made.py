"""Files of the format with little in them, made without torch."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.storage.trailer import Trailer
from agl_async_ckpt.storage.writer import TrailerWriter

COUNTS = {
    "num_buffered_inputs": 1,
    "num_carry_over_groups": 2,
    "num_carry_over_rollouts": 4,
    "num_finished_rollouts": 1,
}


def archive(content: bytes = b"x" * 300, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file laid out as torch lays it out."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as zipped:
        zipped.writestr("archive/data.pkl", content)
        zipped.writestr("archive/version", b"3\n")
    return file.getvalue()


def trailer(num_zip_bytes: int) -> Trailer:
    return Trailer(
        format_version=FORMAT_VERSION,
        global_step=7,
        epoch=2,
        exhausted=True,
        run_id="run-1",
        parent_run_id=None,
        counts=COUNTS,
        saved_at=1700000000.5,
        written_by={"agl-async-ckpt": "0.1.0"},
        num_zip_bytes=num_zip_bytes,
    )


def write(path: Path, content: bytes | None = None) -> Path:
    """Write a file of this format with the real writer."""
    with path.open("wb") as file, TrailerWriter(file.fileno()) as writer:
        writer.write(archive() if content is None else content)
        writer.finish(trailer)
    return path
