"""What the inputs of a run come from, compared before a saved position is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_async_ckpt import capture
from agl_async_ckpt.config import SECTION
from agl_async_ckpt.state import Fingerprint, InputState

NUM_WORKERS = "data.dataloader_num_workers"


@dataclass(frozen=True)
class Difference:
    """One setting that differs between a checkpoint and this run."""

    name: str
    saved: Any
    current: Any


def take_fingerprint(trainer: Any) -> Fingerprint:
    """Read the fingerprint of this run's dataset, sampler and loader."""
    data = trainer.config.data
    loader = trainer.train_dataloader
    sampler = type(loader.sampler)
    return Fingerprint(
        must_match={
            "dataset length": len(trainer.train_dataset),
            "dataset columns": sorted(str(column) for column in trainer.train_dataset[0]),
            "data.seed": data.get("seed"),
            "data.shuffle": bool(data.get("shuffle")),
            "sampler class": f"{sampler.__module__}.{sampler.__qualname__}",
            "drop_last": bool(loader.drop_last),
        },
        recorded={
            "loader batch size": int(loader.batch_size),
            "data.train_batch_size": int(data.train_batch_size),
            "async_train_batch_size": capture.async_batch_size(trainer),
            NUM_WORKERS: int(loader.num_workers),
            "rollout.n": int(trainer.config.actor_rollout_ref.rollout.n),
        },
    )


def differences(saved: Fingerprint, current: Fingerprint) -> list[Difference]:
    """List what keeps the saved position from being exact here.

    A key that one side does not know (another version wrote it) is not compared. The number of loader workers counts:
    torchdata's state of n workers opens with n workers only.
    """
    pairs = [
        (name, value, current.must_match[name])
        for name, value in saved.must_match.items()
        if name in current.must_match
    ]
    if NUM_WORKERS in saved.recorded and NUM_WORKERS in current.recorded:
        pairs.append((NUM_WORKERS, saved.recorded[NUM_WORKERS], current.recorded[NUM_WORKERS]))
    return [Difference(name, was, now) for name, was, now in pairs if was != now]


def explain(found: list[Difference], state: InputState, step_dir: Path) -> str:
    """Compose the refusal: each difference with both values on aligned lines, then the next safe act."""
    names = ", ".join(difference.name for difference in found)
    verb = "differs" if len(found) == 1 else "differ"
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
    if len(found) == 1 and isinstance(found[0].saved, bool | int):
        wanted = f"Resume with {found[0].saved!r}"
    else:
        wanted = "Resume with the saved settings"
    lines.append(
        f"{wanted}, or set {SECTION}.on_mismatch=reset to drop the saved position "
        f"({state.num_buffered} buffered, {state.num_in_flight} in flight)."
    )
    return "\n".join(lines)
