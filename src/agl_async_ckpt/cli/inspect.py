"""`inspect PATH`: one row per step, without torch and without unpickling."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_OK, EXIT_PROBLEMS
from agl_async_ckpt.cli.parsing import add_command
from agl_async_ckpt.cli.target import Target, find_target, is_checkpoint_folder, no_checkpoints, require_input_file
from agl_async_ckpt.exceptions import AsyncCheckpointError, StateFormatError, UsageError
from agl_async_ckpt.folder.judgement import being_saved, is_pruned, must_have_state
from agl_async_ckpt.folder.lock import current_holder
from agl_async_ckpt.folder.run_identity import RunIdentity, read_run
from agl_async_ckpt.folder.steps import StepInfo, TrackerProblem, read_tracker
from agl_async_ckpt.storage.container import verify
from agl_async_ckpt.storage.layout import FILE_NAME, TRACKER_NAME
from agl_async_ckpt.storage.trailer import Trailer

EXAMPLES = """\
examples:
  agl-async-ckpt inspect checkpoints/my_run
  agl-async-ckpt inspect checkpoints/my_run/global_step_40
  agl-async-ckpt inspect checkpoints/my_run --json | jq '.[] | select(.complete and (.abandoned | not)) | .step'

exit codes:
  0  PATH was looked at
  1  PATH names one step or one file, and that is not complete
  2  there is no such path, it cannot be read, or it is no checkpoint
