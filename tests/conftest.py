"""What all tests share: third-party warnings that are not ours to fix, and the server of the rig."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.rig.double import Double
    from tests.rig.server import AglServer

# Read when tqdm is imported: the trainer's progress bar.
os.environ.setdefault("TQDM_DISABLE", "1")
# A proxy in the environment must not see loopback traffic.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

THIRD_PARTY_WARNINGS = (
    # Raised while VERL, Ray and their dependencies are imported, about themselves.
    "ignore:NPU not support router replay:UserWarning",
    "ignore:.*RayPPOTrainer. is deprecated:FutureWarning",
    "ignore:.*:DeprecationWarning:(?!agl_async_ckpt|tests).*",
    # The loader forks its workers while the server's thread runs, as it does beside the trainer's own threads.
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
    "ignore:This DataLoader will create .* worker processes:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Add the filters above behind `error`, which stays in force for everything else."""
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell starts its background jobs with SIGINT ignored, and the processes that tests start inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """Switching on makes the package's INFO lines visible for the whole process: not for the next test."""
    logger = logging.getLogger("agl_async_ckpt")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def _agl_server() -> Iterator[AglServer]:
    from tests.rig.server import AglServer

    server = AglServer().start()
    yield server
    server.stop()


@pytest.fixture
def server(_agl_server: AglServer) -> AglServer:
    """The real agl-server on a loopback port, empty, with a controller that has seen nothing."""
    _agl_server.reset()
    return _agl_server


@pytest.fixture
def serve() -> Iterator[Callable[..., Double]]:
    """`serve(*answers, port=0)` starts a double of a server; all of them are stopped at the end."""
    from tests.rig.double import Double

    doubles: list[Double] = []

    def start(*answers: Any, port: int = 0) -> Double:
        doubles.append(Double(list(answers), port))
        return doubles[-1]

    yield start
    for double in doubles:
        double.stop()
