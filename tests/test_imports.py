"""What is cheap to import stays cheap: a listing of checkpoints needs no framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = [
    "state",
    "exceptions",
    *(f"storage.{name}" for name in ("container", "trailer", "layout", "files", "small_json", "writer")),
    *(f"folder.{name}" for name in ("seal", "steps")),
    *(f"ledger.{name}" for name in ("audit", "reader", "writer")),
]
HEAVY = ["torch", "numpy", "pickle", "ray", "verl", "agentlightning", "torchdata", "pydantic"]

PROBE = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module("agl_async_ckpt." + name)
print(",".join(name for name in sys.argv[2].split(",") if name in sys.modules))
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", LIGHT)
def test_module_imports_no_framework(name: str) -> None:
    """Neither torch nor numpy, nor pickle, nor anything of the training stack."""
    assert run(PROBE, name, ",".join(HEAVY)) == ""


def test_storage_imports_torch_and_nothing_of_the_training_stack() -> None:
    """The core works with torch and numpy alone."""
    assert (
        run(PROBE, "storage.commit,codec.values,codec.input_state", "ray,verl,agentlightning,torchdata,pydantic") == ""
    )
