"""One run: services up, train, kill the driver and resume, once or several times, finish.

The checks that keep it from hanging are here too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from cpu_training.audit import checkpoints
from cpu_training.moments import USUAL_S, Life, Moment, draw
from cpu_training.preemption import Preemption, look
from cpu_training.processes import Processes
from cpu_training.recording import EventReader
from cpu_training.screen import Screen
from cpu_training.services import DemoError, Services, last_lines
from cpu_training.settings import EXAMPLES_DIR, LIFE_VARIABLE, RUN_DIR_VARIABLE, Plan
from cpu_training.verdict import StepBuilder

TICK_S = 0.01
"""A save takes a fifth of a second, and some kills have to hit it."""
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
        # Agents and Ray workers import the example by name.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES_DIR), os.environ.get("PYTHONPATH")])),
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
        hook: str | None,
        run_dir: Path,
        ray_dir: Path,
        processes: Processes,
        screen: Screen,
    ) -> None:
        self._plan = plan
        self._protected = protected
        self._restart_server = restart_server
        self._hook = hook
        self._run_dir = run_dir
        self._processes = processes
        self._screen = screen
        self._env = child_environment(run_dir, ray_dir)
        self._services = Services(processes, port=port, model_dir=run_dir / "model", run_dir=run_dir, env=self._env)
        self._reader = EventReader(run_dir)
        self._unseen: deque[Event] = deque()
        self._steps = StepBuilder()
        self._restored_shown = False
        self._usual_s = dict(USUAL_S)
        self.kills: list[dict[str, Any]] = []
        """Where each kill has hit, for the verdict file."""
        self.preemption: Preemption | None = None
        """How the first life stopped, if it was asked to."""

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
        plan = self._plan
        moments = draw(plan.kills, plan.steps, plan.seed) if plan.kill_after_step is None else [None]
        for life, moment in enumerate(moments, 1):
            if plan.preempt:
                self._life_to_stop(life)
            else:
                self._life_to_kill(life, moment)
            if self._restart_server:
                self._screen.say("killing agl-server with SIGKILL and starting it again: it forgets all rollouts")
                self._services.kill_server()
                self._services.start_server(self._tick)
        driver, log = self._start_driver(len(moments) + 1)
        # Its training call has returned then. Ray takes 10 s more to shut down; it is stopped with all the rest.
        self._follow(driver, log, lambda event: event["event"] == "finished")

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

    def _life_to_kill(self, number: int, moment: Moment | None) -> None:
        """Start the driver and kill it at `moment`, or where the plan says."""
        driver, log = self._start_driver(number)
        life = Life(time.time(), self._usual_s)
        trainer: psutil.Process | None = None

        def due() -> float | None:
            return life.due(moment, self._plan.steps) if moment else self._due_as_planned(life)

        def reached(event: Event) -> bool:
            nonlocal trainer
            life.add(event)
            if event["event"] == "loaded" and moment:
                trainer = psutil.Process(event["pid"])
            return due() is not None

        if due() is None:
            self._follow(driver, log, until=reached)
        time.sleep(max(0.0, (due() or 0.0) - time.time()))
        if driver.poll() is not None:
            raise DemoError(self._driver_failed(driver, log))
        self._screen.say(f"killing the training driver (pid {driver.pid}) with SIGKILL", "bold red")
        killed = time.time()
        # At a random moment all its Ray processes are killed with it, as when a container ends: Ray's own way takes
        # seconds in which the trainer goes on. To find them takes long enough for a save, so the trainer goes first.
        patience_s = 0.0 if moment else RAY_END_WAIT_S
        self._processes.kill_and_sweep(driver, first=trainer, spare=self._services.pids, patience_s=patience_s)
        self._unseen += self._reader.new()
        while self._unseen:  # what happened since it was due, and while dying
            life.add(self._unseen[0])
            self._show(self._unseen.popleft())
        end = life.end(killed)
        self.kills.append({"life": number, **end})
        self._screen.say(
            f"kill {number} of {self._plan.kills} hit {end['hit']}, {end['seconds_after_start']} s after the start of "
            "this life; its Ray processes are gone, services and agents live on",
            "bold",
        )

    def _life_to_stop(self, number: int) -> None:
        """Start the driver and send its process group a SIGTERM in the middle of the planned step; wait for its end."""
        step = self._plan.kill_after_step or 0
        events: list[Event] = []
        driver, log = self._start_driver(number)

        def reached(event: Event) -> bool:
            events.append(event)
            return (event["event"], event.get("step", 0)) == ("pulled", step)

        self._follow(driver, log, until=reached)
        time.sleep(1.0)  # its rollouts get under way
        self._screen.say(f"SIGTERM to the process group of the training driver (pid {driver.pid})", "bold red")
        signalled = time.time()
        os.killpg(driver.pid, signal.SIGTERM)
        self._follow(driver, log, until=lambda event: bool(events.append(event)), ends=True)
        ended = time.time()
        self.preemption = look(
            events,
            step=step,
            signalled=signalled,
            ended=ended,
            exit_code=driver.returncode,
            output_dir=checkpoints(self._run_dir),
            rollouts_left=self._services.num_rollouts(),
        )
        self._screen.say(str(self.preemption), "bold")
        self._processes.kill_and_sweep(driver, spare=self._services.pids, patience_s=RAY_END_WAIT_S)

    def _due_as_planned(self, life: Life) -> float | None:
        # The pull is recorded just before its rollouts are posted: let them get under way, so that they are orphaned.
        killed_in = (self._plan.kill_after_step or 0) + 1
        return life.time + 1.0 if (life.event, life.step) == ("pulled", killed_in) else None

    def _start_driver(self, life: int) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._run_dir / "logs" / f"driver-{life}.log"
        command = [
            *(sys.executable, "-m", "cpu_training.train"),
            *("--run-dir", str(self._run_dir)),
            *("--server-url", self._services.url, "--server-key", self._services.key),
            *("--steps", str(self._plan.steps), "--num-inputs", str(self._plan.num_inputs)),
            # Off, VERL's checkpoints stay as they are: the extension then only writes the ledger.
            f"agentlightning.async_checkpoint.enabled={str(self._protected).lower()}",
            # The whole process group is signalled: Ray has to be outside of it.
            *(["--stoppable", "agentlightning.async_checkpoint.shield_ray=true"] if self._plan.preempt else []),
            *(["--hook", self._hook] if self._hook else []),
        ]
        what = "starting the training driver" if life == 1 else "starting it again with resume_mode=auto"
        self._screen.say(f"{what} (life {life}; up to a minute until its first step; log: {log})", "bold")
        env = self._env | {LIFE_VARIABLE: str(life)}
        self._restored_shown = False
        return self._processes.start(command, env=env, log=log, cwd=self._run_dir), log

    def _tool(self, module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._run_dir / "logs" / f"{module}.log"
        command = [sys.executable, "-m", f"cpu_training.{module}", *arguments]
        return self._processes.start(command, env=self._env, log=log, cwd=self._run_dir), log

    def _follow(
        self, driver: subprocess.Popen[bytes], log: Path, until: Callable[[Event], bool], *, ends: bool = False
    ) -> None:
        """Show what happens until an event satisfies `until`, or, with `ends`, until the driver ends by itself."""
        last_event = time.monotonic()
        with self._screen.spinner():
            while True:
                ended = driver.poll() is not None  # before reading: what it wrote last must be seen
                self._unseen += self._reader.new()
                if self._unseen:
                    last_event = time.monotonic()
                while self._unseen:
                    event = self._unseen.popleft()
                    self._show(event)
                    if until(event):
                        return
                if ended and ends:
                    return
                if ended:
                    raise DemoError(self._driver_failed(driver, log))
                if time.monotonic() - last_event > PATIENCE_S:
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
