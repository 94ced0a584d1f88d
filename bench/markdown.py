"""Figures as Markdown tables, for a page or a change request."""

from __future__ import annotations

import importlib
from itertools import groupby

from bench.figures import Figure, told


def tables(figures: list[Figure]) -> str:
    """One Markdown table per measurement, under its title."""
    parts: list[str] = []
    for name, group in groupby(figures, key=lambda figure: figure.measurement):
        title = importlib.import_module(f"bench.{name}").TITLE
        lines = [f"### {title[0].upper()}{title[1:]}", "", "| | measured | goal | | |", "|---|---:|---:|---|---|"]
        for figure in group:
            goal = "" if figure.at_most is None else f"≤ {told(figure.at_most, figure.unit)}"
            verdict = {None: "", True: "met", False: "**missed**"}[figure.met]
            lines.append(
                f"| {figure.what} | {told(figure.value, figure.unit)} | {goal} | {verdict} | {figure.against} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
