"""The script that a merge needs, with stages that only pretend: which failures fail it, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.rig.processes import wait_until

RUN = ROOT / ".ci" / "run"
if not RUN.exists():
    pytest.skip("an sdist has no .ci", allow_module_level=True)

STAGES = re.findall(r"^(?:stage|beside) ([a-z-]+)", RUN.read_text(), re.MULTILINE)
BESIDE = re.findall(r"^beside ([a-z-]+)", RUN.read_text(), re.MULTILINE)
TOOLS = ("bash", "cat", "dirname", "id", "mktemp", "rm", "sleep")

MAKE = """#!/usr/bin/env bash
# `name.does` in the folder says what a stage does.
echo "begin of $1"
if [ -e "$1.does" ]; then . "./$1.does"; fi
echo "end of $1"
"""

WAITS = """
sleep 600 & child=$!
trap 'echo tidied >>tidied; kill $child; exit 130' INT
: >waits
wait $child
"""
"""As pytest does: ended by SIGINT, it ends what it has started."""


class Checkout:
    """A folder with the script and a `make` of its own, and no other commands than those that the script needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir()
        shutil.copy(RUN, folder / ".ci" / "run")
        self._bin = folder / "bin"
        self._bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self._bin / tool).symlink_to(found)
        (self._bin / "make").write_text(MAKE)
        (self._bin / "make").chmod(0o755)

    def let(self, stage: str, does: str) -> None:
        """Have a stage do something."""
        (self.folder / f"{stage}.does").write_text(does)

    def start(self) -> subprocess.Popen[str]:
        """Start the script."""
        return subprocess.Popen(
            [".ci/run"],
            cwd=self.folder,
            env={"PATH": str(self._bin), "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self) -> tuple[int, str]:
        """Its exit code, and what it prints."""
        process = self.start()
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def running(self) -> list[str]:
        """Commands that are at work in the folder."""
        found: list[str] = []
        for link in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if link.readlink() == self.folder:
                    found.append((link.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_every_stage_runs_once_and_its_output_is_whole(checkout: Checkout) -> None:
    """Also if others run at the same time."""
    code, output = checkout.run()
    assert code == 0
    assert "===== passed" in output
    assert sorted(re.findall(r"begin of (.*)", output)) == sorted(STAGES)
    for stage in STAGES:
        assert f"begin of {stage}\nend of {stage}\n" in output
    assert not list(checkout.folder.glob("tmp.*"))


def test_stages_are_the_targets_of_the_makefile() -> None:
    """Every suite is run by the script; what tests can be selected by is in one of them."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*STAGES} <= {*targets}
    assert {target for target in targets if target.startswith("test")} - {*STAGES} == {"test-matrix"}


@pytest.mark.parametrize("stage", STAGES)
def test_failure_of_a_stage_fails_the_run(checkout: Checkout, stage: str) -> None:
    """Its output is there, and no stage follows."""
    checkout.let(stage, "echo what went wrong; exit 5")
    code, output = checkout.run()
    assert code == 5
    assert f"begin of {stage}\nwhat went wrong\n" in output
    assert "passed" not in output
    if stage not in BESIDE:
        assert output.endswith("what went wrong\n")


@pytest.mark.parametrize("beside", BESIDE)
def test_early_end_leaves_nothing_running(checkout: Checkout, beside: str) -> None:
    """A stage beside the one that failed is ended, with all that it has started, and can tidy up."""
    failing = STAGES[STAGES.index(beside) + 1]
    checkout.let(beside, WAITS)
    checkout.let(failing, "until [ -e waits ]; do sleep 0.05; done; exit 2")
    code, _ = checkout.run()
    assert code == 2
    assert (checkout.folder / "tidied").read_text() == "tidied\n"
    assert checkout.running() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_run_ends_its_stages_at_once(checkout: Checkout, number: signal.Signals) -> None:
    """The one in the foreground as well."""
    checkout.let("test-ray", WAITS)
    process = checkout.start()
    wait_until((checkout.folder / "waits").exists, "test-ray")
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (checkout.folder / "tidied").exists()
    assert checkout.running() == []
