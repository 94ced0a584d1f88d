"""`show PATH`: what one input state holds, for a person."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_OK
from agl_async_ckpt.cli.parsing import add_command
from agl_async_ckpt.cli.show_text import DEFAULT_COLUMNS, age_s, batch_row, print_state
from agl_async_ckpt.cli.target import Target, find_target, is_checkpoint_folder, no_checkpoints
from agl_async_ckpt.cli.values import plain
from agl_async_ckpt.codec.loader_state import rows_yielded
from agl_async_ckpt.exceptions import MissingStateError, UsageError
from agl_async_ckpt.folder.decision import decide_latest
from agl_async_ckpt.folder.judgement import has_state
from agl_async_ckpt.state import Batch, InputState, PromptGroup
from agl_async_ckpt.storage.container import read_trailer
from agl_async_ckpt.storage.layout import FILE_NAME
from agl_async_ckpt.storage.trailer import Trailer

EXAMPLES = """\
examples:
  agl-async-ckpt show checkpoints/my_run                          # the step that an automatic resume takes
  agl-async-ckpt show checkpoints/my_run/global_step_40 --rows 20
  agl-async-ckpt show checkpoints/my_run --column question --column answer
  agl-async-ckpt show checkpoints/my_run --json | jq '.carry_over[].data_id'

exit codes:
  0  shown
  1  the step has no input state, or a damaged one
  2  there is no such path or column, or it cannot be read
"""
DEFAULT_ROWS = 5


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser = add_command(
        subparsers,
        "show",
        "show what a step holds: position, buffered rows, groups in flight",
        "Show what the input state of one step holds: the place in the epoch, the buffered rows, and the prompt groups "
        "in flight, oldest first. The file is verified before it is read, with weights_only=True.",
        EXAMPLES,
    )
    parser.add_argument(
        "path", metavar="PATH", help="a step folder, an input file, or an output folder (the step a resume takes)"
    )
    parser.add_argument(
        "--rows",
        type=_number,
        metavar="N",
        help=f"how many buffered rows and how many groups to show (default: {DEFAULT_ROWS}; with --json all)",
    )
    parser.add_argument(
        "--column",
        action="append",
        metavar="NAME",
        help=f"a column of the inputs to show; may be repeated (default: {DEFAULT_COLUMNS} of them; with --json all)",
    )
    parser.add_argument("--json", action="store_true", help="write one object; texts are not cut")


def run(args: argparse.Namespace) -> int:
    """Show; returns the exit code."""
    from agl_async_ckpt.storage.commit import load_state

    path = _file(find_target(args.path))
    state, trailer = load_state(path), read_trailer(path)
    inputs = [_input(group) for group in state.carry_over]
    _require_columns(args.column, state.buffered_batch, inputs)
    if args.json:
        output.print_json(_as_json(path, state, trailer, inputs, args))
    else:
        limit = DEFAULT_ROWS if args.rows is None else args.rows
        print_state(path, state, trailer, inputs, columns=args.column, limit=limit)
    return EXIT_OK


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text!r}")
    return int(text)


def _file(target: Target) -> Path:
    """Return the input file that PATH stands for.

    Raises:
        UsageError: An output folder without steps.
        AsyncCheckpointError: The step has no input state, or no resume would find one.
    """
    if target.kind == "file":
        return target.path
    step_dir: Path | None = target.path
    if target.kind == "folder":
        if not is_checkpoint_folder(target.path):
            raise UsageError(no_checkpoints(target.path))
        decision = decide_latest(target.path)
        if decision.error is not None:
            raise decision.error
        step_dir = decision.step_dir
        if step_dir is None:
            raise UsageError(f"Nothing to show: {decision.reason}.")
    assert step_dir is not None
    if not has_state(step_dir):
        raise MissingStateError(
            f"{step_dir} holds no {FILE_NAME}: saved while the extension was not active, or the file was removed."
        )
    return step_dir / FILE_NAME


def _input(group: PromptGroup) -> Mapping[str, Any]:
    value = group.rollouts[0].enqueued.get("input")
    return value if isinstance(value, Mapping) else {"input": value}


def _require_columns(wanted: Sequence[str] | None, batch: Batch | None, inputs: Sequence[Mapping[str, Any]]) -> None:
    known = dict.fromkeys([*(batch or {}), *(name for row in inputs for name in row)])
    for name in wanted or ():
        if name not in known:
            raise UsageError(
                f"There is no column {name!r}. There are: {', '.join(map(str, known))}."
                if known
                else f"There is no column {name!r}: nothing is buffered and nothing in flight."
            )


def _as_json(
    path: Path, state: InputState, trailer: Trailer, inputs: list[Mapping[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    batch, limit = state.buffered_batch or {}, args.rows
    rows = [batch_row(batch, index) for index in range(state.num_buffered)][:limit]
    return {
        "path": str(path),
        "step": state.global_step,
        "epoch": state.epoch,
        "exhausted": state.exhausted,
        "rows_pulled_in_epoch": rows_yielded(state.loader_state),
        "saved_at": trailer.saved_at,
        "run_id": state.run_id,
        "parent_run_id": state.parent_run_id,
        "written_by": dict(state.written_by),
        "num_buffered_inputs": state.num_buffered,
        "buffered": [_selected(row, args.column) for row in rows],
        "num_carry_over_groups": state.num_in_flight,
        "num_dropped_groups": state.num_dropped_groups,
        "carry_over": [
            {
                "data_id": group.data_id,
                "enqueued_in_step": group.step,
                "age_s": age_s(group, trailer),
                "rollouts": [
                    {"rollout_id": rollout.rollout_id, "finished": rollout.finished is not None}
                    for rollout in group.rollouts
                ],
                "input": _selected(row, args.column),
            }
            for group, row in list(zip(state.carry_over, inputs, strict=True))[:limit]
        ],
        "fingerprint": {
            "must_match": plain(state.fingerprint.must_match),
            "recorded": plain(state.fingerprint.recorded),
        },
    }


def _selected(row: Mapping[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    return {str(name): plain(value) for name, value in row.items() if wanted is None or name in wanted}
