"""What our part of a save adds to the time for which VERL's own save blocks training, in a real run on CPU.

The run is that of `make demo`: agl-server, agl-controller, Ray, VERL's actor worker with FSDP2, agents. Its first
checkpoint is saved several times, with the extension and without, in turns.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import Figure, told
from bench.timed_saves import FILE_VARIABLE, ROUNDS_VARIABLE
from bench.timing import median

NAME = "blocking"
TITLE = "blocking time of a save, in a real run"

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
PATIENCE_S = 420.0


def measure(folder: Path, *, quick: bool = False) -> list[Figure]:
    """Measure; `quick` with few saves: the run itself cannot be made smaller."""
    seconds = timed_saves(folder, rounds=2 if quick else 15)
    stock, ours = median(seconds["without"][1:]), median(seconds["with"][1:])
    sync = median(seconds["model sync"][1:])
    return [
        Figure(NAME, "added to VERL's save", 100 * (ours - stock) / stock, "%", None,
               f"VERL alone {told(stock, 's')}, model of 80,000 parameters"),
        Figure(NAME, "added to VERL's save, time", ours - stock, "s", None, "does not grow with the model but for:"),
        Figure(NAME, "of that, fsync of VERL's model files", sync, "s", None, "grows with the model"),
    ]  # fmt: skip


def timed_saves(folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Run the training up to its first save.

    Returns:
        `with`, `without`, `model sync` -> (rounds,) seconds.

    Raises:
        RuntimeError: It ended before it had saved, or took too long.
    """
    sys.path.insert(0, str(EXAMPLES))
    from cpu_training.processes import Processes
    from cpu_training.services import Services, choose_port, last_lines
    from cpu_training.training_run import child_environment

    (folder / "logs").mkdir(parents=True)
    found = folder / "seconds.json"
    ray_dir = Path(tempfile.mkdtemp(prefix="agl-bench-", dir="/tmp"))  # a socket's path may have 107 characters
    env = child_environment(folder, ray_dir) | {FILE_VARIABLE: str(found), ROUNDS_VARIABLE: str(rounds)}
    env["PYTHONPATH"] += os.pathsep + str(REPOSITORY)  # Ray's workers import the hook that measures
    give_up_at = time.monotonic() + PATIENCE_S
    try:
        with Processes() as processes:
            services = Services(processes, port=choose_port(None), model_dir=folder / "model", run_dir=folder, env=env)
            model = processes.start(
                [sys.executable, "-m", "cpu_training.tiny_model", str(folder / "model")],
                env=env, log=folder / "logs" / "model.log", cwd=folder,
            )  # fmt: skip
            services.start_server(lambda: time.sleep(0.05))
            if model.wait(PATIENCE_S):
                raise RuntimeError(f"no model:\n{last_lines(folder / 'logs' / 'model.log')}")
            services.start_controller()
            log = folder / "logs" / "driver.log"
            driver = processes.start(
                [
                    *(sys.executable, "-m", "cpu_training.train", "--run-dir", str(folder)),
                    *("--server-url", services.url, "--server-key", services.key, "--steps", "5", "--num-inputs", "20"),
                    "trainer.save_freq=1",
                    "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=bench.timed_saves.setup",
                ],
                env=env, log=log, cwd=folder,
            )  # fmt: skip
            while not found.exists():
                services.check()
                if driver.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError(f"The training run has saved nothing:\n{last_lines(log, 20)}")
                time.sleep(0.1)
            return json.loads(found.read_text())
    finally:
        shutil.rmtree(ray_dir, ignore_errors=True)
