"""The part for agent-lightning on VERL needs both; what tests of whole lives share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.needs import FRAMEWORKS, modules_need

if TYPE_CHECKING:
    from tests.rig.record import Life
    from tests.rig.server import AglServer
    from tests.rig.settings import RunSettings

pytest_pycollect_makemodule = modules_need(*FRAMEWORKS)


@pytest.fixture
def run() -> RunSettings:
    """14/4/6 over two shuffled epochs: a tail and two groups in flight at each step."""
    from tests.rig.runs import settings

    return settings("14/4/6", epochs=2, shuffle=True)


@pytest.fixture
def saved(run: RunSettings, server: AglServer, tmp_path: Path) -> tuple[Life, Path]:
    """A life that died after the save of step 3, and its output folder."""
    from tests.rig.life import run_life

    folder = tmp_path / "run"
    life = run_life(run, folder, server.url, stop_after_step=3)
    server.reset()
    return life, folder
