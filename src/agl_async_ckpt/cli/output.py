"""What a command writes: a rich table on a terminal, plain aligned text in a pipe, errors as one paragraph.

Whatever comes from a file or a path passes `clean` first: data must not steer a terminal.
"""

from __future__ import annotations

import io
import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

SHORT_WIDTH = 14
"""Columns up to this width keep to one line on a terminal; wider ones are folded."""


def prepare() -> None:
    """Have a character that the terminal's encoding lacks written as an escape, and nothing written where nobody reads.

    Python has no stream at all where the shell has closed it (`>&-`).
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_terminal(stream: TextIO) -> bool:
    """Tell whether to draw for a person: a terminal that can move its cursor."""
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
    """Make a text fit for a terminal as `clean` does, line by line."""
    return "\n".join(clean(line) for line in str(text).split("\n"))


def say(text: object = "") -> None:
    """Write lines to standard output."""
    sys.stdout.write(clean_lines(text) + "\n")


def error(text: object) -> None:
    """Write an error to standard error, as one paragraph."""
    sys.stdout.flush()
    sys.stderr.write(f"agl-async-ckpt: {clean_lines(text)}\n")


def print_json(value: Any) -> None:
    """Write JSON, the items of a list one a line. ASCII, so no character of it can steer a terminal."""
    if isinstance(value, list):  # without indentation the encoder is in C
        text = ",\n".join(json.dumps(item) for item in cast("list[Any]", value))
        sys.stdout.write(f"[\n{text}\n]\n" if text else "[]\n")
    else:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Write a table.

    Args:
        headers: Names of the columns.
        rows: Cells; None is an empty one.
        right: Columns to align to the right: numbers.
        spare: Columns that a narrow terminal leaves out, the first one first.
    """
    cells = [["" if cell is None else clean(cell) for cell in row] for row in rows]
    headers = [clean(header) for header in headers]
    if is_terminal(sys.stdout) and _print_rich(headers, cells, right, spare):
        return
    table = [headers, *cells]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    for row in table:
        padded = [_pad(cell, width, header in right) for header, cell, width in zip(headers, row, widths, strict=True)]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def cut(text: object, width: int) -> str:
    """Shorten a text to at most `width` columns, with a sign that there is more."""
    whole = str(text)
    shown = clean(whole[: 4 * width])  # a text of megabytes is not looked at to its end
    if len(whole) <= 4 * width and display_width(shown) <= width:
        return shown
    while display_width(shown) > width - 1:
        shown = shown[: -max(1, (len(shown) - width) // 2)]
    return f"{shown.rstrip()}…"


def num_bytes(value: int | None) -> str | None:
    """Write a size for people: `512 B`, `13.4 kB`."""
    if value is None or value < 1000:
        return value if value is None else f"{value} B"
    size, unit = float(value), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the last one is used
        size /= 1000
        if size < 999.95:
            break
    return f"{size:.1f} {unit}"


def duration(seconds: float | None) -> str:
    """Write a duration for people, in one unit."""
    if seconds is None:
        return "unknown"
    value = max(0.0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= (2 * length if unit == "d" else length):
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"


def _pad(cell: str, width: int, right: bool) -> str:
    space = " " * (width - display_width(cell))
    return space + cell if right else cell + space


def display_width(text: str) -> int:
    """Count the columns that a text takes on a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _print_rich(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], spare: Sequence[str]
) -> bool:
    """Draw with rich, which reads NO_COLOR itself; False, and nothing drawn, where it would cut columns off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(map(display_width, column)) for column in zip(headers, *rows, strict=True)]
    shown = list(range(len(headers)))
    for name in spare:
        if sum(min(widths[index], 2 * SHORT_WIDTH) + 2 for index in shown) > console.width:
            shown.remove(headers.index(name))
    if sum(min(widths[index], SHORT_WIDTH) + 2 for index in shown) > console.width + 2:
        return False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="bold")
    for index in shown:
        table.add_column(
            Text(headers[index]),
            justify="right" if headers[index] in right else "left",
            overflow="fold",
            no_wrap=widths[index] <= SHORT_WIDTH,
            min_width=min(widths[index], SHORT_WIDTH),
        )
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))  # Text: nothing in the data is markup
    console.print(table)
    return True