"""
NUMBERS = ("step", "buffered", "groups", "rollouts", "finished", "size", "age")


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = add_command(
        subparsers,
        "inspect",
        "list the steps of an output folder",
        "List the steps of an output folder, one row each: whether a resume can take it, and what it holds. Of a "
        "folder it reads names, sizes and the ends of files; of one step or file every byte. It unpickles nothing, and "
        "needs no torch.",
        EXAMPLES,
    )
    parser.add_argument("path", metavar="PATH", help="an output folder, a step folder, or an input file")
    parser.add_argument("--json", action="store_true", help="write a list of objects, one per step")


def run(args: argparse.Namespace) -> int:
    """List the steps; returns the exit code."""
    target = find_target(args.path)
    if target.kind == "file":
        return _run_file(target, as_json=args.json)
    rows = _step_rows(target)
    if not rows and not is_checkpoint_folder(target.path):
        raise UsageError(no_checkpoints(target.path))
    _write(target, rows, as_json=args.json)
    return EXIT_PROBLEMS if target.kind == "step" and not rows[0][0]["complete"] else EXIT_OK


def _run_file(target: Target, *, as_json: bool) -> int:
    require_input_file(target.path)
    try:
        row = file_row(target.path)
    except StateFormatError as error:
        if not as_json:
            raise
        output.print_json([_row(None, target.path, False, [str(error)], False, None)[0]])
        return EXIT_PROBLEMS
    _write(target, [row], as_json=as_json)
    return EXIT_OK


def _write(target: Target, rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        output.print_json([row for row, _ in rows])
    else:
        _print(target, rows)


Row = tuple[dict[str, Any], "Trailer | None"]


def step_row(info: StepInfo, run: RunIdentity | None, holder: str | None = None) -> Row:
    """Describe a step; `holder` is the process that writes into its output folder now."""
    writer = being_saved(info, holder)
    if writer is not None:
        problems = [f"being saved now, by {writer}"]
    else:
        problems = list(info.problems) if info.has_state else [absence(info, run)]
    return _row(info.step, info.path, info.complete, problems, info.selected, info.trailer, info.abandoned)


def file_row(path: Path) -> Row:
    """Describe an input file that lies in no step folder.

    Raises:
        StateFormatError: It is damaged, or of a newer version.
    """
    trailer = verify(path)
    alone = "it lies in no folder global_step_<N>, so only the file itself was looked at"
    return _row(trailer.global_step, path, False, [alone], False, trailer)


def absence(info: StepInfo, run: RunIdentity | None) -> str:
    """Say why a step has no input state."""
    if must_have_state(info.path, run) and (not is_pruned(info.path) or info.selected):
        return f"{FILE_NAME} is missing, though this run wrote them before"
    if is_pruned(info.path) and not info.selected:
        return "no model and no input position: removed by retention, or never written"
    return "saved without the input position: the extension was not active"


def _row(
    step: int | None,
    path: Path,
    complete: bool,
    problems: list[str],
    selected: bool,
    trailer: Trailer | None,
    abandoned: bool = False,
) -> Row:
    counts = trailer.counts if trailer is not None else {}
    return {
        "step": step,
        "path": str(path),
        "complete": complete,
        "problems": problems,
        "selected": selected,
        "abandoned": abandoned,
        "epoch": trailer and trailer.epoch,
        "exhausted": trailer and trailer.exhausted,
        "buffered_inputs": counts.get("num_buffered_inputs"),
        "carry_over_groups": counts.get("num_carry_over_groups"),
        "carry_over_rollouts": counts.get("num_carry_over_rollouts"),
        "finished_rollouts": counts.get("num_finished_rollouts"),
        "bytes": _size(path),
        "saved_at": trailer and trailer.saved_at,
        "run_id": trailer and trailer.run_id,
        "format_version": trailer and trailer.format_version,
    }, trailer


def _size(path: Path) -> int | None:
    for file in (path / FILE_NAME, path):  # of a step, or the file itself
        try:
            info = os.stat(file)  # noqa: PTH116 - one call per step
        except OSError:
            continue
        return info.st_size if stat.S_ISREG(info.st_mode) else None
    return None


def _step_rows(target: Target) -> list[Row]:
    try:
        run = read_run(target.folder)
    except AsyncCheckpointError as error:
        output.error(f"warning: {error}")
        run = None
    holder = current_holder(target.folder)
    return [step_row(info, run, holder) for info in target.steps(full=True)]


def _print(target: Target, rows: list[Row]) -> None:
    if not rows:
        output.say(no_checkpoints(target.path))
    else:
        now, drawn = time.time(), output.is_terminal(sys.stdout)
        headers = ("step", "epoch", *NUMBERS[1:], "run", "version", "state")
        output.print_table(
            headers,
            [_cells(row, trailer, now, drawn) for row, trailer in rows],
            right=NUMBERS,
            spare=("version", "run", "age", "size", "finished"),
        )
        for row, _ in rows if drawn else ():
            if not row["complete"]:
                output.say(f"Step {row['step']}: {_problems(row)}")
        output.say()
    if target.kind != "file":
        output.say(tracker_text(target.folder))
    for (run_id, versions), steps in _writers(rows).items():
        output.say(f"Run {run_id}, {'step' if len(steps) == 1 else 'steps'} {_ranges(steps)}: written by {versions}.")


def _problems(row: dict[str, Any]) -> str:
    place = str(row["path"])
    name = Path(place).name
    problems = [problem.replace(f"{place}/", "").replace(place, name) for problem in row["problems"]]
    return problems[0] if len(problems) == 1 else "; ".join(problem.rstrip(".") for problem in problems)


def _cells(row: dict[str, Any], trailer: Trailer | None, now: float, drawn: bool) -> list[object]:
    return [
        f"{row['step']}{' *' if row['selected'] else '  '}",
        trailer and f"{trailer.epoch}{' (exhausted)' if trailer.exhausted else ''}",
        row["buffered_inputs"],
        row["carry_over_groups"],
        row["carry_over_rollouts"],
        row["finished_rollouts"],
        output.num_bytes(row["bytes"]),
        trailer and output.duration(now - trailer.saved_at),
        trailer and trailer.run_id[:8],
        trailer and trailer.written_by.get("agl-async-ckpt"),
        # A drawn column would fold a long text into a tower; the texts follow below the table.
        _state(row) if row["complete"] or drawn else _problems(row),
    ]


def _state(row: dict[str, Any]) -> str:
    if not row["complete"]:
        return "incomplete"
    return "complete, abandoned" if row["abandoned"] else "complete"


def tracker_text(folder: Path) -> str:
    """Say which step the tracker selects."""
    tracker = read_tracker(folder)
    if tracker is None:
        return f"There is no {TRACKER_NAME}: no step is selected."
    if isinstance(tracker, TrackerProblem):
        return f"No step is selected: {tracker.message}"
    if not (folder / f"global_step_{tracker}").is_dir():
        return f"{TRACKER_NAME} names step {tracker}, which does not exist."
    return f"* {TRACKER_NAME} names step {tracker}."


def _writers(rows: list[Row]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for row, trailer in rows:
        if trailer is not None:
            versions = ", ".join(f"{name} {version}" for name, version in trailer.written_by.items()) or "unknown"
            found.setdefault((trailer.run_id, versions), []).append(row["step"])
    return found


def _ranges(steps: list[int]) -> str:
    """Name the first and the last; what lies between is left to the table."""
    return ", ".join(map(str, steps)) if len(steps) <= 3 else f"{steps[0]} to {steps[-1]}"
