"""Start a cluster, run a script on it, hand back what the script printed and what the task runner had built."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.switch_on.names import GO, RECORD

REPO_DIR = Path(__file__).parents[2]
OBSERVER = "tests.switch_on.observer"
PLUGIN_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
LOG = "cluster.log"
START_S, SCRIPT_S, STOP_S = 200.0, 500.0, 60.0
"""Longest time for a cluster to start, for a script to end, for a cluster to stop; then the process is killed."""


@dataclass(frozen=True)
class Outcome:
    """What a script did.

    Attributes:
        returncode: Of the script.
        output: Everything it printed, the forwarded lines of Ray's workers included.
        observed: What the task runner had built (see `observer`), or None if it got nowhere.
    """

    returncode: int
    output: str
    observed: Mapping[str, Any] | None

    def lines(self, text: str) -> list[str]:
        """Lines of the output with `text`."""
        return [line for line in self.output.splitlines() if text in line]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process of the test: none of the settings of a cluster that the user works on."""
    dropped = ("RAY_", "VERL_", "AGL_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO_DIR), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def write_model(folder: Path) -> None:
    """Write what a tokenizer and a model config need; no weights, because no worker is started."""
    from tokenizers import Tokenizer, models

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    model = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": len(vocabulary)}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(model))


@contextlib.contextmanager
def cluster(temp_dir: Path) -> Iterator[str]:
    """Run a small Ray cluster; yields its address.

    Args:
        temp_dir: Of a short path: Ray puts sockets into it.
    """
    with _ray(temp_dir, "cluster", str(temp_dir), **{PLUGIN_VARIABLE: OBSERVER}) as process:
        yield _answer(process, temp_dir)


class TwoNodes:
    """A Ray cluster of a node for the driver and one for the task runner; see `two_nodes`.

    Attributes:
        address: For `ray.init`.
        driver: Id of the node that a driver on this machine connects to; it has no CPU.
        runner: Id of the node that has the CPUs.
    """

    def __init__(self, process: subprocess.Popen[str], temp_dir: Path) -> None:
        self._process, self._temp_dir = process, temp_dir
        self._read()

    def replace_runner_node(self) -> None:
        """Kill the task runner's node with everything on it; returns when another one has taken its place."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> None:
        nodes: dict[str, str] = json.loads(_answer(self._process, self._temp_dir))
        self.address, self.driver, self.runner = nodes["address"], nodes["driver"], nodes["runner"]


@contextlib.contextmanager
def two_nodes(temp_dir: Path) -> Iterator[TwoNodes]:
    """Run a Ray cluster of two nodes.

    Args:
        temp_dir: Of a short path: Ray puts sockets into it.
    """
    with _ray(temp_dir, "two_nodes", RAY_TMPDIR=str(temp_dir)) as process:
        yield TwoNodes(process, temp_dir)


@contextlib.contextmanager
def _ray(temp_dir: Path, module: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has Ray running until its standard input closes."""
    with (temp_dir / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.switch_on.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(**variables),
            cwd=temp_dir,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        with _bounded(process, STOP_S):
            process.wait()
        process.stdout.close()


def _answer(process: subprocess.Popen[str], temp_dir: Path) -> str:
    assert process.stdout is not None
    with _bounded(process, START_S):
        answer = process.stdout.readline().strip()
    assert answer, f"no cluster: {(temp_dir / LOG).read_text()}"
    return answer


def run_script(
    name: str,
    out: Path,
    model: Path,
    *arguments: str,
    act: Callable[[subprocess.Popen[str]], None] | None = None,
    **variables: str,
) -> Outcome:
    """Run `tests.switch_on.<name>` to its end, in a session and process group of its own.

    Args:
        name: `train`, `own_entry` or `rig_run`.
        out: Output folder of the training; there already if this is not its first start.
        model: Folder of the model.
        arguments: Dotlist overrides and options of the script.
        act: Called with the process in a thread, once it has started.
        variables: Further environment variables.
    """
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", f"tests.switch_on.{name}", "--model", str(model), "--out", str(out), *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(**variables),
        cwd=out,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed: list[str] = []
    actor = threading.Thread(target=act or (lambda _: None), args=(process,))
    actor.start()
    with process.stdout, _bounded(process, SCRIPT_S):
        for line in process.stdout:
            printed.append(line)
            if "agl-async-ckpt" in line:
                (out / GO).touch()  # the line that the user looks for has reached the terminal
        process.wait()
    actor.join()
    record = out / RECORD
    observed = json.loads(record.read_text()) if record.exists() else None
    return Outcome(process.returncode, "".join(printed), observed)


@contextlib.contextmanager
def _bounded(process: subprocess.Popen[str], limit_s: float) -> Iterator[None]:
    watchdog = threading.Timer(limit_s, process.kill)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
