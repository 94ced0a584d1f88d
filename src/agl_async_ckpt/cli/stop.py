"""`stop PATH`: ask the trainer that writes into an output folder to save and stop. The one command that writes."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path
from typing import Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_OK, EXIT_PROBLEMS
from agl_async_ckpt.cli.parsing import add_command
from agl_async_ckpt.cli.target import find_target, is_checkpoint_folder
from agl_async_ckpt.exceptions import UsageError
from agl_async_ckpt.folder.lock import current_holder, locks_work, read_holder
from agl_async_ckpt.folder.steps import TrackerProblem, read_tracker
from agl_async_ckpt.folder.stop_request import StopRequest, read_request, request_stop
from agl_async_ckpt.storage.layout import LOCK_FILE_NAME, STOP_NAME

POLL_S = 0.5

EXAMPLES = """\
examples:
  agl-async-ckpt stop checkpoints/my_run                # leave the request, do not wait
  agl-async-ckpt stop checkpoints/my_run --wait 600     # a Kubernetes preStop hook, a scheduler's epilogue

exit codes:
  0  the request is left; with --wait: the trainer has stopped, or none is there
  1  the trainer was still there after --wait seconds
  2  there is no such folder, no run has begun in it, or it cannot be written
"""


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = add_command(
        subparsers,
        "stop",
        "ask the trainer to save and stop",
        "Ask the trainer that writes into an output folder to finish its step, save it, and stop. The request is a "
        "file in that folder, agentlightning_stop.json; the trainer looks for it at the end of each step, and while a "
        "validation runs. A trainer that starts later ignores it.",
        EXAMPLES,
    )
    parser.add_argument("path", metavar="PATH", help="an output folder, as trainer.default_local_dir")
    parser.add_argument(
        "--wait", metavar="S", type=_seconds, help="return when the trainer has stopped, or after S seconds"
    )


def run(args: argparse.Namespace) -> int:
    """Leave the request, and wait; returns the exit code."""
    target = find_target(args.path)
    if target.kind != "folder":
        raise UsageError(f"{target.path} is no output folder: a trainer is asked to stop in the folder of its run.")
    folder = target.path
    if not is_checkpoint_folder(folder) and not (folder / LOCK_FILE_NAME).exists():
        raise UsageError(f"No run has begun in {folder}.")
    holder = current_holder(folder)  # before it may have been answered
    try:
        request = request_stop(folder, "agl-async-ckpt stop")
    except OSError as error:
        raise UsageError(
            f"The request {folder / STOP_NAME} cannot be left: {error.strerror}.",
            act="Make room or write access in that folder and ask again, or send SIGTERM to a driver that handles it.",
        ) from error
    if holder is not None:
        output.say(f"Asked {holder} to stop after its step, in {folder}.")
    elif locks_work(folder):
        output.say(f"Left a request to stop in {folder}. As far as can be seen from here, no trainer writes there now.")
    else:
        output.say(f"Left a request to stop in {folder}. Whether a trainer writes there, its lock does not tell.")
    if args.wait is None or (holder is None and _locks_tell(folder)):
        return EXIT_OK
    return _wait(folder, request, args.wait)


def _wait(folder: Path, request: StopRequest, wait_s: float) -> int:
    give_up_at = time.monotonic() + wait_s
    while True:
        # In this order: the trainer removes the request before it lets go of the folder.
        answered = read_request(folder) != request
        holder = current_holder(folder)
        if holder is None and (answered or _locks_tell(folder)):
            break
        if time.monotonic() >= give_up_at:
            stays = " The request stays." if not answered else " The request is gone: it has been seen, or removed."
            output.error(f"{_sentence(holder) or 'The trainer'} has not stopped within {wait_s:g} s.{stays}")
            return EXIT_PROBLEMS
        time.sleep(min(POLL_S, max(0.0, give_up_at - time.monotonic())))
    step = read_tracker(folder)
    output.say(f"The trainer has {'stopped' if answered else 'ended'}; {_newest(step)}.")
    return EXIT_OK


def _newest(step: int | TrackerProblem | None) -> str:
    if isinstance(step, TrackerProblem):
        return step.message.rstrip(".")
    return f"step {step} is its newest checkpoint" if step is not None else "it has left no checkpoint"


def _sentence(text: str | None) -> str | None:
    return text and text[0].upper() + text[1:]


def _locks_tell(folder: Path) -> bool:
    """Tell whether a free lock means that no trainer is there: locks work, and the last trainer ran on this host."""
    holder = read_holder(folder)
    return holder is not None and holder.host == socket.gethostname() and locks_work(folder)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value
