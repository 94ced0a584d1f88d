"""The trailer: what the end of an input state file says about the file, as bounded JSON.

Reads neither files nor pickles; `container` finds the bytes, this module judges them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from agl_async_ckpt.codec.format import FORMAT_NAME, FORMAT_VERSION
from agl_async_ckpt.exceptions import DamagedStateError, UnsupportedVersionError
from agl_async_ckpt.storage.branch import Branch, parse_branch

MAX_TRAILER_BYTES = 16 * 1024
BLANK_DIGEST = "0" * 64
DIGEST_END = b'"}'
"""The digest is the last field: it stands at a fixed distance from the end, whatever comes before."""

_MAX_TEXT = 1024
_COUNTS = ("num_buffered_inputs", "num_carry_over_groups", "num_carry_over_rollouts", "num_finished_rollouts")
_MAX_INT = 2**63 - 1


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
        branch: Of the life that saved it, as `storage.branch` says; absent in a file where it is empty.
        num_zip_bytes: Length of the file before the trailer, bytes.
        sha256: Over the whole file, this field blanked; hexadecimal.
    """

    format_version: int
    global_step: int
    epoch: int
    exhausted: bool
    run_id: str
    parent_run_id: str | None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    saved_at: float = 0.0
    written_by: Mapping[str, str] = field(default_factory=dict[str, str])
    branch: Branch = ()
    num_zip_bytes: int = 0
    sha256: str = BLANK_DIGEST

    def to_bytes(self) -> bytes:
        """The trailer as it stands in the file. ASCII, so it cannot hold a zip signature.

        Raises:
            ValueError: Longer than `MAX_TRAILER_BYTES`.
        """
        values = {
            "format": FORMAT_NAME,
            "format_version": self.format_version,
            "global_step": self.global_step,
            "epoch": self.epoch,
            "exhausted": self.exhausted,
            "run_id": self.run_id,
            "parent_run_id": self.parent_run_id,
            "counts": dict(self.counts),
            "saved_at": self.saved_at,
            "written_by": dict(self.written_by),
            **({"branch": self.branch} if self.branch else {}),
            "num_zip_bytes": self.num_zip_bytes,
            "sha256": self.sha256,
        }
        text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
        if len(text) > MAX_TRAILER_BYTES:
            raise ValueError(f"the trailer would take {len(text)} bytes; {MAX_TRAILER_BYTES} are allowed")
        return text


def is_ours(comment: bytes) -> bool:
    """Whether a zip comment is a trailer of this package, perhaps an altered one.

    One altered byte can hide one of the two marks, not both: it must not turn "damaged" into "foreign".
    """
    return FORMAT_NAME.encode() in comment or b'"sha256":"' in comment


def blank(comment: bytes) -> bytes:
    """The trailer with its digest blanked, as it was when the digest was taken."""
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
        parsed: Any = json.loads(
            comment.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_bounded_int
        )
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}"[:300]) from error
    if not isinstance(parsed, dict) or parsed.get("format") != FORMAT_NAME:  # pyright: ignore[reportUnknownMemberType]
        raise _damaged(where, "it names another format")
    fields = _Fields(cast("dict[str, Any]", parsed), where)
    version = fields.integer("format_version", 1)
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(
            f"{where} is of format version {version}; this agl-async-ckpt reads version {FORMAT_VERSION}.",
            act="Use the agl-async-ckpt that wrote it, or resume from a step that this one wrote.",
        )
    digest = fields.text("sha256")
    if not comment.endswith(digest.encode("ascii", "replace") + DIGEST_END) or not _is_digest(digest):
        raise _damaged(where, "the digest is not its last field")
    return Trailer(
        format_version=version,
        global_step=fields.integer("global_step", 0),
        epoch=fields.integer("epoch", 1),
        exhausted=fields.flag("exhausted"),
        run_id=fields.text("run_id"),
        parent_run_id=None if fields.get("parent_run_id") is None else fields.text("parent_run_id"),
        counts=fields.counts("counts"),
        saved_at=fields.seconds("saved_at"),
        written_by=fields.table("written_by", str),
        branch=fields.branch("branch"),
        num_zip_bytes=fields.integer("num_zip_bytes", 22),
        sha256=digest,
    )


class _Fields:
    """Typed access to a parsed trailer. Keys it is not asked for are ignored."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def get(self, name: str) -> Any:
        if name not in self._values:
            raise _damaged(self._where, f"{name} is missing")
        return self._values[name]

    def integer(self, name: str, least: int) -> int:
        value = self.get(name)
        if type(value) is not int or not least <= value <= _MAX_INT:
            raise self._wrong(name, value, f"an integer of at least {least}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if type(value) is not str or len(value) > _MAX_TEXT:
            raise self._wrong(name, value, f"text of at most {_MAX_TEXT} characters")
        return value

    def seconds(self, name: str) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not 0 <= value <= 1e18:
            raise self._wrong(name, value, "a time in seconds")
        return float(value)

    def table(self, name: str, kind: type) -> dict[str, Any]:
        value = self.get(name)
        if type(value) is not dict or any(type(item) is not kind for item in cast("dict[str, Any]", value).values()):
            raise self._wrong(name, cast("object", value), f"an object of {kind.__name__}")
        return cast("dict[str, Any]", value)

    def counts(self, name: str) -> dict[str, int]:
        value = self.table(name, int)
        if any(key not in value for key in _COUNTS) or any(not 0 <= count <= _MAX_INT for count in value.values()):
            raise self._wrong(name, value, f"non-negative counts of {', '.join(_COUNTS)}")
        return value

    def branch(self, name: str) -> Branch:
        try:
            return parse_branch(self._values.get(name, []))
        except ValueError as error:
            raise _damaged(self._where, str(error)) from error

    def _wrong(self, name: str, value: object, expected: str) -> DamagedStateError:
        return _damaged(self._where, f"{name} must be {expected}, got {str(value)[:80]!r}")


def _damaged(where: str, reason: str) -> DamagedStateError:
    return DamagedStateError(f"{where} is damaged: its trailer cannot be read ({reason}).")


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(char in "0123456789abcdef" for char in text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number is too long")
    return int(digits)
