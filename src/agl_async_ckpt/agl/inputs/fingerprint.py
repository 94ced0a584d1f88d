"""What the inputs of a run come from, compared before a saved position is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl import internals
from agl_async_ckpt.agl.inputs.dataset_content import read_content
from agl_async_ckpt.config import SECTION
from agl_async_ckpt.exceptions import StateMismatchError
from agl_async_ckpt.state import Fingerprint, InputState

log = logging.getLogger(__name__)

NUM_WORKERS = "data.dataloader_num_workers"
LOADER_BATCH = "loader batch size"
LENGTH = "dataset length"
COLUMNS = "dataset columns"
CONTENT = "dataset content"


@dataclass(frozen=True)
class Difference:
    """One setting that differs between a checkpoint and this run, and why that matters where it need not."""

    name: str
    saved: Any
    current: Any
    reason: str = ""


def take_fingerprint(trainer: internals.Trainer) -> Fingerprint:
    """Read the fingerprint of this run's dataset, sampler and loader."""
    data = trainer.config.data
    loader = trainer.train_dataloader
    sampler = type(loader.sampler)
    content = read_content(trainer.train_dataset)
    must_match = {
        LENGTH: len(trainer.train_dataset),
        COLUMNS: content.columns,
        CONTENT: content.digest,
        "data.seed": data.get("seed"),
        "data.shuffle": bool(data.get("shuffle")),
        "sampler class": f"{sampler.__module__}.{sampler.__qualname__}",
        "drop_last": bool(loader.drop_last),
    }
    if content.columns is None:
        del must_match[COLUMNS]
    if content.digest is None:
        del must_match[CONTENT]
        log.info("A resume will not notice if rows of the data set have changed: %s.", content.problem)
    return Fingerprint(
        must_match=must_match,
        recorded={
            LOADER_BATCH: int(loader.batch_size),
            "data.train_batch_size": internals.train_batch_size(trainer),
            "async_train_batch_size": internals.async_batch_size(trainer),
            NUM_WORKERS: int(loader.num_workers),
            "rollout.n": internals.group_size(trainer),
        },
    )


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


def explain(found: list[Difference], state: InputState, step_dir: Path) -> StateMismatchError:
    """Compose the refusal: each difference with both values on aligned lines, then the next safe act."""
    names = ", ".join(difference.name for difference in found)
    verb = "differs" if len(found) == 1 and not names.endswith("columns") else "differ"
    lines = [f"Input state does not fit this run: {names} {verb}."]
    labels = (f"in checkpoint {step_dir}:", "in this run:")
    width = max(map(len, labels))
    for difference in found:
        if len(found) > 1:
            lines.append(f" {difference.name}")
        lines += [
            f"  {label:<{width}} {value!r}"
            for label, value in zip(labels, (difference.saved, difference.current), strict=True)
        ]
        lines += [f"  {note}" for note in _notes(difference)]
    if len(found) == 1 and isinstance(found[0].saved, bool | int) and found[0].name != LENGTH:
        wanted = f"Resume with {found[0].saved!r}"
    elif all(difference.name in (LENGTH, COLUMNS, CONTENT) for difference in found):
        wanted = "Resume with the data set of the saved run"
    else:
        wanted = "Resume with the saved settings"
    act = (
        f"{wanted}, or set {SECTION}.on_mismatch=reset to drop the saved position "
        f"({state.num_buffered} buffered, {state.num_in_flight} in flight)."
    )
    return StateMismatchError("\n".join(lines), act=act)


def _notes(difference: Difference) -> list[str]:
    if difference.name == COLUMNS:
        gone, new = (set(difference.saved) - set(difference.current), set(difference.current) - set(difference.saved))
        found = [("only in the checkpoint", gone), ("only in this run", new)]
        return [f"{where}: {', '.join(sorted(columns))}" for where, columns in found if columns]
    return [difference.reason] if difference.reason else []
