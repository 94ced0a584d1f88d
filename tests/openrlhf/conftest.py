"""Everything here is skipped where OpenRLHF is not installed; where it is, stand-ins take the place of GPU packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.needs import modules_need

if TYPE_CHECKING:
    from tests.openrlhf.rig.stage import Stage

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("openrlhf") is not None

pytest_pycollect_makemodule = modules_need("openrlhf")

if INSTALLED:
    sys.path.insert(0, str(HERE / "standins"))
    # Ray's workers inherit the environment: they need the stand-ins, and `tests` itself.
    parts = [str(HERE / "standins"), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in parts if part))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    # A loaded machine starts Ray slowly, and Ray would give its workers the lowest priority on top.
    os.environ |= {"RAY_raylet_start_wait_time_s": "60", "RAY_worker_niceness": "0"}

WARNINGS = (
    # Of OpenRLHF's dependencies about themselves; pinned memory is asked for without a GPU.
    "ignore::FutureWarning",
    "ignore:.*pin_memory.*:UserWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:.*:DeprecationWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Add the filters above behind `error`."""
    for line in WARNINGS if INSTALLED else ():
        config.addinivalue_line("filterwarnings", line)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("openrlhf")
            # The first one waits for half a dozen processes that import OpenRLHF, minutes on a loaded machine.
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Ray with the long-lived actors of the rig."""
    from tests.openrlhf.rig.stage import Stage

    built = Stage(tmp_path_factory.mktemp("stage"))
    yield built
    built.close()
