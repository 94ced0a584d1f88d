"""A picture of the stream: steps across, inputs down, resumes as lines."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from agl_async_ckpt.exceptions import UsageError
from agl_async_ckpt.ledger.audit import Audit
from agl_async_ckpt.ledger.entry import InputName, position_of
from agl_async_ckpt.ledger.grid import Cell, Grid, build_grid
from agl_async_ckpt.words import plural

SUFFIXES = (".png", ".svg", ".html")

# Okabe and Ito's palette: told apart with any kind of colour vision, and in grey.
COLOURS = {
    Cell.NOTHING: "#ffffff",
    Cell.DONE: "#d6e6f2",
    Cell.TRAINED: "#0072b2",
    Cell.PULLED: "#56b4e9",
    Cell.IN_FLIGHT: "#f0e442",
    Cell.DROPPED: "#999999",
    Cell.REPEATED: "#cc79a7",
    Cell.LOST: "#d55e00",
}
LABELS = {
    Cell.PULLED: "pulled or buffered",
    Cell.IN_FLIGHT: "in flight",
    Cell.TRAINED: "trained in this step",
    Cell.DONE: "trained before",
    Cell.DROPPED: "dropped by the trainer",
    Cell.REPEATED: "repeated",
    Cell.LOST: "lost",
}
MAX_NAMED_INPUTS = 64
MAX_HEIGHT, MAX_WIDTH = 900, 1600
MAX_NAMED_RESUMES = 8
DPI = 120


def plot(audit: Audit, path: Path) -> None:
    """Write the picture of an audit.

    Args:
        audit: Of the run.
        path: `.png`, `.svg`, or `.html` (the SVG in a page of its own, without any reference outside).

    Raises:
        UsageError: Another suffix, or matplotlib is not installed.
        OSError: The file cannot be written.
    """
    suffix = require_suffix(path)
    data = _render(audit, "png" if suffix == ".png" else "svg")
    if suffix == ".html":
        data = _page(audit, data.decode()).encode()
    path.write_bytes(data)


def require_suffix(path: Path) -> str:
    """Return the kind of picture that a path asks for.

    Raises:
        UsageError: There is no such kind.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"The picture {path} must end in one of {', '.join(SUFFIXES)}.")
    return suffix


def verdict(audit: Audit) -> str:
    """Return the outcome in one line."""
    if audit.holds:
        return "nothing lost, nothing repeated"
    others = f", {plural(audit.num_others, 'other problem')}" if audit.num_others else ""
    return f"{plural(len(audit.lost), 'input')} lost, {len(audit.repeated)} repeated{others}"


def _render(audit: Audit, file_format: str) -> bytes:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("The picture needs matplotlib, which is not installed: pip install matplotlib.") from None
    grid = build_grid(audit, max_height=MAX_HEIGHT, max_width=MAX_WIDTH)
    # Text stays text and ids are fixed, so that the same audit gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "agl-async-ckpt", "font.size": 9.0}):
        figure = Figure(figsize=_size(grid), dpi=DPI, layout="constrained")
        _draw(figure.subplots(), audit, grid)
        out = io.BytesIO()
        metadata = {"Date": None} if file_format == "svg" else {}
        figure.savefig(out, format=file_format, metadata=metadata)
    return out.getvalue()


def _size(grid: Grid) -> tuple[float, float]:
    width = min(12.0, max(7.5, 2.5 + 0.3 * grid.num_steps))
    height = min(8.5, max(3.4, 1.9 + 0.17 * grid.num_inputs))
    return width, height


