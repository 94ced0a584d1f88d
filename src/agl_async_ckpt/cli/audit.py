"""`audit PATH`: what became of every input of a run, over all its lives; the exit code says whether any was lost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_OK, EXIT_PROBLEMS
from agl_async_ckpt.cli.parsing import add_command
from agl_async_ckpt.cli.target import find_target
from agl_async_ckpt.exceptions import CheckpointNotFoundError, UsageError
from agl_async_ckpt.ledger.entry import InputName, position_of
from agl_async_ckpt.words import plural

if TYPE_CHECKING:
    from agl_async_ckpt.ledger.audit import Audit

EXAMPLES = """\
examples:
  agl-async-ckpt audit checkpoints/my_run
  agl-async-ckpt audit checkpoints/my_run --plot stream.png
  agl-async-ckpt audit checkpoints/my_run --json | jq '.problems[].text'

exit codes:
  0  the promise was kept: nothing lost, nothing repeated, nothing skipped
  1  it was not, or the ledger has gaps; each problem is named
  2  there is no ledger at PATH, it cannot be read, or the picture cannot be made
"""
MAX_SHOWN_INPUTS = 12
NUMBERS = (
    "epoch",
    "inputs",
    "once",
    "2 or more",
    "never",
    "lost",
    "dropped",
    "in flight",
    "buffered",
    "left out",
    "not reached",
)


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = add_command(
        subparsers,
        "audit",
        "account for every input of a run, over all its resumes",
        "Follow the ledger of a run over all its lives and say what became of every input: trained once, twice or "
        "never; lost at which resume; and what is no loss: left out by the loader, dropped by the trainer, in flight "
        "or buffered at the end, not reached yet. Works while the run trains.",
        EXAMPLES,
    )
    parser.add_argument(
        "path", metavar="PATH", help="an output folder, or a ledger of one (agentlightning_ledger.jsonl)"
    )
    parser.add_argument("--json", action="store_true", help="write an object with all counts and all inputs by name")
    parser.add_argument("--plot", metavar="FILE", help="draw the stream as a picture: .png, .svg or .html")


def run(args: argparse.Namespace) -> int:
    """Audit the run; returns the exit code."""
    from agl_async_ckpt.ledger.audit import audit

    try:
        if args.plot is not None:  # importing what draws takes longer than an audit
            from agl_async_ckpt.ledger.plot import require_suffix

            require_suffix(Path(args.plot))
        result = audit(find_target(args.path).path)
        if args.plot is not None:
            from agl_async_ckpt.ledger.plot import plot

            plot(result, Path(args.plot))
    except CheckpointNotFoundError as error:
        raise UsageError(error.fact, error.rows, error.act) from None
    if args.json:
        output.print_json(result.as_json())
    else:
        _print(result)
        if args.plot is not None:
            output.say(f"Picture: {args.plot}")
    return EXIT_OK if result.holds else EXIT_PROBLEMS


def _print(result: Audit) -> None:
    output.say(_summary(result))
    output.say()
    output.print_table(NUMBERS, _rows(result), right=NUMBERS, spare=("not reached", "left out", "buffered"))
    output.say()
    for note in result.notes:
        output.say(f"Note: {note}")
    if result.carried_in:
        output.say(f"Note: in flight or buffered where the account begins: {plural(len(result.carried_in), 'input')}.")
    for problem in result.problems:
        output.say(f"Problem: {problem.text}{_named(problem.inputs)}")
    output.say(_verdict(result))


def _verdict(result: Audit) -> str:
    if result.holds and not result.lineage.steps:
        return "Nothing is wrong, and nothing can be told yet: no step is in the ledger."
    if result.holds:
        return "The promise was kept: nothing lost, nothing repeated."
    if result.is_unknown:
        return "Whether the promise was kept cannot be told: the ledger does not account for every step."
    more = f", {plural(result.num_others, 'other problem')}" if result.num_others else ""
    return f"The promise was not kept: {len(result.lost)} lost, {len(result.repeated)} repeated{more}."


def _summary(result: Audit) -> str:
    lineage = result.lineage
    last = lineage.parts[-1].start
    resumed = ", ".join(str(start.step) for start in result.walk.resumes)
    newest = result.ledger.last
    age = "" if newest is None else f", last line {output.duration(time.time() - newest.time)} ago"
    lives = plural(lineage.num_lives, "life", "lives")
    first = result.first.step + 1
    steps = f"steps {first} to {result.last_step}" if result.last_step >= first else "no step is done yet"
    discarded = f"; {plural(lineage.num_discarded, 'step')} thrown away by resumes" if lineage.num_discarded else ""
    return (
        f"{result.ledger.path}\n"
        f"Run {last.run_id}: {steps}, {lives}"
        f"{f', resumed from step {resumed}' if resumed else ''}{discarded}.\n"
        f"{'Training is over' if result.is_finished else 'Training goes on, or was stopped or killed'}{age}."
    )


def _rows(result: Audit) -> list[list[object]]:
    return [
        [
            epoch.epoch,
            epoch.num_inputs,
            epoch.num_trained[1],
            epoch.num_trained[2],
            epoch.num_trained[0],
            len(epoch.lost),
            len(epoch.dropped_by_trainer),
            len(epoch.in_flight),
            len(epoch.buffered),
            epoch.num_left_out,
            epoch.num_not_drawn,
        ]
        for epoch in result.epochs
    ]


def _named(names: Sequence[InputName]) -> str:
    """Name the first inputs by dataset position, or by digest where the dataset does not know it."""
    if not names:
        return ""
    more = ", …" if len(names) > MAX_SHOWN_INPUTS else ""
    positions = [position_of(name) for name in names[:MAX_SHOWN_INPUTS]]
    if None in positions:
        return f" Inputs: {', '.join(names[:MAX_SHOWN_INPUTS])}{more}"
    return f" Dataset rows: {', '.join(map(str, positions))}{more}"
