"""The same question put to the ledger: `agl-async-ckpt audit` must name the inputs that the verdict names."""

from __future__ import annotations

from pathlib import Path

from agl_async_ckpt.ledger.audit import Audit
from agl_async_ckpt.ledger.audit import audit as audit_folder
from agl_async_ckpt.ledger.entry import position_of
from agl_async_ckpt.ledger.plot import plot
from cpu_training.verdict import Verdict


def checkpoints(run_dir: Path) -> Path:
    """The output folder of the trainer."""
    return run_dir / "checkpoints"


def of_run(run_dir: Path) -> Audit:
    """Audit a run of the demo."""
    return audit_folder(checkpoints(run_dir))


def agrees(audited: Audit, verdict: Verdict) -> bool:
    """Whether ledger and recorder, which know nothing of each other, name the same inputs."""
    lost = sorted(position_of(name) or 0 for name in audited.lost)
    repeated = sorted(position_of(name) or 0 for name in audited.repeated)
    return (audited.holds, lost, repeated) == (verdict.holds, verdict.lost, verdict.repeated)


def draw(audited: Audit, run_dir: Path) -> Path:
    """Draw the stream into the run folder; returns the picture."""
    path = run_dir / "stream.png"
    plot(audited, path)
    return path
