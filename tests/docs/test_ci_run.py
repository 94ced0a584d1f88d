"""The script that a merge needs, with stages that only pretend: each failure fails it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

RUN = ROOT / ".ci" / "run"
if not RUN.exists():
    pytest.skip("an sdist has no .ci", allow_module_level=True)

STAGES = re.findall(r"make ([a-z-]+)$", RUN.read_text(), re.MULTILINE)

MAKE = """#!/usr/bin/env bash
# The file `failing` names the stage that fails.
echo "begin of $1"
if [ "$1" = "$(cat failing)" ]; then exit 5; fi
"""


def run(folder: Path, failing: str) -> tuple[int, str]:
    """Run a copy of the script with a `make` that only pretends, and no other tools than it needs."""
    (folder / ".ci").mkdir()
    shutil.copy(RUN, folder / ".ci" / "run")
    (folder / "failing").write_text(failing)
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "dirname", "id"):
        found = shutil.which(tool)
        assert found is not None, tool
        (tools / tool).symlink_to(found)
    (tools / "make").write_text(MAKE)
    (tools / "make").chmod(0o755)
    done = subprocess.run(
        [".ci/run"], cwd=folder, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


def test_every_suite_and_check_of_the_makefile_is_a_stage(tmp_path: Path) -> None:
    """What tests can be selected by is in one of them, and they run in their order."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    suites = {target for target in targets if target.startswith("test")} - {"test-matrix"}
    assert suites | {"lint", "types", "docs"} == {*STAGES}
    code, output = run(tmp_path, failing="")
    assert code == 0
    assert re.findall(r"begin of (.*)", output) == STAGES
    assert "===== passed" in output


@pytest.mark.parametrize("stage", STAGES)
def test_failure_of_a_stage_fails_the_run(tmp_path: Path, stage: str) -> None:
    """No stage follows it."""
    code, output = run(tmp_path, failing=stage)
    assert code != 0
    assert output.endswith(f"begin of {stage}\n")
