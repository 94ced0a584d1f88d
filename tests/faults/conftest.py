"""Markers, subjects and figures of the fault suite."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.figures import LABELS, PROPERTY, Count, add_up
from tests.needs import FRAMEWORKS, modules_need

if TYPE_CHECKING:
    from tests.faults.subjects import Subject
    from tests.rig.server import AglServer


pytest_pycollect_makemodule = modules_need(*FRAMEWORKS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is slow, and of the fault suite."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.faults)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    # The teardown's report repeats the properties of the call's.
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    total = add_up(entry for report in calls for entry in report.user_properties)
    if not total:
        return
    terminalreporter.section("faults")
    for label, meaning in LABELS.items():
        if total[label]:
            terminalreporter.write_line(f"{total[label]:>9,}  {label:<22} {meaning}")


@pytest.fixture(autouse=True)
def _few_words() -> Iterator[None]:
    """A thousand saves and starts would bury a failure's own words."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Count:
    """Adds to a figure of the summary."""

    def add(label: str, number: int) -> None:
        assert label in LABELS
        request.node.user_properties.append((PROPERTY, (label, number)))

    return add


@pytest.fixture(scope="session")
def tracing() -> None:
    """Skips where strace cannot watch a process."""
    from tests.faults.children import why_no_tracing

    reason = why_no_tracing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def memory_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory, where an fsync costs nothing: what a killed process leaves is the same everywhere."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path_factory.mktemp("faults")
        return
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def subject_named(memory_dir: Path, _agl_server: AglServer) -> Callable[[str], Subject]:
    """Build a subject by its name, once: `writer next`, `trainer keep_one`, ..."""
    from tests.faults.subjects import TrainerSubject, WriterSubject

    built: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in built:
            what, kind = name.split()
            base = memory_dir / name.replace(" ", "-")
            if what == "writer":
                built[name] = WriterSubject(kind, base)
            else:
                _agl_server.reset()
                built[name] = TrainerSubject(kind, base, _agl_server)
        built[name].reset()
        return built[name]

    return get
