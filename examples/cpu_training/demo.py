"""Train on CPU with the real agent-lightning, kill the trainer, let it resume, and account for every input."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the package's parent folder takes the place of the script's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from cpu_training.screen import Screen
    from cpu_training.settings import Plan
    from cpu_training.training_run import TrainingRun

REQUIRED = (
    "agentlightning",
    "matplotlib",
    "psutil",
    "ray",
    "rich",
    "torch",
    "torchdata",
    "transformers",
    "verl",
    "wrapt",
)
VERL_VERSION = "0.8.0"

EXAMPLES = """\
examples:
  make demo                                 the extension is on: ends with lost 0, repeated 0
  make demo ARGS=--stock                    the same without it: shows which inputs get lost
  make demo ARGS=--restart-server           agl-server is killed as well, between the two lives
  make demo ARGS="--kills 3 --seed 1"       three kills at random moments: at a start, in rollouts, training or a save
  make demo ARGS=--preempt                  SIGTERM to all its processes: it saves and stops, then goes on
  make demo ARGS="--hook trace"             a hook replaces each trace; the updates must be those of the trainer alone
  make demo ARGS="--steps 12 --kill-after-step 7 --name longer"

exit codes:
  0  the run worked and, unless --stock, lost and repeated nothing
  1  an input was lost or repeated, the audit of the ledger says otherwise, the training did not stop as promised, an
     update trained other rows than the trainer alone (--hook), or the run could not be completed
  2  wrong arguments, or something to install is missing
"""


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. No Exception: nothing on the way may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; adds `plan`."""
    from cpu_training.hook_values import HOOKS
    from cpu_training.settings import SAVE_EVERY, Plan

    parser = argparse.ArgumentParser(
        prog="demo.py", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", action="store_true", help="run with the extension switched off")
    parser.add_argument("--restart-server", action="store_true", help="kill and restart agl-server between the lives")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of the whole run (default: 8)")
    parser.add_argument(
        "--kill-after-step",
        type=int,
        help=f"kill the driver once this step is trained (default: --steps less 3); a checkpoint is saved "
        f"every {SAVE_EVERY} steps",
    )
    parser.add_argument(
        "--kills", type=int, default=1, help="kill it this often; more than one come at random moments (default: 1)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="of the random moments (default: a random one, printed); makes a single kill random too",
    )
    parser.add_argument(
        "--preempt",
        action="store_true",
        help="SIGTERM instead of SIGKILL, to the driver's whole process group, in the middle of a step",
    )
    parser.add_argument(
        "--hook",
        choices=HOOKS,
        help="train with a hook that posts the reward, or one that replaces the trace, and one rollout per input; a "
        "second, uninterrupted run without the extension follows, with whose updates those of the first are compared",
    )
    parser.add_argument("--port", type=int, help="loopback port of agl-server (default: any free one)")
    parser.add_argument(
        "--name",
        help="name of the run folder (default: protected, kills, preempt or stock, and more); replaced if it exists",
    )
    parser.add_argument("--keep-ray-logs", action="store_true", help="keep Ray's own session folder, and say where")
    args = parser.parse_args(argv)
    at_random = args.kills > 1 or args.seed is not None
    if at_random and args.stock:
        parser.error("--kills and --seed are for the protected run: VERL alone cannot resume after a kill in a save.")
    if args.kills < 1:
        parser.error(f"--kills must be 1 or more, got {args.kills}.")
    if args.preempt and (at_random or args.stock):
        parser.error("--preempt is for one stop of the protected run: leave out --kills, --seed and --stock.")
    if at_random and args.kill_after_step is not None:
        parser.error("--kill-after-step is for one kill at a fixed place: leave out --kills and --seed.")
    kill_after = args.kill_after_step if args.kill_after_step is not None else max(SAVE_EVERY, args.steps - 3)
    try:
        args.plan = Plan(
            steps=args.steps,
            kill_after_step=None if at_random else kill_after,
            kills=args.kills,
            seed=args.seed if args.seed is not None else random.SystemRandom().randrange(10**6),
            preempt=args.preempt,
        )
    except ValueError as error:
        parser.error(str(error))
    if args.port is not None and not 0 < args.port < 65536:
        parser.error(f"--port must be from 1 to 65535, got {args.port}.")
    if args.name is None:
        kind = "stock" if args.stock else "kills" if at_random else "preempt" if args.preempt else "protected"
        args.name = kind + ("-restart-server" if args.restart_server else "")
        args.name += f"-{args.hook}-hook" if args.hook else ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", args.name):
        parser.error(f"--name must consist of letters, digits, dots, dashes and underscores, got {args.name!r}.")
    return args


def unfit_environment() -> str | None:
    """What is wrong with the installed packages, or None."""
    if sys.platform != "linux":
        return "The demo needs Linux: it relies on prctl to find and end every process that it has caused."
    if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
        return (
            f"Not installed in {sys.prefix}: {', '.join(missing)}. "
            "Run `make demo`, which installs what it needs first, or `make install`."
        )
    if (verl := importlib.metadata.version("verl")) != VERL_VERSION:
        return (
            f"The CPU shims of this demo are made for VERL {VERL_VERSION}; installed in {sys.prefix} is {verl}. "
            "The extension itself supports both 0.7.1 and 0.8.0."
        )
    return None


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the signals that end a program into `Interrupted`, so that every clean-up runs."""

    from cpu_training.processes import SIGNALS

    def handle(number: int, _frame: FrameType | None) -> None:
        for each in SIGNALS:  # one is enough
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup means to live on
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ray_folder(keep: bool) -> Iterator[Path]:
    """A folder for Ray's session, with a short path: a Unix socket path may have 107 characters."""
    parent = "/tmp" if Path("/tmp").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="agl-demo-", dir=parent))
    try:
        yield folder
    finally:
        if keep:
            print(f"Ray's logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def train(
    args: argparse.Namespace, plan: Plan, *, protected: bool, restart_server: bool, run_dir: Path, screen: Screen
) -> TrainingRun:
    """Do one training; all its processes are gone when it returns."""
    from cpu_training.processes import Processes
    from cpu_training.services import choose_port
    from cpu_training.training_run import TrainingRun

    with ray_folder(args.keep_ray_logs) as ray_dir, Processes() as processes:
        run = TrainingRun(
            plan=plan,
            protected=protected,
            port=choose_port(args.port),
            restart_server=restart_server,
            hook=args.hook,
            run_dir=run_dir,
            ray_dir=ray_dir,
            processes=processes,
            screen=screen,
        )
        try:
            run.run()
        finally:
            screen.say("stopping services, agents and Ray")
    return run


