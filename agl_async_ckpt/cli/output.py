"""What a command writes: a rich table on a terminal, plain aligned text in a pipe, errors as one paragraph.

Whatever comes from a file or a path passes `clean` first: data must not steer a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

MAX_ERROR_WIDTH = 100


def prepare() -> None:
    """Have a character that the terminal's encoding lacks written as an escape, not end the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def is_terminal(stream: TextIO) -> bool:
    """Whether to draw for a person: a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def clean(text: object) -> str:
    """Make a text safe for a terminal, on one line: control and format characters come out as escapes.

    Line breaks become spaces. Escape sequences, carriage returns, C1 controls and the marks that turn the direction of
    writing around (category Cf) would let the content of a file draw over the rest.
    """
    return "".join(_visible(char) for char in " ".join(str(text).splitlines()))


def _visible(char: str) -> str:
    if char == "\t":
        return " "
    if char.isprintable() or char == " ":
        return char
    return char.encode("unicode_escape").decode("ascii")


def clean_lines(text: object) -> str:
    """`clean`, line by line."""
    return "\n".join(clean(line) for line in str(text).split("\n"))


def say(text: object = "") -> None:
    """Write lines to standard output."""
    sys.stdout.write(clean_lines(text) + "\n")


def error(text: object) -> None:
    """Write an error to standard error, as one paragraph."""
    sys.stdout.flush()
    sys.stderr.write(f"agl-async-ckpt: {clean_lines(text)}\n")


def print_json(value: Any) -> None:
    """Write JSON. ASCII, so no character of it can steer a terminal."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """Write a table.

    Args:
        headers: Names of the columns.
        rows: Cells; None is an empty one.
        right: Columns to align to the right: numbers.
        title: A line above it.
    """
    cells = [["" if cell is None else clean(cell) for cell in row] for row in rows]
    if is_terminal(sys.stdout) and _print_rich(headers, cells, right, title):
        return
    if title:
        say(title)
    table = [list(headers), *cells]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    for row in table:
        padded = [
            (" " * (width - display_width(cell)) + cell)
            if header in right
            else (cell + " " * (width - display_width(cell)))
            for header, cell, width in zip(headers, row, widths, strict=True)
        ]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def display_width(text: str) -> int:
    """Columns that a text takes on a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], title: str | None) -> bool:
    """Draw with rich, which reads NO_COLOR itself; False where it is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=title and clean(title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for header in headers:
        table.add_column(Text(header), justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: nothing in the data is markup
    Console().print(table)
    return True
