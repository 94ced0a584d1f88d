"""Where a framework is missing the tests that need it are skipped, and the others are collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.needs import FRAMEWORKS

HIDDEN = (*FRAMEWORKS, "accelerate", "datasets", "pandas", "PIL", "pyarrow", "ray", "tensordict", "transformers")
"""What comes with `agl-async-ckpt[agl]` alone."""

WITHOUT = """
import importlib.machinery, os, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        hidden = fullname.partition(".")[0] in os.environ["HIDDEN"].split(",")
        return None if hidden else super().find_spec(fullname, path, target)

sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def test_modules_that_need_what_is_missing_are_skipped_with_its_name(tmp_path: Path) -> None:
    """No module fails to be imported; no conftest does, when its folder is named."""
    (tmp_path / "without.py").write_text(WITHOUT)
    tests = Path(__file__).parent
    folders = [tests / "agl", tests / "faults", tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-p", "without", *folders],
        env={**os.environ, "HIDDEN": ",".join(HIDDEN), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        cwd=tests.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"{FRAMEWORKS[0]} is not installed" in done.stdout
    assert "tests/agl/" not in done.stdout
    assert "tests/folder/test_seal.py::" in done.stdout
