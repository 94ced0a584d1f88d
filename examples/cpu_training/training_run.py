"""One run: services up, train, kill the driver, resume, finish. The checks that keep it from hanging are here too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cpu_training.processes import Processes
from cpu_training.recording import EventReader
from cpu_training.screen import Screen
from cpu_training.services import DemoError, Services, last_lines
from cpu_training.settings import EXAMPLES_DIR, LIFE_VARIABLE, REPO_DIR, RUN_DIR_VARIABLE, Plan
from cpu_training.verdict import StepBuilder

TICK_S = 0.2
PATIENCE_S = 300.0
"""Longest time without an event from the trainer; a start takes about a minute on two cores, a step some seconds."""

RAY_END_WAIT_S = 4.0
"""How long Ray's processes may take to notice that their driver is dead: workers need 2 s, Ray's own agents 10 s."""

Event = Mapping[str, Any]


def child_environment(run_dir: Path, ray_dir: Path) -> dict[str, str]:
    """The environment of all processes of the run: offline, loopback only, without settings of a real cluster."""
    dropped = ("RAY_", "AGL_", "VERL_", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]))
    return inherited | {
        # Agents and Ray workers import this package by name, and the clone's own agl_async_ckpt.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES_DIR), str(REPO_DIR), os.environ.get("PYTHONPATH")])),
        RUN_DIR_VARIABLE: str(run_dir),
        LIFE_VARIABLE: "1",
        "RAY_TMPDIR": str(ray_dir),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
    }


class TrainingRun:
    """Everything that happens between the first process and the last step."""

    def __init__(
        self,
        *,
        plan: Plan,
        protected: bool,
        port: int,
        restart_server: bool,
        run_dir: Path,
        ray_dir: Path,
        processes: Processes,
        screen: Screen,
    ) -> None:
        self._plan = plan
        self._protected = protected
        self._restart_server = restart_server
        self._run_dir = run_dir
        self._processes = processes
        self._screen = screen
        self._env = child_environment(run_dir, ray_dir)
        self._services = Services(processes, port=port, model_dir=run_dir / "model", run_dir=run_dir, env=self._env)
        self._reader = EventReader(run_dir)
        self._steps = StepBuilder()
        self._restored_shown = False

    @property
    def stream_file(self) -> Path:
        """The uninterrupted pull order, as JSON."""
        return self._run_dir / "uninterrupted.json"

    def run(self) -> None:
        """Do it all; returns when the run has finished its last step.

        Raises:
            DemoError: A process failed or nothing happened for too long.
        """
        self._prepare()
        self._first_life()
        if self._restart_server:
            self._screen.say("killing agl-server with SIGKILL and starting it again: it forgets all rollouts")
            self._services.kill_server()
            self._services.start_server(self._tick)
        self._second_life()

    def _prepare(self) -> None:
        plan = self._plan
        with self._screen.waiting("building a tiny model, reading the uninterrupted stream, starting agl-server"):
            model = self._tool("tiny_model", str(self._run_dir / "model"))
            stream = self._tool("uninterrupted", str(plan.num_inputs), str(self.stream_file))
            self._services.start_server(self._tick)
            for process, log in (model, stream):
                while process.poll() is None:
                    self._tick()
                if process.returncode != 0:
                    raise DemoError(f"A preparation failed. Its log is {log}; it ends with\n{last_lines(log)}")
        self._services.start_controller()
        self._screen.say(f"agl-server ready at {self._services.url}, agl-controller started (local mode)")

    def _first_life(self) -> None:
        plan = self._plan
        killed_in = plan.kill_after_step + 1
        driver, log = self._start_driver(1)
        self._follow(driver, log, lambda event: event["event"] == "pulled" and event["step"] == killed_in)
        # The pull is recorded just before its rollouts are posted: let them get under way, so that they are orphaned.
        time.sleep(1.0)
        self._screen.say(f"killing the training driver (pid {driver.pid}) with SIGKILL in step {killed_in}", "bold red")
        self._processes.kill_and_sweep(driver, spare=self._services.pids, patience_s=RAY_END_WAIT_S)
        self._screen.say("the driver is dead and its Ray processes are gone; services and agents live on")
        for event in self._reader.new():  # a step that it finished while dying
            self._show(event)

    def _second_life(self) -> None:
        driver, log = self._start_driver(2)
        # Its training call has returned then. Ray takes 10 s more to shut down; it is stopped with all the rest.
        self._follow(driver, log, lambda event: event["event"] == "finished")

    def _start_driver(self, life: int) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._run_dir / "logs" / f"driver-{life}.log"
        command = [
            *(sys.executable, "-m", "cpu_training.train"),
            *("--run-dir", str(self._run_dir)),
            *("--server-url", self._services.url, "--server-key", self._services.key),
            *("--steps", str(self._plan.steps), "--num-inputs", str(self._plan.num_inputs)),
            # Off, VERL's checkpoints stay as they are: the extension then only writes the ledger.
            f"agentlightning.async_checkpoint.enabled={str(self._protected).lower()}",
        ]
        what = "starting the training driver" if life == 1 else "starting it again with resume_mode=auto"
        self._screen.say(f"{what} (life {life}; up to a minute until its first step; log: {log})", "bold")
        env = self._env | {LIFE_VARIABLE: str(life)}
        return self._processes.start(command, env=env, log=log, cwd=self._run_dir), log

    def _tool(self, module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._run_dir / "logs" / f"{module}.log"
        command = [sys.executable, "-m", f"cpu_training.{module}", *arguments]
        return self._processes.start(command, env=self._env, log=log, cwd=self._run_dir), log

    def _follow(self, driver: subprocess.Popen[bytes], log: Path, until: Callable[[Event], bool]) -> None:
        """Show what happens until an event satisfies `until`."""
        last_event = time.monotonic()
        with self._screen.spinner():
            while True:
                ended = driver.poll() is not None  # before reading: what it wrote last must be seen
                events = self._reader.new()
                for event in events:
                    self._show(event)
                    if until(event):
                        return
                if ended:
                    raise DemoError(self._driver_failed(driver, log))
                if events:
                    last_event = time.monotonic()
                elif time.monotonic() - last_event > PATIENCE_S:
                    raise DemoError(f"The trainer did nothing for {PATIENCE_S:.0f} s. Its log is {log}.")
                self._tick()

    def _show(self, event: Event) -> None:
        match event["event"]:
            case "trainer_imported":
                self._screen.say("Ray is up, the trainer is loaded")
            case "workers_starting":
                self._screen.say("starting the actor worker (FSDP2 on gloo) and the chat server")
            case "loaded" if event["step"]:
                self._screen.say(f"resumed from the checkpoint of step {event['step']}", "bold")
            case "loaded":
                self._screen.say("no checkpoint yet: training from scratch")
            case "saved":
                self._screen.say(f"checkpoint of step {event['step']} saved")
        if step := self._steps.add(event):
            self._screen.step(step)
            if event["resume"].get("num_restored_groups") and not self._restored_shown:
                # The trainer repeats the counts of the last resume at every step.
                self._screen.restored(event["resume"])
                self._restored_shown = True

    def _driver_failed(self, driver: subprocess.Popen[bytes], log: Path) -> str:
        return (
            f"The training driver ended unexpectedly with exit code {driver.returncode}. "
            f"Its log is {log}; it ends with\n{last_lines(log, 15)}"
        )

    def _tick(self) -> None:
        self._services.check()
        time.sleep(TICK_S)
