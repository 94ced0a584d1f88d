"""`verify PATH`: everything that a resume would check, for one step or all of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_OK, EXIT_PROBLEMS
from agl_async_ckpt.cli.findings import Finding, Report, verify_file, verify_folder, verify_step
from agl_async_ckpt.cli.parsing import add_command
from agl_async_ckpt.cli.target import find_target, is_checkpoint_folder, no_checkpoints, require_input_file
from agl_async_ckpt.exceptions import UsageError
from agl_async_ckpt.folder.steps import list_steps
from agl_async_ckpt.words import plural

EXAMPLES = """\
examples:
  agl-async-ckpt verify checkpoints/my_run
  agl-async-ckpt verify checkpoints/my_run/global_step_40 && cp -a checkpoints/my_run/global_step_40 archive/
  agl-async-ckpt verify checkpoints/my_run --json | jq '.problems, .steps[].problems'

exit codes:
  0  sound: a resume from each step is exact
  1  there are problems, each with its reason and the next safe act; or the step that PATH names holds nothing to
     resume from, or is being saved
  2  there is no such path, it cannot be read, or it holds no checkpoint
"""


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = add_command(
        subparsers,
        "verify",
        "check everything that a resume would check",
        "Check everything that a resume would check: every byte of the input states against their checksums, the "
        "seals, data.pt, the model files, tracker and run file. Input states are decoded. "
        "Whether the dataset and the settings of a run fit is for its start to say.",
        EXAMPLES,
    )
    parser.add_argument("path", metavar="PATH", help="an output folder (all steps), a step folder, or an input file")
    parser.add_argument("--json", action="store_true", help="write one object")


def run(args: argparse.Namespace) -> int:
    """Verify; returns the exit code."""
    target = find_target(args.path)
    steps = target.steps()
    beside = None
    if target.kind == "file":
        require_input_file(target.path)
        reports = [verify_file(target.path)]
    elif target.kind == "step":
        reports = [verify_step(steps[0], list_steps(target.folder))]
    elif not is_checkpoint_folder(target.path):
        raise UsageError(no_checkpoints(target.path))
    else:
        beside = verify_folder(target.path, steps)
        reports = [verify_step(info, steps) for info in steps]
    sound = all(report.sound for report in (*reports, *([beside] if beside else [])))
    if target.kind == "step":  # a step that is asked for by name, to archive it or to resume from it
        sound = sound and reports[0].position is not None
    if args.json:
        output.print_json(_as_json(target.path, reports, beside, sound))
    else:
        _print(reports, beside)
    return EXIT_OK if sound else EXIT_PROBLEMS


def _print(reports: list[Report], beside: Report | None) -> None:
    for report in reports:
        output.say(f"{report.path}: {_verdict(report)}")
        _print_findings(report)
    if beside is not None:
        output.say(f"{beside.path}: {'tracker and run file sound' if beside.sound else _verdict(beside)}")
        _print_findings(beside)
        num_sound = sum(report.sound and report.position is not None for report in reports)
        num_empty = sum(report.sound and report.position is None for report in reports)
        empty = f", {num_empty} with nothing to resume from" if num_empty else ""
        output.say(f"{plural(len(reports), 'step')}, {num_sound} sound{empty}.")


def _verdict(report: Report) -> str:
    if report.problems:
        return plural(len(report.problems), "problem")
    if report.step is None:
        return "sound"
    if report.position is None:
        return "nothing to resume from"
    position = report.position
    counts = position.counts
    return (
        f"sound (epoch {position.epoch}, {plural(counts['num_buffered_inputs'], 'buffered input')}, "
        f"{plural(counts['num_carry_over_groups'], 'prompt group')} in flight)"
    )


def _print_findings(report: Report) -> None:
    for finding in report.problems:
        output.say(f"  problem: {_located(finding, report.path)}")
        output.say(f"  next:    {_indented(finding.act)}")
    for finding in report.notes:
        output.say(f"  note:    {_located(finding, report.path)}{f'. {finding.act}' if finding.act else ''}")


def _located(finding: Finding, place: Path) -> str:
    """Name the file first, unless it is the place itself or the text names it."""
    text = _indented(finding.reason)
    return text if finding.path == place or str(finding.path) in text else f"{finding.path}: {text}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n           ")


def _as_json(path: Path, reports: list[Report], beside: Report | None, sound: bool) -> dict[str, Any]:
    return {
        "path": str(path),
        "sound": sound,
        "problems": [_finding(finding) for finding in beside.problems] if beside else [],
        "notes": [_finding(finding) for finding in beside.notes] if beside else [],
        "steps": [
            {
                "step": report.step,
                "path": str(report.path),
                "sound": report.sound,
                "decoded": report.decoded,
                "problems": [_finding(finding) for finding in report.problems],
                "notes": [_finding(finding) for finding in report.notes],
            }
            for report in reports
        ],
    }


def _finding(finding: Finding) -> dict[str, str]:
    return {"path": str(finding.path), "reason": finding.reason, "next": finding.act}
