"""What each command loads: the training stack never, torch only where content is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agl_async_ckpt.cli.main import COMMANDS

TRAINING_STACK = ["ray", "verl", "agentlightning", "torchdata", "omegaconf"]
DECODES = {"show", "verify", "plan"}
"""Commands that look at what a file holds; every other one starts without torch."""
HEAVY = ["torch", "numpy", "pickle", "pydantic", "httpx", "rich", "matplotlib", "multiprocessing"]

PROBE = """
import sys
from agl_async_ckpt.cli.main import main
main(sys.argv[2:])
print(",".join(name for name in sys.argv[1].split(",") if name in sys.modules), file=sys.stderr)
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


def test_audit_without_a_picture_loads_nothing_heavy() -> None:
    """A ledger is text."""
    run_of_the_demo = Path(__file__).parents[1] / "ledger" / "demo_runs" / "protected"
    done = run(PROBE, ",".join([*HEAVY, *TRAINING_STACK]), "audit", run_of_the_demo)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "audit"])
def test_no_command_loads_the_training_stack(out: Path, command: str) -> None:
    """Where the content is read, torch is."""
    done = run(PROBE, ",".join([*TRAINING_STACK, "torch"]), command, out)
    assert done.stderr.strip() == ("torch" if command in DECODES else "")
