"""How every subcommand builds its parser."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(subparsers: Any, name: str, help_line: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Add the parser of a subcommand.

    Args:
        subparsers: Of the main parser.
        name: Of the subcommand.
        help_line: In the list of subcommands; lower case, no full stop.
        description: Sentences above the options.
        examples: Shown as they are below the options: examples, exit codes.
    """
    return subparsers.add_parser(
        name,
        help=help_line,
        description=description,
        epilog=examples,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, and leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
