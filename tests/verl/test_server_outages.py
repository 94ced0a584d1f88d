"""The agl-server fails or is restarted under a live trainer, which goes on as if nothing had happened.

The rig puts a fault at exactly one request, or at many; the real server on processes is in `test_outage_scenes.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.rig import require_frameworks

require_frameworks()

from agl_async_ckpt.in_flight import patience  # noqa: E402
from tests.rig.in_flight import SiblingAgents, SiblingPlan, begin  # noqa: E402
from tests.rig.life import run_life  # noqa: E402
from tests.rig.record import Life  # noqa: E402
from tests.rig.server import AglServer  # noqa: E402
from tests.rig.settings import RunSettings  # noqa: E402
from tests.rig.weather import FAULTS  # noqa: E402

RUN = RunSettings(
    12, 2, 4, rollout_n=2, epochs=2, total_steps=5, val_before_train=True, overrides=("trainer.test_freq=2",)
)
PLAN = SiblingPlan(early=dict.fromkeys(range(12), 1), hold={3: 3, 5: 4})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off without the wait."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="module")
def truth(_agl_server: AglServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, list[str]]:
    """The uninterrupted run, and the requests that it makes."""
    _agl_server.reset()
    begin(_agl_server, SiblingAgents(PLAN))
    life = run_life(RUN, tmp_path_factory.mktemp("truth"), _agl_server.url)
    return life, list(_agl_server.weather.requests)


def assert_same(server: AglServer, life: Life, truth: Life) -> None:
    """The stream is that of the uninterrupted run, each group is trained whole, and no id is used twice."""
    assert life.finished
    assert life.pulls == truth.pulls
    assert {n: step.trained for n, step in life.steps.items()} == {n: step.trained for n, step in truth.steps.items()}
    assert {n: Counter(s.updated) for n, s in life.steps.items()} == {
        n: Counter(s.updated) for n, s in truth.steps.items()
    }
    assert life.saves == truth.saves
    starts = Counter(rollout_id for rollout_id, _ in server.agents.starts)
    assert set(starts.values()) == {1}


def kind_of(request: str) -> str:
    """`METHOD route` of a request."""
    method, path = request.split(" ")
    parts = ["ID" if len(part) >= 32 else part for part in path.split("/")]
    return f"{method} {'/'.join(parts)}"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(2))
def test_faults_at_many_requests_change_nothing(
    server: AglServer, tmp_path: Path, truth: tuple[Life, list[str]], fault: str, seed: int
) -> None:
    """Every request may meet it, in any phase of a step and in validations: the run is the uninterrupted one."""
    rng = random.Random(seed)
    begin(server, SiblingAgents(PLAN))
    server.weather.fault = lambda number, request: fault if rng.random() < 0.08 else None
    life = run_life(RUN, tmp_path, server.url)
    assert server.weather.num_faults > 5
    assert_same(server, life, truth[0])
