"""The picture: every kind of cell where it belongs, legible for few inputs and for very many, in three formats."""

from __future__ import annotations

import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from agl_async_ckpt.exceptions import UsageError
from agl_async_ckpt.ledger.grid import Cell, build_grid
from agl_async_ckpt.ledger.plot import COLOURS, LABELS, plot, verdict
from tests.ledger.story import Story, dataset, row


def lossy(num_rows: int = 24, steps: int = 3, batch: int = 2, groups: int = 5) -> Story:
    """A run that loses what was in flight and buffered at a resume."""
    story = Story(dataset(num_rows), batch, groups).start().steps(steps)
    return story.start(steps, resume="verl", lose_in_flight=True, lose_buffered=True).steps(steps)


def test_cells_say_what_an_input_was_in_each_step() -> None:
    """One line per input in pull order, one column per step."""
    grid = build_grid(lossy().audit(), max_height=100, max_width=100)
    assert (grid.first_step, grid.num_steps, grid.num_inputs) == (1, 6, 20)
    p, f, t, d, x, n = Cell.PULLED, Cell.IN_FLIGHT, Cell.TRAINED, Cell.DONE, Cell.LOST, Cell.NOTHING
    assert grid.cells[0].tolist() == [t, d, d, d, d, d]
    assert grid.cells[4].tolist() == [p, f, t, d, d, d]
    assert grid.cells[5].tolist() == [p, p, t, d, d, d]
    assert grid.cells[6].tolist() == [n, p, f, x, x, x]
    assert grid.cells[9].tolist() == [n, n, p, x, x, x]
    assert grid.cells[10].tolist() == [n, n, n, t, d, d]


def test_repeated_and_dropped_inputs_have_cells_of_their_own() -> None:
    """From the step on in which it happened."""
    story = Story(dataset(12), 2, 4).start().step(drop=[row(1)]).steps(2)
    story.start(3, resume="verl", lose_in_flight=True, loader="fresh").steps(3)
    cells = build_grid(story.audit(), max_height=100, max_width=100).cells
    assert cells[1].tolist()[0] == Cell.DROPPED
    assert Cell.REPEATED in cells
    assert Cell.LOST not in cells  # they were drawn again


def test_no_loss_hides_in_a_crowd() -> None:
    """Where many inputs share a cell, a single lost one shows."""
    grid = build_grid(lossy(4000, 100, 10, 11).audit(), max_height=20, max_width=30)
    assert grid.cells.shape == (20, 30)
    assert (grid.cells == Cell.LOST).any()
    assert (grid.cells == Cell.LOST).sum() < 60


@pytest.mark.parametrize("story", [lossy(), lossy(3000, 60, 20, 41)], ids=["few", "many"])
def test_picture_is_written_in_each_format(tmp_path: Path, story: Story) -> None:
    """PNG, SVG whose text is text, and a page of its own that loads nothing."""
    result = story.audit()
    for suffix in ("png", "svg", "html"):
        plot(result, tmp_path / f"stream.{suffix}")
    png = (tmp_path / "stream.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG")
    assert 600 < width < 2000
    assert 300 < height < 1500
    svg = (tmp_path / "stream.svg").read_text()
    words = " ".join(ElementTree.fromstring(svg).itertext())
    assert "inputs lost, 0 repeated" in words
    for text in ("step", "inputs in the order of pulling", "lost", "trained in this step", "in flight", "resume from"):
        assert text in words
    page = (tmp_path / "stream.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "lost at the resume of life 2" in page
    assert "<script" not in page
    assert not any(mark in page for mark in ('src="http', "url(http", "<link"))


def test_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    """No time and no random ids in a file."""
    for suffix in ("png", "svg", "html"):
        plot(lossy().audit(), tmp_path / f"a.{suffix}")
        plot(lossy().audit(), tmp_path / f"b.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_run_without_a_step_has_a_picture(tmp_path: Path) -> None:
    """A job that has just begun."""
    plot(Story(dataset(8), 2, 4).start().audit(), tmp_path / "stream.png")
    assert (tmp_path / "stream.png").exists()


def test_verdict_counts_what_the_picture_shows() -> None:
    """One line."""
    assert verdict(lossy().audit()) == "4 inputs lost, 0 repeated"
    assert verdict(Story(dataset(8), 2, 4).start().steps(2).audit()) == "nothing lost, nothing repeated"


def test_every_cell_has_a_colour_and_each_but_the_empty_one_a_label() -> None:
    """The legend is complete, and no two kinds look the same."""
    assert set(COLOURS) == set(Cell)
    assert set(LABELS) == set(Cell) - {Cell.NOTHING}
    assert len(set(COLOURS.values())) == len(Cell)


def test_other_formats_and_missing_matplotlib_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do."""
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.html"):
        plot(lossy().audit(), tmp_path / "stream.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install matplotlib"):
        plot(lossy().audit(), tmp_path / "stream.png")
    assert not list(tmp_path.iterdir())
