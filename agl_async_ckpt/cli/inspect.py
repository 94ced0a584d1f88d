"""`inspect PATH`: one row per step, without torch and without unpickling."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser("inspect", help="list the steps of an output folder")
    parser.add_argument("path", metavar="PATH", help="output folder, step folder or input file")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """List the steps."""
    raise NotImplementedError
