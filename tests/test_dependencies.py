"""What the package imports is what pyproject.toml declares, and constraints.txt pins."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agl_async_ckpt

SOURCE = Path(agl_async_ckpt.__file__).parent
ROOT = Path(__file__).parents[1]
OF_ANOTHER = {"pydantic_core": "pydantic"}
"""Packages that come with another distribution, in the one version that it wants."""


def declared(*extras: str) -> set[str]:
    """Names of the distributions that an install with `extras` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported(file: Path, *, on_import: bool) -> Iterator[str]:
    """Names of the distributions that `file` imports.

    Args:
        file: A module of the package.
        on_import: Only what it imports when it is imported itself; else also what its functions import.
    """
    tree = ast.parse(file.read_text())
    for node in tree.body if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        else:
            continue
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"agl_async_ckpt"}:
            yield canonicalize_name(OF_ANOTHER.get(name, name))


def test_what_is_imported_is_declared() -> None:
    """In the extra of the part that imports it; OpenRLHF brings its own versions of what its part needs."""
    known = declared("agl", "plot")
    undeclared = {
        f"{file.relative_to(SOURCE)}: {name}"
        for file in SOURCE.rglob("*.py")
        for name in imported(file, on_import=False)
        if name not in known
    }
    assert not undeclared


def test_the_core_can_be_imported_without_an_extra() -> None:
    """What reads a checkpoint needs no training framework; a function may ask for one."""
    known, of_extras = declared(), {"agl", "openrlhf"}
    undeclared = {
        f"{file.relative_to(SOURCE)}: {name}"
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).parts[0] not in of_extras
        for name in imported(file, on_import=True)
        if name not in known
    }
    assert not undeclared


def test_what_is_declared_is_pinned_for_the_tests() -> None:
    """Whoever installs a checkout gets the versions that the tests run on."""
    pins = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert declared("agl", "plot", "dev", "docs") <= pins
