"""What is not everywhere: modules of tests that need it are skipped where it is missing, and the summary says so.

A folder's conftest.py says what its modules need, so that these begin with plain imports:

    pytest_pycollect_makemodule = modules_need(*FRAMEWORKS)

Whatever pyproject.toml declares for every install and for `dev` is there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import pytest

FRAMEWORKS = ("torchdata", "verl", "agentlightning")


class SkippedModule(pytest.Module):
    """Stands for a module that is not imported, since `missing` is not installed."""

    missing = ""

    def collect(self) -> NoReturn:
        """Skip."""
        pytest.skip(f"{self.missing} is not installed", allow_module_level=True)


def modules_need(*names: str, **of_modules: Iterable[str]) -> Callable[[Path, pytest.Collector], SkippedModule | None]:
    """Make a folder's `pytest_pycollect_makemodule`.

    Args:
        names: Top-level packages that every module of the folder and of those below needs.
        of_modules: What else a single module needs, by its name.
    """

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> SkippedModule | None:
        for name in (*names, *of_modules.get(module_path.stem, ())):
            if importlib.util.find_spec(name) is None:
                module = SkippedModule.from_parent(parent, path=module_path)
                module.missing = name
                return module
        return None

    return pytest_pycollect_makemodule
