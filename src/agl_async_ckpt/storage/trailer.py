"""The trailer: what the end of an input state file says about the file, as bounded JSON.

Reads neither files nor pickles; `container` finds the bytes, this module judges them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from agl_async_ckpt.codec.format import FORMAT_NAME, FORMAT_VERSION
from agl_async_ckpt.exceptions import DamagedStateError, UnsupportedVersionError
from agl_async_ckpt.storage.small_json import Bounds, Count, Format, parse_json

MAX_TRAILER_BYTES = 16 * 1024
MAX_BRANCH_ENTRIES = 256
Branch = Annotated[tuple[tuple[Count, Count], ...], Bounds(0, MAX_BRANCH_ENTRIES)]
"""Which steps belong to the training of a life, as (number, from) pairs; what they mean is for its folder to say."""
BLANK_DIGEST = "0" * 64
DIGEST_END = b'"}'
"""The digest is the last field: it stands at a fixed distance from the end, whatever comes before."""

_Text = Annotated[str, Bounds(0, 1024)]
_DIGEST = re.compile("[0-9a-f]{64}")
_COUNTS = {"num_buffered_inputs", "num_carry_over_groups", "num_carry_over_rollouts", "num_finished_rollouts"}


@dataclass(frozen=True)
class Trailer:
    """What can be known about a file without unpickling it.

    Attributes:
        format_version: Of the file.
        global_step: Optimizer steps done.
        epoch: 1-based.
        exhausted: The loader has handed out the last batch of `epoch`.
        run_id: Of the output folder the file was saved in.
        parent_run_id: Of the run it was forked from.
        counts: `InputState.counts`.
        saved_at: Unix time, seconds.
        written_by: Package name -> version.
        num_zip_bytes: Length of the file before the trailer, bytes.
        branch: Of the life that saved it, as `folder.branch` says; absent in a file where it is empty.
        sha256: Over the whole file, this field blanked; hexadecimal.
    """

    format_version: int
    global_step: Count
    epoch: Annotated[int, Bounds(1, 2**63 - 1)]
    exhausted: bool
    run_id: _Text
    parent_run_id: _Text | None
    counts: Mapping[str, Count]
    saved_at: Annotated[float, Bounds(0, 1e18)]
    written_by: Mapping[str, str]
    num_zip_bytes: Annotated[int, Bounds(22, 2**63 - 1)]
    branch: Branch = ()
    sha256: str = BLANK_DIGEST

    def to_bytes(self) -> bytes:
        """Return the trailer as it stands in the file. ASCII, so it cannot hold a zip signature.

        Raises:
            ValueError: Longer than `MAX_TRAILER_BYTES`.
        """
        fields = {name: value for name, value in vars(self).items() if name != "branch" or value}
        values = {"format": FORMAT_NAME, **fields}
        text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
        if len(text) > MAX_TRAILER_BYTES:
            raise ValueError(f"the trailer would take {len(text)} bytes; {MAX_TRAILER_BYTES} are allowed")
        return text


def is_ours(comment: bytes) -> bool:
    """Tell whether a zip comment is a trailer of this package, perhaps an altered one.

    One altered byte can hide one of the two marks, not both: it must not turn "damaged" into "foreign".
    """
    return FORMAT_NAME.encode() in comment or b'"sha256":"' in comment


def blank(comment: bytes) -> bytes:
    """Return the trailer with its digest blanked, as it was when the digest was taken."""
    end = len(comment) - len(DIGEST_END)
    return comment[: end - len(BLANK_DIGEST)] + BLANK_DIGEST.encode() + comment[end:]


def parse_trailer(comment: bytes, where: str) -> Trailer:
    """Judge the bytes of a trailer, of at most `MAX_TRAILER_BYTES`.

    Args:
        comment: The whole comment.
        where: Path of the file, for the error text.

    Raises:
        DamagedStateError: Altered, or not allowed.
        UnsupportedVersionError: A trailer of another format version.
    """
    try:
        trailer = parse_json(comment.decode("ascii"), Trailer, where, kind=Format(FORMAT_NAME, FORMAT_VERSION))
        if not trailer.counts.keys() >= _COUNTS:
            raise ValueError(f"counts must have {', '.join(sorted(_COUNTS))}")
        if not _DIGEST.fullmatch(trailer.sha256) or not comment.endswith(trailer.sha256.encode() + DIGEST_END):
            raise ValueError("the digest is not its last field")
    except UnsupportedVersionError:
        raise
    except ValueError as error:
        raise DamagedStateError(f"{where} is damaged: its trailer cannot be read ({str(error)[:300]}).") from error
    return trailer
