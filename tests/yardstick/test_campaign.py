"""Scenes that chance draws: whatever sizes, hooks, agents and interruptions, the rows of the update are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.rig.server import AglServer
from tests.yardstick.campaign import run_campaign

NUM_QUICK, NUM_SCENES = 8, 200


@pytest.mark.timeout(600)
def test_a_few_drawn_scenes_are_those_of_the_trainer_alone(server: AglServer, tmp_path: Path) -> None:
    """The first numbers; the slow suite goes on from there."""
    figures = run_campaign(range(NUM_QUICK), server, tmp_path)
    assert not figures.differing, "\n".join(figures.differing)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drawn_scenes_are_those_of_the_trainer_alone(
    server: AglServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trait that a scene can have was among them."""
    figures = run_campaign(range(NUM_QUICK, NUM_QUICK + NUM_SCENES), server, tmp_path)
    with capsys.disabled():
        sys.stdout.write(f"\n{figures}\n")
    assert not figures.differing, "\n".join(figures.differing)
    assert set(figures.traits) >= {
        *("hook reward", "hook trace", "hook relabel", "hook silent agents", "siblings", "bad row", "kept few"),
        *("critic", "validations", "rich columns", "surplus", "loader workers", "fork", "roll-back"),
        *("sampler with replacement", "numbers of two types", "kill at validating"),
        *("server alive", "server restarted", "kill at pulled", "kill at trained", "kill at updated"),
        *("kill at save", "kill at actor_saved", "kill at saved", "stop at pulled", "stop at trained"),
    }
