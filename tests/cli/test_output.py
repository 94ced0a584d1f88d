"""What reaches a terminal, and what a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from agl_async_ckpt.cli import output
from agl_async_ckpt.cli.output import clean, clean_lines, cut, display_width, duration, num_bytes, print_table
from agl_async_ckpt.cli.values import plain, short


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("ärger 你好 👍", "ärger 你好 👍"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb", "a b"),
        ("a\nb\r\nc", "a b c"),
        ("a\tb\x00c\x7f", "a b\\x00c\\x7f"),
        ("\x9b31m c1", "\\x9b31m c1"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\ud800 surrogate", "\\ud800 surrogate"),
        ("a\u2028b\x85c\x0bd\x1ce", "a b c d e"),
    ],
)
def test_text_from_data_cannot_steer_a_terminal(text: str, shown: str) -> None:
    """Escapes come out visible, line breaks as spaces."""
    assert clean(text) == shown


def test_lines_stay_lines() -> None:
    """For texts of our own; each is cleaned."""
    assert clean_lines("a\n  b\x1b") == "a\n  b\\x1b"


@pytest.mark.parametrize(("text", "width"), [("abc", 3), ("你好", 4), ("e\u0301", 1), ("", 0)])
def test_width_counts_columns(text: str, width: int) -> None:
    """Wide characters take two columns, combining ones none."""
    assert display_width(text) == width


@pytest.mark.parametrize("text", ["x" * 500, "你好" * 200, "a\nb" * 100, "short"])
@pytest.mark.parametrize("width", [5, 6, 40])
def test_long_text_is_cut_to_its_columns(text: str, width: int) -> None:
    """With a sign that there is more."""
    shown = cut(text, width)
    assert display_width(shown) <= width
    assert shown == "short" or (shown.endswith("…") and display_width(shown) >= width - 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_950, "1.0 MB"),
        (23_087, "23.1 kB"),
        (5 * 10**12, "5.0 TB"),
        (5 * 10**16, "50000.0 TB"),
    ],
)
def test_size_is_written_in_one_unit(value: int | None, text: str | None) -> None:
    """Decimal units."""
    assert num_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (86400, "24 h"), (200_000, "2 d")]
)
def test_duration_is_written_in_one_unit(seconds: float, text: str) -> None:
    """The largest that fits; days from two on."""
    assert duration(seconds) == text


def test_table_in_a_pipe_is_plain_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    """No colours, no lines, no trailing spaces."""
    print_table(("n", "name"), [[1, "你"], [10, None], [100, "[bold]x\x1b[0m"]], right=("n",))
    assert capsys.readouterr().out == "  n  name\n  1  你\n 10\n100  [bold]x\\x1b[0m\n"


TABLE = """
import sys
from agl_async_ckpt.cli.output import print_table
rows = [[1, "[red]x[/red]\\x1b[2J", "s"], [22, "long " * 30, "t"]]
print_table(("n", "name", "spare"), rows, right=("n",), spare=("spare",))
print("rich" in sys.modules)
"""


def on_a_terminal(width: int, **environment: str) -> str:
    """What a terminal of `width` columns gets."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    with subprocess.Popen(
        [sys.executable, "-c", TABLE],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=kept | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | environment,
        cwd=Path(__file__).parents[2],
    ):
        os.close(follower)
        data = b""
        try:
            while chunk := os.read(leader, 65536):
                data += chunk
        except OSError:  # the other end is closed
            pass
    os.close(leader)
    return data.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [1, 12])
def test_table_that_a_terminal_is_too_narrow_for_is_plain_and_whole(width: int) -> None:
    """A drawn one would lack columns, and nobody would know: the terminal wraps the lines instead."""
    text = on_a_terminal(width)
    assert " n  name" in text
    assert "[red]x[/red]\\x1b[2J" in text
    assert text.count("long ") == 30
    assert text.count("spare") == 1


def test_table_on_a_terminal_is_drawn_by_rich_and_takes_nothing_of_the_data_for_markup() -> None:
    """Colours are rich's own; those in the data are shown as text."""
    text = on_a_terminal(100)
    assert text.endswith("True\n")
    assert "\x1b[1m" in text
    assert "[red]x[/red]\\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert "spare" in text
    narrow = on_a_terminal(20)
    assert "spare" not in narrow
    assert all(display_width(line) <= 20 for line in narrow.replace("\x1b[1m", "").replace("\x1b[0m", "").split("\n"))


def test_no_color_is_honoured() -> None:
    """https://no-color.org: no colours; and a dumb terminal gets plain text without rich."""
    assert "\x1b[3" not in on_a_terminal(100, NO_COLOR="1")
    dumb = on_a_terminal(100, TERM="dumb")
    assert dumb.endswith("False\n")
    assert "\x1b" not in dumb


def test_error_is_cleaned_and_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A path may hold anything but a NUL."""
    output.error("no such \x1b[31mfile")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "agl-async-ckpt: no such \\x1b[31mfile\n")


def test_values_are_described_never_dumped() -> None:
    """Tensors and arrays by dtype and shape, bytes by length, single numbers as they are."""
    import numpy as np
    import torch

    values = {
        "tensor": torch.zeros(2, 3, dtype=torch.int8),
        "scalar": torch.tensor(7),
        "array": np.zeros(4),
        "number": np.float32(0.5),
        "text": np.str_("a"),
        "bytes": b"\x1b[2J",
        "nan": float("nan"),
        "nested": [{"x": (1, None)}, {1}],
    }
    assert plain(values) == {
        "tensor": "<int8 [2, 3]>",
        "scalar": 7,
        "array": "<float64 [4]>",
        "number": 0.5,
        "text": "a",
        "bytes": "<4 bytes>",
        "nan": "nan",
        "nested": [{"x": [1, None]}, [1]],
    }
    assert short({"q": ["你", 1]}) == '{"q": ["你", 1]}'
    deep: list[object] = []
    for _ in range(50):
        deep = [deep]
    assert "..." in short(deep)
