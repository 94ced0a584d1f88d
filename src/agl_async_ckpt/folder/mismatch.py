"""Whether a checkpoint fits a run: what its inputs come from, there and here, and what a refusal says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.state import Fingerprint

LENGTH = "dataset length"
COLUMNS = "dataset columns"
CONTENT = "dataset content"
_DATASET = {LENGTH, COLUMNS, CONTENT}


@dataclass(frozen=True)
class Difference:
    """One setting that differs between a checkpoint and this run, and why that matters where it need not."""

    name: str
    saved: Any
    current: Any
    reason: str = ""


def differences(saved: Fingerprint, current: Fingerprint) -> list[Difference]:
    """List what keeps the saved position from being exact here.

    A key that one side does not know (another version wrote it, or the rows cannot be compared) is not compared. Rows
    are compared if there are as many with the same columns: otherwise that says it all.
    """
    found = [
        Difference(name, value, current.must_match[name])
        for name, value in saved.must_match.items()
        if name in current.must_match and value != current.must_match[name]
    ]
    if {LENGTH, COLUMNS} & {difference.name for difference in found}:
        return [difference for difference in found if difference.name != CONTENT]
    return found


def mismatch(found: Sequence[Difference], checkpoint: Path, otherwise: str) -> StateMismatchError:
    """Compose the refusal.

    Args:
        found: What differs; at least one.
        checkpoint: That holds the saved values.
        otherwise: The act for who will not go back to the saved values; continues a sentence, and ends it.
    """
    names = ", ".join(difference.name for difference in found)
    verb = "differs" if len(found) == 1 and names != COLUMNS else "differ"
    rows: list[tuple[str, object]] = []
    for difference in found:
        of = f"{difference.name} " if len(found) > 1 else ""
        rows += [
            (f"{of}in checkpoint {checkpoint}", repr(difference.saved)),
            (f"{of}in this run", repr(difference.current)),
            *_notes(difference),
        ]
    fact = f"Input state does not fit this run: {names} {verb}."
    return StateMismatchError(fact, rows, f"Resume with {_wanted(found)}, or {otherwise}")


def _wanted(found: Sequence[Difference]) -> str:
    first = found[0]
    if len(found) == 1 and isinstance(first.saved, bool | int) and first.name != LENGTH:
        return repr(first.saved)
    return "the data set of the saved run" if {one.name for one in found} <= _DATASET else "the saved settings"


def _notes(difference: Difference) -> list[tuple[str, object]]:
    if difference.name == COLUMNS:
        gone, new = (set(difference.saved) - set(difference.current), set(difference.current) - set(difference.saved))
        found = [("only in the checkpoint", gone), ("only in this run", new)]
        return [(where, ", ".join(sorted(columns))) for where, columns in found if columns]
    return [("because", difference.reason)] if difference.reason else []
