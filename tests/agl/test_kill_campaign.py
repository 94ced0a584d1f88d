"""A run that is killed at random moments, again and again, trains what the uninterrupted one trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.rig.kill_campaign import LIVES, Campaign
from tests.rig.nursery import nursery_of
from tests.rig.server import AglServer

pytestmark = pytest.mark.slow

NUM_KILLS = 200
SEED = 20


@pytest.mark.timeout(1500)
def test_two_hundred_kills_lose_and_repeat_nothing(
    server: AglServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL over the whole life: start, load, rollout, update, each part of a save, between steps; none shows later.

    Step by step the lineage pulls and trains what the uninterrupted run does, no temporary file is left behind, and
    each part of a life was hit.
    """
    with nursery_of(LIVES, tmp_path) as nursery:
        figures = Campaign(NUM_KILLS, SEED, tmp_path, server, nursery).run()
    with capsys.disabled():
        sys.stdout.write(f"\n{figures}\n")
    assert figures.kills == NUM_KILLS
    assert (figures.lost, figures.repeated) == (0, 0)
    assert figures.server_restarts
    assert figures.spared_workers
    assert set(figures.killed_after) >= {"start", "loaded", "pulled", "trained", "save", "actor_saved", "saved"}
