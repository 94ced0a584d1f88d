"""What each command loads: the training stack never, torch only where content is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import COMMANDS

TRAINING_STACK = ["ray", "verl", "agentlightning", "torchdata", "omegaconf"]
HEAVY = ["torch", "numpy", "pickle", "pydantic", "httpx", "rich", "matplotlib", "multiprocessing"]

PROBE = """
import sys
from agl_async_ckpt.cli.main import main
main(sys.argv[2:])
print(",".join(name for name in sys.argv[1].split(",") if name in sys.modules), file=sys.stderr)
"""

BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Block())
from agl_async_ckpt.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where nothing is loaded yet."""
    command = [sys.executable, "-c", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["--help"]], ids=" ".join)
def test_listing_loads_neither_torch_nor_a_pickler(out: Path, arguments: list[str]) -> None:
    """Nor rich, since nobody looks."""
    path = [] if arguments == ["--help"] else [out]
    probe = PROBE.replace("main(sys.argv[2:])", "try: main(sys.argv[2:])\nexcept SystemExit: pass")
    done = run(probe, ",".join([*HEAVY, *TRAINING_STACK]), *arguments, *path)
    assert done.returncode == 0
    assert done.stderr.strip() == ""
    assert done.stdout


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "audit"])
def test_no_command_loads_the_training_stack(out: Path, command: str) -> None:
    """Where the content is read, torch is."""
    done = run(PROBE, ",".join([*TRAINING_STACK, "torch"]), command, out)
    assert done.stderr.strip() == ("" if command in ("inspect", "stop") else "torch")


@pytest.mark.parametrize("command", ["inspect", "verify", "plan"])
def test_command_works_where_torch_is_absent(out: Path, command: str) -> None:
    """And says that decoding was not tried."""
    done = run(BLOCKED, ",".join([*HEAVY, *TRAINING_STACK]), command, out)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("decoding was not tried" in done.stdout) == (command != "inspect")


def test_show_asks_for_torch_where_it_is_absent(out: Path) -> None:
    """In one line."""
    done = run(BLOCKED, ",".join([*HEAVY, *TRAINING_STACK]), "show", out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("agl-async-ckpt: show needs torch")
    assert len(done.stderr.splitlines()) == 1