def run_demo(args: argparse.Namespace) -> int:
    """Run and judge; returns the exit code."""
    from cpu_training import audit, rows, verdict
    from cpu_training.recording import EventReader
    from cpu_training.run_folder import fresh_run_folder
    from cpu_training.screen import Screen
    from cpu_training.services import choose_port

    screen = Screen()
    choose_port(args.port)  # a taken one is found before a folder is replaced
    with fresh_run_folder(args.name) as run_dir:
        screen.introduce(args.plan, protected=not args.stock, run_dir=run_dir)
        run = train(
            args,
            args.plan,
            protected=not args.stock,
            restart_server=args.restart_server,
            run_dir=run_dir,
            screen=screen,
        )
        events = EventReader(run_dir).new()
        compared = None
        if args.hook:
            screen.say("the same, uninterrupted and WITHOUT agl-async-ckpt: what the trainer alone trains", "bold")
            alone_dir = run_dir / "alone"
            (alone_dir / "logs").mkdir(parents=True)
            plan = args.plan.uninterrupted()
            train(args, plan, protected=False, restart_server=False, run_dir=alone_dir, screen=screen)
            compared = rows.compare(args.hook, events, EventReader(alone_dir).new())
        lineage = verdict.surviving_steps(events)
        result = verdict.judge(lineage, json.loads(run.stream_file.read_text()))
        audited = audit.of_run(run_dir)
        agrees = audit.agrees(audited, result)
        verdict_file = run_dir / "verdict.json"
        verdict_file.write_text(
            json.dumps(
                {
                    "protected": not args.stock,
                    "restart_server": args.restart_server,
                    "kills": run.kills,
                    "preemption": run.preemption and run.preemption.as_json(),
                    "audit_agrees": agrees,
                    "hook": args.hook,
                    "rows": compared and compared.as_json(),
                    **result.as_json(),
                },
                indent=2,
            )
            + "\n"
        )
        screen.verdict(result, protected=not args.stock)
        problems = run.preemption.problems if run.preemption else []
        if run.preemption:
            screen.preemption(run.preemption)
        if compared:
            screen.rows(compared)
            problems += compared.problems or ([] if compared.holds else ["no rows were compared"])
        screen.say(f"verdict written to {verdict_file}")
        screen.say(f"`agl-async-ckpt audit {audit.checkpoints(run_dir)}` {'agrees' if agrees else 'DISAGREES'}")
        screen.say(f"picture of the stream: {audit.draw(audited, run_dir)}", "bold")
        return 0 if agrees and not problems and (args.stock or result.holds) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    args = parse_arguments(argv)
    if problem := unfit_environment():
        print(problem, file=sys.stderr)
        return 2
    from cpu_training.screen import Screen
    from cpu_training.services import DemoError

    try:
        with signals_raise():
            return run_demo(args)
    except DemoError as error:
        Screen().error(str(error))
        return 1
    except Interrupted as interruption:
        print(f"Stopped by {interruption}; nothing is left running.", file=sys.stderr)
        return interruption.exit_code


if __name__ == "__main__":
    sys.exit(main())
