"""What every process pays once: the import, the Ray worker hook, and the command that lists a run's steps."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from bench.figures import Figure
from bench.timing import median

NAME = "startup"
TITLE = "processes and commands"

TIMED = """
import json, sys, time
{first}
started = time.process_time()
{act}
print(json.dumps([time.process_time() - started, "torch" in sys.modules]))
"""
IMPORT = "import agl_async_ckpt"
UPSTREAM = "from agentlightning.verl.per_rollout_loss import register_in_worker; register_in_worker()"
OURS = "from agl_async_ckpt.worker import setup; setup()"


def measure(folder: Path, *, quick: bool = False) -> list[Figure]:
    """Measure; `quick` with tiny sizes, for the figures' form and not for their values."""
    repeats, num_steps = (1, 5) if quick else (9, 1000)
    imports = [_timed(IMPORT) for _ in range(repeats)]
    # agent-lightning's hook takes seconds and ours runs it too: ours is timed where it has run already.
    ours = [_timed(OURS, first=UPSTREAM)[0] for _ in range(min(repeats, 3))]
    run = run_folder(folder / "run", num_steps)
    listing = [_inspect(run) for _ in range(repeats)]
    return [
        Figure(NAME, "import agl_async_ckpt", median([seconds for seconds, _ in imports]), "s", 50e-3, "CPU time"),
        Figure(NAME, "torch imported by it", float(any(torch for _, torch in imports)), "times", 0.0),
        Figure(
            NAME,
            "worker hook beyond agent-lightning's",
            median(ours),
            "s",
            60e-3,
            "CPU time, per worker process",
        ),
        Figure(NAME, f"inspect of {num_steps} steps", median(listing), "s", 1.5, "CPU time of the whole command"),
    ]


def run_folder(out: Path, num_steps: int) -> Path:
    """An output folder with saved steps: input state, data.pt, a model file, seal and tracker."""
    from agl_async_ckpt.folder.seal import write_seal
    from agl_async_ckpt.state import Fingerprint, InputState
    from agl_async_ckpt.storage.commit import commit_state
    from agl_async_ckpt.storage.layout import FILE_NAME, LOADER_FILE_NAME, TRACKER_NAME

    out.mkdir(parents=True)
    fsync, os.fsync = os.fsync, lambda fd: None  # a thousand steps that nobody resumes from
    try:
        for step in range(1, num_steps + 1):
            folder = out / f"global_step_{step}"
            commit_state(InputState(step, 1, False, {"position": step}, None, (), None, Fingerprint(), "bench"), folder)
            (folder / "actor").mkdir()
            (folder / "actor" / "model.pt").write_text("weights")
            (folder / LOADER_FILE_NAME).write_bytes(_zip())
            write_seal(folder, use_critic=False, async_save=False)
            assert (folder / FILE_NAME).exists()
    finally:
        os.fsync = fsync
    (out / TRACKER_NAME).write_text(str(num_steps))
    return out


def _zip() -> bytes:
    import io
    import zipfile

    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("data.pkl", b"loader state")
    return content.getvalue()


def _timed(act: str, first: str = "pass") -> tuple[float, bool]:
    code = TIMED.format(first=first, act=act)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    seconds, torch = json.loads(done.stdout.splitlines()[-1])
    return seconds, torch


def _inspect(run: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "agl_async_ckpt", "inspect", str(run)], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
