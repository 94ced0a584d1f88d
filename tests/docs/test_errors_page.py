"""The page of errors: every class with its cause, what it really says, and what to do."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest

from agl_async_ckpt.cli import exit_codes
from agl_async_ckpt.exceptions import EXIT_STOPPED
from tests.docs.pages import DOCS, ROOT, blocks, names, sections, table
from tests.docs.provoked import PROVOKED, make_run, message

PACKAGE = ROOT / "src" / "agl_async_ckpt"
PAGE = "errors.md"
SECTIONS = sections(PAGE)
BASES = {"AsyncCheckpointError", "StateFormatError"}
"""Never raised themselves: they are there to be caught."""
INTERNAL = {
    "TrainingStoppedElsewhere": "what a TrainingStopped of another process is; the section of that says so",
    "UnknownRolloutError": "a ServerError of which a rollout manager knows what to do",
}
"""Class -> why it has no section of its own."""


@functools.cache
def error_classes() -> dict[str, list[str]]:
    """Every exception that users may meet -> names of its bases: what exceptions.py
    defines, and what derives from it anywhere.

    Read from the sources, so that a sub-package whose framework is absent counts too.
    """
    bases: dict[str, list[str]] = {}
    known: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                known |= {node.name} if path.name == "exceptions.py" else set()
    while found := {name for name, its in bases.items() if name not in known and known & set(its)}:
        known |= found
    assert set(INTERNAL) <= known
    return {name: bases[name] for name in known if name not in INTERNAL}


def builtin_bases(name: str, classes: dict[str, list[str]]) -> set[str]:
    """The exceptions of Python itself that also catch a class, `Exception` aside."""
    found: set[str] = set()
    for base in classes[name]:
        if base in classes:
            found |= builtin_bases(base, classes)
        elif base != "Exception" and issubclass(getattr(builtins, base, object), BaseException):
            found.add(base)
    return found


@pytest.fixture
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run()


def test_every_error_class_has_a_section_and_every_section_a_class() -> None:
    """Wherever in the package it is defined; exit codes are the one section that is no class."""
    assert set(SECTIONS) - {"Exit codes"} == set(error_classes()) - {"AsyncCheckpointError"}


def test_table_names_every_error_with_the_builtin_that_catches_it() -> None:
    """The overview at the top has the classes, their builtin bases and nothing else."""
    rows = table((DOCS / PAGE).read_text(), "error", "also a", "when")
    classes = error_classes()
    assert {names([row[0]])[0]: set(names([row[1]])) for row in rows} == {
        name: builtin_bases(name, classes) for name in classes if name not in BASES
    }


@pytest.mark.parametrize("name", sorted(set(SECTIONS) - {"Exit codes"}))
def test_section_says_cause_and_next_act(name: str) -> None:
    """Both are labelled, and neither is empty."""
    for label in ("Cause", "What to do"):
        found = re.search(rf"^\*\*{label}\.\*\* (.+)", SECTIONS[name], re.MULTILINE)
        assert found, f"{name} has no {label}"


def test_every_error_that_is_raised_is_provoked() -> None:
    """An error without an example of its own would be described from memory."""
    assert set(PROVOKED) == set(error_classes()) - BASES


@pytest.mark.usefixtures("_run")
@pytest.mark.parametrize("name", sorted(PROVOKED))
def test_example_is_what_the_error_says(name: str) -> None:
    """Word for word, from the code that raises it for users."""
    shown = re.search(r"^```text\n(.*?)\n```$", SECTIONS[name], re.MULTILINE | re.DOTALL)
    assert shown, f"{name} has no example"
    assert shown[1] == message(name)


def test_exit_codes_are_those_of_the_command() -> None:
    """Here and on the page of commands: each code, and no other."""
    codes = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    here = table(SECTIONS["Exit codes"], "exit code", "name", "when", "what to do")
    assert {int(row[0]): names([row[1]])[0] for row in here} == {
        value: name for name, value in vars(exit_codes).items() if name.startswith("EXIT_")
    }
    rows = table((DOCS / "commands.md").read_text(), "exit code", "")
    assert {int(code) for row in rows for code in row[0].split(",")} == codes


def test_exit_code_of_a_stopped_training_is_that_of_the_code() -> None:
    """In the sections of the stop, and beside the table."""
    for name in ("TrainingStopped", "StopRequested"):
        assert f"exit code {EXIT_STOPPED}" in SECTIONS[name]
    assert f"[{EXIT_STOPPED}](preemption.md" in SECTIONS["Exit codes"]


def test_page_has_no_example_without_a_test() -> None:
    """Each text block stands in the section of a class that is provoked."""
    texts = [block for block in blocks(DOCS / PAGE) if block.language == "text"]
    assert len(texts) == len(PROVOKED)