def _draw(axes: Any, audit: Audit, grid: Grid) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    extent = (grid.first_step - 0.5, grid.first_step + grid.num_steps - 0.5, grid.num_inputs + 0.5, 0.5)
    colours = ListedColormap([COLOURS[cell] for cell in Cell])
    if grid.num_inputs <= MAX_NAMED_INPUTS and grid.num_steps <= MAX_WIDTH:
        # As shapes: sharp at any size, with a gap between inputs.
        x = [grid.first_step - 0.5 + column for column in range(grid.num_steps + 1)]
        y = [0.5 + line for line in range(grid.num_inputs + 1)]
        axes.pcolormesh(
            x, y, grid.cells, cmap=colours, vmin=0, vmax=len(Cell) - 1, edgecolors="white", linewidth=1, snap=True
        )
        axes.set_xlim(extent[0], extent[1])
        axes.set_ylim(extent[2], extent[3])
        axes.set_yticks(range(1, grid.num_inputs + 1), [_label(row.name) for row in audit.walk.rows], fontsize=7)
        axes.tick_params(axis="y", length=0)
        order = "inputs in the order of pulling"
        if all(position_of(row.name) is not None for row in audit.walk.rows):
            order += " (dataset row)"
    else:
        axes.imshow(
            grid.cells, cmap=colours, vmin=0, vmax=len(Cell) - 1, aspect="auto", interpolation="none", extent=extent
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        order = "inputs in the order of pulling (number)"
    axes.set_ylabel(order)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    _draw_resumes(axes, audit)
    _draw_epochs(axes, audit, extent[1])
    shown = {Cell(int(code)) for code in set(grid.cells.ravel().tolist())}
    patches = [Patch(facecolor=COLOURS[cell], label=label) for cell, label in LABELS.items() if cell in shown]
    axes.figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, handlelength=1.2)
    resumes = plural(len(audit.walk.resumes), "resume")
    colour = "#000000" if audit.holds else "#a33f00"
    axes.figure.suptitle(verdict(audit), x=0.01, ha="left", fontsize=12, fontweight="bold", color=colour)
    inputs = f"{len(audit.walk.rows):,} inputs drawn from the loader"
    axes.set_title(f"steps {audit.first.step + 1} to {audit.last_step}, {resumes}, {inputs}", loc="left", fontsize=9)


def _draw_resumes(axes: Any, audit: Audit) -> None:
    named = len(audit.walk.resumes) <= MAX_NAMED_RESUMES
    for start in audit.walk.resumes:
        axes.axvline(start.step + 0.5, color="#333333", linewidth=1.0, linestyle=(0, (4, 2)))
        if named:
            axes.annotate(
                f"resume from {start.step}",
                (start.step + 0.5, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -3),
                textcoords="offset points",
                rotation=90,
                va="top",
                fontsize=7,
                color="#333333",
            )


def _draw_epochs(axes: Any, audit: Audit, right: float) -> None:
    """Draw a line where an epoch begins, if there are several."""
    begins: list[tuple[int, tuple[int, int]]] = []
    for index, row in enumerate(audit.walk.rows):
        if row.epoch is not None and (not begins or begins[-1][1] != row.epoch):
            begins.append((index, row.epoch))
    if len({epoch for _, epoch in begins}) < 2 or len(begins) > MAX_NAMED_INPUTS:
        return
    for index, epoch in begins:
        axes.axhline(index + 0.5, color="#777777", linewidth=0.6)
        axes.annotate(
            f" epoch {epoch[1]}", (right, index + 0.5), va="top", fontsize=7, color="#333333", annotation_clip=False
        )


def _label(name: InputName) -> str:
    position = position_of(name)
    return name[:8] if position is None else str(position)


def _page(audit: Audit, svg: str) -> str:
    title = html.escape(f"{verdict(audit)}: steps {audit.first.step + 1} to {audit.last_step}")
    problems = "".join(f"<li>{html.escape(problem.text)}</li>" for problem in audit.problems)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{font-family:sans-serif;margin:1rem}svg{max-width:100%;height:auto}</style></head>\n"
        f"<body>\n{svg[svg.index('<svg') :]}\n<ul>{problems}</ul>\n</body>\n</html>\n"
    )
