"""What driver side and workers agree on. Apart from `observer` and others whose import takes the trainer class over."""

from __future__ import annotations

from pathlib import Path

RECORD = "observed.json"
ASK_A_WORKER = "ask_a_worker"
"""As `trainer.experiment_name`: note the policy losses of another worker process too."""
GO = "go"

STAYS_AT = ("updated", 5)
"""Where the first life of a run of `rig_training` stays until it is killed: after an update, before the save."""
STAYING = "staying"
"""The file in the output folder that says so."""
ENDS = "ends.json"
"""The file in the output folder that says how children of a worker ended."""


def record_of(out: Path, number: int) -> Path:
    """Where the `number`-th life in an output folder, from 1, of `rig_training` writes down what happens in it."""
    return out.with_name(f"{out.name}_life_{number}.jsonl")
