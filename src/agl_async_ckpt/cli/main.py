"""The command line: parser, exit codes, and errors as one paragraph.

A subcommand is a module of this package, named in `COMMANDS`, with

    add_parser(subparsers) -> None      adds its parser; no `set_defaults` needed
    run(args) -> int                    does the work; returns the exit code

and imports what is heavy (torch, rich, matplotlib) inside `run`, so that `inspect` starts fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from agl_async_ckpt._version import __version__
from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_PROBLEMS, EXIT_USAGE
from agl_async_ckpt.exceptions import AsyncCheckpointError, UsageError

PROG = "agl-async-ckpt"
COMMANDS = ("inspect", "show", "verify", "plan", "audit", "stop")
"""Subcommands in the order of `--help`: modules of `agl_async_ckpt.cli`."""

EPILOG = """\
exit codes:
  0  nothing is wrong
  1  there are problems; each is named
  2  the command cannot be carried out: wrong arguments, or nothing to look at
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Look at the input checkpoints of an asynchronous training run, and stop it. Only `stop` writes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        _module(name).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code; a wrong argument exits with 2 (argparse).
    """
    output.prepare()
    try:
        args = build_parser().parse_args(argv)
        code = _module(args.command).run(args)
        sys.stdout.flush()
    except UsageError as error:
        output.error(str(error))
        return EXIT_USAGE
    except AsyncCheckpointError as error:
        output.error(str(error))
        return EXIT_USAGE if isinstance(error.__cause__, PermissionError) else EXIT_PROBLEMS
    except BrokenPipeError:
        # Whoever read our output has gone: `... | head -1`. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        output.error(f"{where}{error.strerror or error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _module(name: str) -> Any:
    return importlib.import_module(f"agl_async_ckpt.cli.{name}")
