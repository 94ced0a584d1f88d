"""The commands of fenced shell blocks, and a shell that runs them one after the other as a reader would type them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import Block, blocks

LANGUAGES = ("bash", "sh", "shell", "console")
_MARK = "::command "


@dataclass(frozen=True)
class Command:
    """One command of a block.

    Attributes:
        text: As it is typed: perhaps over several lines, with its comment.
        block: Where it stands.
    """

    text: str
    block: Block

    @property
    def name(self) -> str:
        """What is typed, without the comment."""
        return re.sub(r"\s+#.*$", "", self.text, flags=re.MULTILINE).strip()


def commands(page: Path) -> list[Command]:
    """Every command of the shell blocks of a page, in order; of a `console` block the lines after the prompt `$`."""
    found: list[Command] = []
    for block in blocks(page, *LANGUAGES):
        lines = block.code.splitlines()
        if block.language == "console":
            lines = [line[2:] for line in lines if line.startswith(("$ ", "> "))]
        found += [Command(text, block) for text in _whole(lines)]
    return found


def _whole(lines: Sequence[str]) -> list[str]:
    """Join the lines that make up a command: after a backslash, in a loop, in quotes."""
    found: list[str] = []
    waiting = ""
    for line in lines:
        waiting = f"{waiting}\n{line}" if waiting else line
        if not waiting.strip() or waiting.strip().startswith("#"):
            waiting = ""
        elif not waiting.endswith("\\") and _is_complete(waiting):
            found.append(waiting)
            waiting = ""
    assert not waiting, f"the shell cannot read {waiting!r}"
    return found


def _is_complete(text: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False, timeout=10).returncode == 0


def run_all(
    typed: Sequence[Command],
    folder: Path,
    env: Mapping[str, str],
    *,
    with_variables: Mapping[str, Mapping[str, str]],
    exit_codes: Mapping[str, int],
    timeout_s: float,
) -> str:
    """Type commands into one shell, so that a `cd` or an `export` holds for those that follow.

    Args:
        typed: In order.
        folder: Where the shell starts.
        env: Its environment.
        with_variables: Name of a command -> variables for it alone.
        exit_codes: Name of a command -> what it ends with, if that is not 0.
        timeout_s: For all of them.

    Returns:
        What they have printed.

    Raises:
        AssertionError: Names the command that ended with another code, with the end of the output.
    """
    lines = []
    for command in typed:
        extra = with_variables.get(command.name, {})
        lines += [f"echo '{_MARK}{command.block.page}:{command.block.line}'"]
        lines += [f"export {name}={value!r}" for name, value in extra.items()]
        lines += [command.text, f"code=$?; [ $code = {exit_codes.get(command.name, 0)} ] || exit 1"]
        lines += [f"unset {name}" for name in extra]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    places = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert done.returncode == 0, (
        f"{places[-1]}, command {len(places)}: {typed[len(places) - 1].text}\n{done.stdout[-4000:]}"
    )
    return done.stdout
