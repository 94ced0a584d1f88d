"""The reference page of the command lists what there is, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import COMMANDS, build_parser
from tests.cli.conftest import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
SECTIONS = {part.partition("\n")[0]: part.partition("\n")[2] for part in PAGE.split("\n## ")[1:]}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The long options of a parser, `--help` of a subcommand aside."""
    return {
        name
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and (name != "--help" or parser.prog == "agl-async-ckpt")
    }


def listed_in(section: str, title: str) -> set[str]:
    """Names in the first column of the table under a header."""
    found = re.search(rf"^\| {title} \| \|\n\|[-|]+\|\n((?:\|.*\n?)+)", section, re.MULTILINE)
    assert found, f"no table of {title}s"
    return set(re.findall(r"`([^`]+)`", "\n".join(line.split(" | ")[0] for line in found[1].splitlines())))


def subparsers() -> dict[str, argparse.ArgumentParser]:
    """Every command with its parser."""
    (action,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(action.choices)


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    """In the order of `--help`."""
    assert list(subparsers()) == list(COMMANDS)
    assert [name for name in SECTIONS if name not in ("general", "How to")] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_listed_and_every_listed_option_exists(command: str) -> None:
    """In the section of its command."""
    assert listed_in(SECTIONS[command], "option") == options_of(subparsers()[command])


def test_general_options_are_listed() -> None:
    """Those of the program itself."""
    assert listed_in(SECTIONS["general"], "option") == options_of(build_parser())


def test_every_option_has_a_help_text() -> None:
    """And every argument."""
    for parser in subparsers().values():
        assert all(action.help for action in parser._actions)


def test_json_keys_are_those_of_the_page(cli: Cli, out: Path) -> None:
    """Of inspect as a table, of verify and plan in the text of the option."""
    assert listed_in(SECTIONS["inspect"], "key") == set(cli("inspect", out, "--json").json()[0])
    verified = cli("verify", out, "--json").json()
    for key in (*verified, *verified["steps"][0]):
        assert f"`{key}`" in SECTIONS["verify"]
    for key in cli("plan", out, "--json").json():
        assert f"`{key}`" in SECTIONS["plan"]


def test_commands_of_the_examples_exist() -> None:
    """Each line that calls the command names one of its subcommands and options that it has."""
    calls = re.findall(r"agl-async-ckpt ([a-z]+)((?: [^\n|&>#`]+)?)", PAGE)
    assert {name for name, _ in calls} == set(COMMANDS)
    for name, rest in calls:
        assert set(re.findall(r"--[a-z]+", rest)) <= options_of(subparsers()[name])


def test_header_of_the_table_is_the_one_on_the_page(cli: Cli, out: Path) -> None:
    """The example output shows what is printed."""
    header = cli("inspect", out).out.splitlines()[0].split()
    assert " ".join(header) in " ".join(SECTIONS["inspect"].split())
