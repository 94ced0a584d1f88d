"""A Ray cluster of two nodes: the driver on one of them, the task runner, and so the trainer, on the other."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import main
from agl_async_ckpt.exceptions import EXIT_STOPPED
from agl_async_ckpt.storage.layout import STOP_NAME, TRACKER_NAME
from tests.rig.processes import wait_until
from tests.rig.record import Life
from tests.rig.runs import assert_continues, settings, uninterrupted
from tests.rig.server import AglServer
from tests.switch_on.launch import OBSERVER, PLUGIN_VARIABLE, Outcome, TwoNodes, run_script, two_nodes, write_model
from tests.switch_on.names import STAYING, STAYS_AT, record_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]  # 15 to 50 s each on two idle cores

HOOK = "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=agl_async_ckpt.worker.setup"
START_S = 400.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    # A short path: Ray puts sockets into it.
    with (
        tempfile.TemporaryDirectory(prefix="agl", dir="/tmp", ignore_cleanup_errors=True) as folder,
        two_nodes(Path(folder)) as nodes,
    ):
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


def arguments(nodes: TwoNodes, plugin: str) -> tuple[str, str]:
    """Where the cluster is, and what stands in for training in its workers; the extension comes by the config line."""
    ray_init = "ray_kwargs.ray_init"
    return f"{ray_init}.address={nodes.address}", f"{ray_init}.runtime_env.env_vars.{PLUGIN_VARIABLE}={plugin}"


def when_there(path: Path, act: Callable[[subprocess.Popen[str]], object]) -> Callable[[subprocess.Popen[str]], None]:
    """Act on a script once `path` is there; not at all if it ends before."""

    def wait_and_act(process: subprocess.Popen[str]) -> None:
        wait_until(lambda: path.exists() or process.poll() is not None, path.name, timeout_s=START_S)
        if process.poll() is None:
            act(process)

    return wait_and_act


def test_config_line_switches_on_where_the_task_runner_is(nodes: TwoNodes, model: Path, tmp_path: Path) -> None:
    """The hook runs in the workers of the other node too, and the line to look for comes back to the driver."""
    outcome = run_script("train", tmp_path / "out", model, HOOK, *arguments(nodes, OBSERVER))
    assert outcome.returncode == 0, outcome.output
    assert outcome.observed is not None
    assert outcome.observed["node"] == nodes.runner != nodes.driver
    assert outcome.observed["active"] is True
    assert len(outcome.lines("is active")) == 1


@pytest.mark.parametrize("lost", ["node", "driver"])
def test_training_goes_on_exactly_after_a_loss(
    nodes: TwoNodes, model: Path, tmp_path: Path, server: AglServer, lost: str
) -> None:
    """The task runner's node is killed, or the driver alone; the same command has the stream of an undisturbed run."""
    run = settings("24/4/8", epochs=2, save_freq=2, num_workers=1)
    out = tmp_path / "out"

    def start(act: Callable[[subprocess.Popen[str]], None] | None = None) -> Outcome:
        ray_init = arguments(nodes, "tests.switch_on.rig_training")  # may have changed
        return run_script(
            "rig_run", out, model, f"--settings={run.to_json()}", f"--url={server.url}", HOOK, *ray_init, act=act
        )

    def lose(driver: subprocess.Popen[str]) -> None:
        if lost == "node":
            nodes.replace_runner_node()
        else:
            driver.kill()

    before = nodes.runner
    outcome = start(when_there(out / STAYING, lose))
    if lost == "node":
        assert outcome.returncode == 1, outcome.output
        assert outcome.lines("ray.exceptions.Actor"), outcome.output  # ActorUnavailableError or ActorDiedError
        assert nodes.runner != before
    outcome = start()
    assert outcome.returncode == 0, outcome.output

    first, second = (Life.from_file(record_of(out, number)) for number in (1, 2))
    assert max(first.steps) == STAYS_AT[1]
    assert second.start == second.weights["actor"] == 4  # the last save before
    assert_continues(uninterrupted(run, server), first, second)


@pytest.mark.parametrize("way", ["signal", "command"])
def test_stop_reaches_the_trainer_on_the_other_node(nodes: TwoNodes, model: Path, tmp_path: Path, way: str) -> None:
    """SIGTERM at the driver, or a request in the shared output folder: the trainer saves its step and ends."""
    out = tmp_path / "out"

    def act(process: subprocess.Popen[str]) -> None:
        if way == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            (out / TRACKER_NAME).write_text("0")  # the command wants to see that there is a run
            assert main(["stop", str(out)]) == 0

    outcome = run_script(
        "own_entry",
        out,
        model,
        *arguments(nodes, "tests.switch_on.stoppable"),
        "agentlightning.async_rollout.enabled=false",
        "trainer.save_freq=-1",
        act=when_there(out / "in_step_2", act),
    )
    assert outcome.returncode == EXIT_STOPPED, outcome.output
    assert [path.name for path in out.glob("saved_*")] == ["saved_2"]
    assert not (out / STOP_NAME).exists()
