"""`plan PATH`: what a start with `resume_mode=auto` would do from here, and why. Changes nothing."""

from __future__ import annotations

import argparse
from typing import Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_OK, EXIT_PROBLEMS
from agl_async_ckpt.cli.parsing import add_command
from agl_async_ckpt.cli.target import Target, find_target
from agl_async_ckpt.exceptions import UsageError
from agl_async_ckpt.folder.plan import ResumePlan, plan_explicit, plan_latest

EXAMPLES = """\
examples:
  agl-async-ckpt plan checkpoints/my_run                    # trainer.resume_mode=auto
  agl-async-ckpt plan checkpoints/my_run/global_step_40     # trainer.resume_mode=resume_path
  agl-async-ckpt plan checkpoints/my_run --json | jq -r .action

exit codes:
  0  a start goes on: it resumes, or trains from scratch
  1  a start is refused; the text is its error
  2  there is no such path, or it cannot be read
"""


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = add_command(
        subparsers,
        "plan",
        "say what a start would resume from, and why",
        "Say what an asynchronous run with this extension would do if it started now: which step it takes and why, "
        "what it restores, whether it repairs the tracker, or with which error it refuses. The texts are those of its "
        "log. Nothing is changed.",
        EXAMPLES,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="an output folder, as trainer.default_local_dir with resume_mode=auto; or a step folder, as "
        "trainer.resume_from_path with resume_mode=resume_path",
    )
    parser.add_argument("--json", action="store_true", help="write one object")


def run(args: argparse.Namespace) -> int:
    """Plan; returns the exit code."""
    target = find_target(args.path)
    if target.kind == "file":
        raise UsageError(f"{target.path} is a file; a start resumes from an output folder, or from a step folder.")
    plan = plan_latest(target.path) if target.kind == "folder" else plan_explicit(target.path)
    if args.json:
        output.print_json(_as_json(target, plan))
    else:
        _print(target, plan)
    return EXIT_PROBLEMS if plan.action == "refuse" else EXIT_OK


def mode(target: Target) -> str:
    """Return the `trainer.resume_mode` that PATH stands for."""
    return "auto" if target.kind == "folder" else "resume_path"


def _print(target: Target, plan: ResumePlan) -> None:
    setting = "default_local_dir" if target.kind == "folder" else "resume_from_path"
    output.say(f"With trainer.resume_mode={mode(target)} and trainer.{setting}={target.path}:")
    for warning in plan.warnings:
        output.say(f"warning: {warning}")
    output.say(f"{'refused: ' if plan.action == 'refuse' else ''}{plan.text}")
    for note in plan.notes:
        output.say(f"note: {note}")


def _as_json(target: Target, plan: ResumePlan) -> dict[str, Any]:
    position = plan.position
    return {
        "path": str(target.path),
        "resume_mode": mode(target),
        "action": plan.action,
        "step": position and position.global_step,
        "step_path": plan.step_dir and str(plan.step_dir),
        "repairs_tracker": plan.repairs_tracker,
        "text": plan.text,
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }
