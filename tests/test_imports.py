"""What is cheap to import stays cheap: a listing of checkpoints needs no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = [
    "state",
    "exceptions",
    *(f"storage.{name}" for name in ("container", "trailer", "layout", "files", "small_json", "writer")),
    *(f"folder.{name}" for name in ("seal", "steps")),
    *(f"ledger.{name}" for name in ("audit", "reader", "writer", "plot")),
]
HEAVY = ["torch", "numpy", "pickle", "ray", "verl", "agentlightning", "torchdata", "pydantic"]

PROBE = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module("agl_async_ckpt." + name)
print(",".join(name for name in sys.argv[2].split(",") if name in sys.modules))
"""

BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[3].split(","):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from pathlib import Path
from agl_async_ckpt.storage.container import read_trailer, verify
from agl_async_ckpt.folder.steps import list_steps
path = Path(sys.argv[1])
assert verify(path) == read_trailer(path)
print(verify(path).global_step, list_steps(sys.argv[2]))
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


def test_file_is_verified_where_torch_is_absent(tmp_path: Path) -> None:
    """On a machine without torch and numpy, `verify` and the listing work."""
    golden = Path(__file__).parents[0] / "golden" / "input_state_v2_numpy1.pt"
    (tmp_path / "global_step_3").mkdir()
    found = run(BLOCKED, str(golden), str(tmp_path), ",".join(HEAVY))
    assert found.startswith("3 [StepInfo(step=3")
