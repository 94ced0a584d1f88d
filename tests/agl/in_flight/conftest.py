"""What scenes on real processes share, and an address without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.nursery import Nursery, nursery_of
from tests.rig.processes import free_port
from tests.rig.runs import settings
from tests.scenes.stage import Stage, StageMaker


@pytest.fixture
def free_url() -> str:
    """A loopback address at which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process that forks trainers."""
    with nursery_of("tests.scenes.trainer:run_life", tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture
def make_stage(nursery: Nursery, tmp_path: Path) -> StageMaker:
    """`make_stage("8/2/4", rollout_n=2)`: a scene in the case notation n/B/A, to be used as a context."""

    def make(case: str, *, pool: int = 50, **changes: Any) -> Stage:
        return Stage(tmp_path / "scene", nursery, settings(case, **changes), pool=pool)

    return make
