"""What the reference pages list exists, and what exists is listed."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

from agl_async_ckpt import exceptions
from agl_async_ckpt.agl.in_flight.keeper import Outcome
from agl_async_ckpt.agl.report import ResumeReport
from agl_async_ckpt.config import AsyncCheckpointConfig
from tests.docs.pages import all_pages
from tests.golden.sample import small_state

ROOT = Path(__file__).parents[2]


def table_rows(page: str) -> list[list[str]]:
    """Cells of every table row of a page, header and rule left out."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    assert rows, f"docs/{page} has no table of names"
    return rows


def name_of(cell: str) -> str:
    """The text between the first backticks of a cell."""
    found = re.match(r"`([^`]+)`", cell)
    assert found
    return found[1]


def test_configuration_page_lists_every_key_with_its_default() -> None:
    """A key that is missing from the page, unknown to the config, or listed with another default fails here."""
    listed = {name_of(row[0]): name_of(row[1]) for row in table_rows("configuration.md")}
    defaults = {}
    for name, field in AsyncCheckpointConfig.model_fields.items():
        value = field.default
        defaults[name] = (
            value if isinstance(value, str) else f"{value:g}" if type(value) is float else json.dumps(value)
        )
    assert listed == defaults


def test_metrics_page_lists_every_metric() -> None:
    """The names under training/async_ckpt/ are those of the page, whichever module adds them."""
    per_step: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "METRICS_PREFIX" in ast.unparse(function):
                dicts = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
                per_step |= {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    assert per_step
    report = ResumeReport(Path("x"), "", small_state(), Outcome())
    assert {name_of(row[0]) for row in table_rows("metrics.md")} == per_step | set(report.metrics())


def test_error_tree_names_every_error_class() -> None:
    """The tree in the module's docstring is complete, and holds nothing else."""
    assert exceptions.__doc__ is not None
    named = set(re.findall(r"\b([A-Z]\w+Error)(?: \(| {2,}|\n)", exceptions.__doc__))
    base = exceptions.AsyncCheckpointError
    classes = {name for name, value in vars(exceptions).items() if isinstance(value, type) and issubclass(value, base)}
    builtin = {"ValueError", "RuntimeError", "FileNotFoundError", "TypeError", "OSError", "ConnectionError"}
    assert named - builtin == classes


def test_docs_name_no_page_that_is_missing() -> None:
    """Every relative link leads to a file."""
    for page in [*all_pages(), ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_contributing_names_files_and_functions_that_exist() -> None:
    """Paths from the root or from the package, and what serves every trainer."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    package = ROOT / "src" / "agl_async_ckpt"
    paths = set(re.findall(r"`((?:\w+/)+(?:[\w.]+)?|[\w.]+\.(?:py|md|toml|txt))`", text))
    assert len(paths) > 20
    missing = [path for path in paths if "NAME" not in path and not any((at / path).exists() for at in (ROOT, package))]
    assert not missing
    for folder, cell in re.findall(r"^\| `(\w+)/` \| (.+) \|$", text, re.MULTILINE):
        for module, name in re.findall(r"`(\w+)\.(\w+)`", cell):
            assert hasattr(importlib.import_module(f"agl_async_ckpt.{folder}.{module}"), name)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Not with what is returned, and not with a look at the function above. An attribute's may."""
    found: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "property" not in map(ast.unparse, node.decorator_list):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].rstrip(".,:") in ("Whether", "The", "A", "An", "Of", "As", "Likewise", "Called"):
                    found.append(f"{path}:{node.lineno} {' '.join(words[:8])}")
    assert not found, "\n".join(["", *found])
