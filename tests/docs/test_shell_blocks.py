"""What a newcomer types works: the shell blocks of README and tutorial run as written, in a clean clone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import build_parser
from tests.docs.environment import clone_of_head, linked_environment, variables
from tests.docs.pages import DOCS, ROOT, all_pages, blocks
from tests.docs.shell import LANGUAGES, Command, commands, run_all

PAGES = [ROOT / "README.md", *(path for path in [DOCS / "tutorial.md"] if path.exists())]

NOT_RUN = {
    "make demo ARGS=--stock": "the demo takes minutes and is run once; this is its other mode",
}
"""Command -> why it cannot run here."""

ONCE = {"make demo"}
"""Minutes long: typed at its first place, left out at later ones."""

WITH_VARIABLES = {
    # A suite that runs itself would not end: the typed command runs, with one test of it.
    "make test": {"PYTEST_ADDOPTS": "-k test_exported_names_are_pinned"},
    # Nothing is downloaded: hatchling is here, and pip reads this "no" as "no isolation".
    'pip install ".[agl]" "torch==2.11.0"': {"PIP_NO_BUILD_ISOLATION": "0"},
}
"""Command -> variables that shorten it. Every command has `FROM=wheel`, see `variables`."""

EXIT_CODES: dict[str, int] = {}
"""Command -> its exit code, where that is not 0."""


def every_command() -> list[Command]:
    """Of the pages that are run, in order."""
    return [command for page in PAGES for command in commands(page)]


def test_tables_name_commands_that_are_there() -> None:
    """A reason or a variable for a command that no page has any more is stale."""
    typed = {command.name for command in every_command()}
    assert {*NOT_RUN, *ONCE, *WITH_VARIABLES, *EXIT_CODES} <= typed
    assert all(NOT_RUN.values())


def test_shell_commands_stand_in_shell_blocks() -> None:
    """A command in a block of another language would never run."""
    for page in PAGES:
        for block in blocks(page):
            if block.language not in LANGUAGES:
                found = re.findall(
                    r"^(?:\$ .*|make .*|pip .*|git .*|agl-async-ckpt [a-z]+ .*)", block.code, re.MULTILINE
                )
                assert not found, f"{block.page}:{block.line}"


def test_every_call_of_the_command_on_any_page_is_one_that_it_takes() -> None:
    """Subcommands, options and their values, in the shell blocks of all pages."""
    parser = build_parser()
    calls = 0
    for page in all_pages():
        for command in commands(page):
            for call in re.findall(r"agl-async-ckpt(?: [^|&;>#\n)]+)", command.name):
                words = shlex.split(call)
                if {"--help", "--version"} & {*words}:
                    continue
                try:
                    parser.parse_args(words[1:])
                except SystemExit as error:
                    raise AssertionError(f"{command.block.page}:{command.block.line}: {call}") from error
                calls += 1
    assert calls > 10


def test_every_make_target_on_any_page_exists_and_is_explained() -> None:
    """In a block or in a sentence, with the variables that the target takes."""
    targets = dict(re.findall(r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = 0
    for page in all_pages():
        for target, variable in re.findall(r"(?:^|`)make ([a-z-]+)(?: ([A-Z]+)=)?", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
            assert not variable or variable in targets[target], f"{page.name}: make {target} {variable}="
            found += 1
    assert found > 10


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_every_block_runs_as_written(tmp_path: Path) -> None:
    """README, then the tutorial, in one clone: what the one leaves there, the other finds."""
    clone = clone_of_head(tmp_path / "agl-async-ckpt")
    binaries = linked_environment(clone / ".venv")
    typed: list[Command] = []
    for command in every_command():
        again = command.name in ONCE and command.name in {earlier.name for earlier in typed}
        if command.name not in NOT_RUN and not again:
            typed.append(command)
    assert typed
    run_all(
        typed,
        clone,
        variables(binaries) | {"FROM": "wheel"},
        with_variables=WITH_VARIABLES,
        exit_codes=EXIT_CODES,
        timeout_s=3000,
    )
