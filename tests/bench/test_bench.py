"""Every measurement of `make bench` runs, in its quick form: what it measures is not judged here."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

import bench
from bench.__main__ import main
from bench.figures import Figure, told
from bench.timing import alternate, peak_memory

REAL_RUN = "blocking"


def assert_figures(name: str, figures: list[Figure]) -> None:
    """There are some, each once, each a number."""
    assert figures
    assert {figure.measurement for figure in figures} == {name}
    assert len({figure.what for figure in figures}) == len(figures)
    assert all(math.isfinite(figure.value) for figure in figures)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in bench.MEASUREMENTS if name != REAL_RUN])
def test_measurement_runs_in_its_quick_form(name: str, tmp_path: Path) -> None:
    """A change of the package that breaks a measurement fails here."""
    module = importlib.import_module(f"bench.{name}")
    assert (module.NAME, bool(module.TITLE)) == (name, True)
    assert_figures(name, module.measure(tmp_path / "files", quick=True))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_real_run_is_measured(tmp_path: Path) -> None:
    """Ray, VERL's worker and its save, ours around it; in a process of its own, because it ends all below it."""
    found = tmp_path / "figures.json"
    assert main([REAL_RUN, "--quick", "--json", str(found), "--dir", str(tmp_path)]) == 0
    assert_figures(REAL_RUN, [Figure.from_json(figure) for figure in json.loads(found.read_text())["figures"]])


@pytest.mark.slow
def test_command_writes_figures_and_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One measurement, in a process of its own; its folder is gone."""
    room, found, page = tmp_path / "room", tmp_path / "figures.json", tmp_path / "tables.md"
    room.mkdir()
    assert main(["saving", "--quick", "--json", str(found), "--markdown", str(page), "--dir", str(room)]) == 0
    values = json.loads(found.read_text())
    assert values["machine"]["cores"] > 0
    assert_figures("saving", [Figure.from_json(figure) for figure in values["figures"]])
    assert page.read_text().count("\n|") == 2 + len(values["figures"])
    assert list(room.iterdir()) == []
    assert "save" in capsys.readouterr().out


def test_measurement_that_fails_is_said_with_the_end_of_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit code tells."""
    monkeypatch.setattr("bench.__main__.MEASUREMENTS", ("unknown to the child",))
    assert main(["--quick"]) == 1
    assert "failed with exit code 2; its output ends with" in capsys.readouterr().err


def test_goal_is_met_up_to_its_value() -> None:
    """A number without a goal is not judged."""
    assert Figure("m", "w", 2.0, "x", 2.0).met
    assert not Figure("m", "w", 2.01, "x", 2.0).met
    assert Figure("m", "w", 2.0, "x").met is None
    assert [told(0.0123, "s"), told(2.0**20, "bytes"), told(1.5, "x")] == ["12.30 ms", "1.00 MiB", "1.50x"]


def test_sides_take_turns() -> None:
    """A slow minute hits all of them, and none is always the first."""
    calls: list[str] = []
    seconds = alternate({name: lambda name=name: calls.append(name) for name in "ab"}, repeats=3)
    assert "".join(calls) == "abbaab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_peak_memory_counts_what_is_gone_at_the_end() -> None:
    """Memory that was taken and given back within the call."""
    assert peak_memory(lambda: len(bytearray(200 * 2**20))) > 150 * 2**20
