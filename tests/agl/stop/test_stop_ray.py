"""Stops in real Ray: signals to a driver and to its process group, and a request file for a driver of one's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import main
from agl_async_ckpt.config import SECTION
from agl_async_ckpt.exceptions import EXIT_STOPPED
from agl_async_ckpt.storage.layout import STOP_NAME, TRACKER_NAME
from tests.switch_on.launch import PLUGIN_VARIABLE, Outcome, run_script, write_model
from tests.switch_on.names import ENDS

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]  # 30 s each on two idle cores

HOOK = "ray_kwargs.ray_init.runtime_env.worker_process_setup_hook"
IN_STEP_2, SAVED = "in_step_2", "saved_*"
START_S = 400.0

Act = Callable[[subprocess.Popen[str]], None]


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    """A folder with a short path: Ray puts sockets into it."""
    with tempfile.TemporaryDirectory(prefix="agl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def run(ray_dir: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Run a script in a Ray of its own, with steps of some seconds, and act in the second one."""
    model = tmp_path / "model"
    model.mkdir()
    write_model(model)

    def run(name: str, act: Act, *arguments: str) -> Outcome:
        out = tmp_path / "out"

        def in_second_step(process: subprocess.Popen[str]) -> None:
            deadline = time.monotonic() + START_S
            while not (out / IN_STEP_2).exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if process.poll() is None:
                act(process)

        return run_script(
            name,
            out,
            model,
            "ray_kwargs.ray_init.num_cpus=1",
            "ray_kwargs.ray_init.include_dashboard=false",
            f"ray_kwargs.ray_init.object_store_memory={100 * 1024**2}",
            "agentlightning.async_rollout.enabled=false",
            "trainer.save_freq=-1",
            *arguments,
            act=in_second_step,
            RAY_ADDRESS="local",
            RAY_TMPDIR=str(ray_dir),
            **{PLUGIN_VARIABLE: "tests.switch_on.stoppable"},
        )

    return run


def assert_stopped_in_step_2(outcome: Outcome, out: Path) -> None:
    """That step was saved, it was the last one, and the script ended with the code of a stop and no traceback."""
    assert outcome.returncode == EXIT_STOPPED, outcome.output
    assert "Traceback" not in outcome.output, outcome.output
    assert [path.name for path in out.glob(SAVED)] == ["saved_2"]
    assert not (out / "in_step_3").exists()
    assert not (out / STOP_NAME).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_the_process_group_saves_and_stops_where_ray_is_out_of_it(
    run: Callable[..., Outcome], tmp_path: Path, number: signal.Signals
) -> None:
    """With `shield_ray`: Ray's own processes would end of it, with the step that is to be saved."""
    told: list[set[str]] = []

    def act(process: subprocess.Popen[str]) -> None:
        told.append(names_in_group(process.pid))
        os.killpg(process.pid, number)

    outcome = run("own_entry", act, f"{SECTION}.shield_ray=true")
    assert_stopped_in_step_2(outcome, tmp_path / "out")
    assert not {"raylet", "gcs_server"} & told[0]
    assert outcome.lines(f"{number.name}: asking the trainer to finish its step, save and stop")
    assert outcome.lines(f"Stopped by {number.name}")
    assert_children_end(tmp_path / "out")


def test_signal_to_the_driver_saves_and_stops_and_children_of_workers_end_as_ever(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    """What a worker starts inherits no blocked signal: a program that it ends must not hang."""
    told: list[set[str]] = []

    def act(process: subprocess.Popen[str]) -> None:
        told.append(names_in_group(process.pid))
        process.send_signal(signal.SIGTERM)

    outcome = run("own_entry", act)
    assert_stopped_in_step_2(outcome, tmp_path / "out")
    assert {"raylet", "gcs_server"} <= told[0]  # as without the extension
    assert_children_end(tmp_path / "out")


def assert_children_end(out: Path) -> None:
    """As `ends_of_children` ends them in any Python process: by the signal, or by Ray's own handler of it."""
    ends = json.loads((out / ENDS).read_text())
    assert (ends["started"], ends["timeout"]) == (-signal.SIGTERM, 124)
    assert ends["forked"] in (-signal.SIGTERM, 1)


def test_request_file_stops_a_script_that_knows_nothing_of_the_extension(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Switched on by a config line: what crosses Ray is a SystemExit for it."""
    codes: list[int] = []

    def act(process: subprocess.Popen[str]) -> None:
        (tmp_path / "out" / TRACKER_NAME).write_text("0")  # the command wants to see that there is a run
        codes.append(main(["stop", str(tmp_path / "out")]))

    outcome = run("train", act, f"{HOOK}=agl_async_ckpt.worker.setup")
    assert_stopped_in_step_2(outcome, tmp_path / "out")
    assert codes == [0]


def names_in_group(group: int) -> set[str]:
    """Names of the processes of a process group."""
    found: set[str] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        if int(rest.split()[2]) == group:
            found.add(name)
    return found
