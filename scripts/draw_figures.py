"""Draw the figures of the documentation: SVG files in docs/assets, each for a light and for a dark page.

python scripts/draw_figures.py            writes them
python scripts/draw_figures.py --check    exit code 1 if one of them is not what this script draws
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
WIDTH = 460
"""Of every figure, in its own units. Text of 13 of them stays legible on a telephone."""
SHOWN_WIDTH = 620
CELL = 30
LEFT = 12


@dataclass(frozen=True)
class Theme:
    """Colours on one background: strong enough for 4.5:1 on it, and apart from each other in grey as well."""

    name: str
    ink: str
    faint: str
    panel: str
    trained: str
    flight: str
    buffered: str
    lost: str


LIGHT = Theme("light", "#1f2328", "#59636e", "#f3f4f6", "#1a7f37", "#9a6700", "#0969da", "#cf222e")
DARK = Theme("dark", "#e6e8eb", "#a3abb6", "#2a2f3d", "#57ab5a", "#d9a441", "#6cb6ff", "#ff7b72")


class Drawing:
    """Shapes of one figure, in one theme."""

    def __init__(self, theme: Theme, title: str) -> None:
        self.theme = theme
        self._title = title
        self._shapes: list[str] = []
        self._height = 0.0

    def text(self, x: float, y: float, words: str, *, colour: str = "", size: int = 13, style: str = "") -> None:
        """Words whose baseline begins at (x, y); `style` holds more attributes."""
        self._add(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour or self.theme.ink}"{style}>'
            f"{escape(words)}</text>",
            y + 6,
        )

    def centred(self, x: float, y: float, words: str, *, colour: str = "", size: int = 13, bold: bool = False) -> None:
        """Words around x."""
        style = ' text-anchor="middle"' + (' font-weight="600"' if bold else "")
        self.text(x, y, words, colour=colour, size=size, style=style)

    def box(
        self, x: float, y: float, width: float, height: float, *, edge: str, fill: str = "", dash: str = ""
    ) -> None:
        """A rectangle with round corners."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill or self.theme.panel}" '
            f'stroke="{edge}" stroke-width="1.5"{dashed}/>',
            y + height,
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, colour: str, width: float = 1.5) -> None:
        """A straight line."""
        self._add(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"/>',
            max(y1, y2),
        )

    def arrow_down(self, x: float, y1: float, y2: float, *, colour: str) -> None:
        """An arrow from (x, y1) to (x, y2)."""
        self.line(x, y1, x, y2 - 5, colour=colour)
        self._add(f'<path d="M{x - 4:g} {y2 - 6:g} h8 l-4 6 z" fill="{colour}"/>', y2)

    def inputs(self, y: float, ids: list[str], colour: str, *, first: int, crossed: bool = False) -> None:
        """Cells with the names of inputs, from column `first` on."""
        for column, name in enumerate(ids, first):
            x = LEFT + column * (CELL + 1)
            self.box(x, y, CELL, CELL, edge=colour, dash="3 3" if colour == self.theme.faint else "")
            self.centred(x + CELL / 2, y + 20, name, colour=colour, bold=True)
            if crossed:
                self.line(x + 3, y + CELL - 3, x + CELL - 3, y + 3, colour=colour, width=2)

    def under(self, y: float, first: int, last: int, words: str, colour: str) -> None:
        """A bracket under columns `first` to `last`, and words under that."""
        x1, x2 = LEFT + first * (CELL + 1), LEFT + last * (CELL + 1) + CELL
        self.line(x1, y, x2, y, colour=colour, width=2.5)
        self.centred((x1 + x2) / 2, y + 16, words, colour=colour)

    def svg(self) -> str:
        """The file's text."""
        height = self._height + 8
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{SHOWN_WIDTH}" '
            f'height="{height * SHOWN_WIDTH / WIDTH:.0f}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self._title)}</title>\n" + "\n".join(self._shapes) + "\n</svg>\n"
        )

    def _add(self, shape: str, bottom: float) -> None:
        self._shapes.append(shape)
        self._height = max(self._height, bottom)


def one_checkpoint(theme: Theme) -> Drawing:
    """Where 14 inputs are at the checkpoint of step 1, and what each kind of resume does next (B = 4, A = 6)."""
    draw = Drawing(theme, "14 inputs, B = 4, A = 6: the checkpoint of step 1, and the two ways to resume from it")
    names = [str(each) for each in range(14)]
    y = 24.0
    draw.text(LEFT, y, "At the checkpoint of step 1", style=' font-weight="600"')
    draw.inputs(y + 10, names[0:4], theme.trained, first=0)
    draw.inputs(y + 10, names[4:6], theme.flight, first=4)
    draw.inputs(y + 10, names[6:8], theme.buffered, first=6)
    draw.inputs(y + 10, names[8:], theme.faint, first=8)
    draw.under(y + 46, 0, 3, "trained: B = 4", theme.trained)
    draw.under(y + 46, 4, 5, "in flight", theme.flight)
    draw.under(y + 46, 6, 7, "buffered", theme.buffered)
    draw.under(y + 46, 8, 13, "not read yet", theme.faint)
    x = LEFT + 8 * (CELL + 1)
    draw.line(x - 1, y + 2, x - 1, y + 48, colour=theme.ink, width=2.5)
    draw.text(LEFT, y + 83, "VERL saves the weights and the loader's place: after row 7.", colour=theme.faint)

    y = 146.0
    draw.text(LEFT, y, "Resumed without agl-async-ckpt", style=' font-weight="600"')
    draw.inputs(y + 10, names[4:8], theme.lost, first=4, crossed=True)
    draw.inputs(y + 10, names[8:12], theme.flight, first=8)
    draw.inputs(y + 10, ["0", "1"], theme.flight, first=12)
    draw.under(y + 46, 4, 7, "lost", theme.lost)
    draw.under(y + 46, 8, 13, "step 2 pulls; 0 1 are epoch 2", theme.flight)

    y = 244.0
    draw.text(LEFT, y, "Resumed with it: as if nothing had happened", style=' font-weight="600"')
    draw.inputs(y + 10, names[4:6], theme.flight, first=4)
    draw.inputs(y + 10, names[6:8], theme.buffered, first=6)
    draw.inputs(y + 10, names[8:10], theme.flight, first=8)
    draw.inputs(y + 10, names[10:12], theme.buffered, first=10)
    draw.under(y + 46, 4, 5, "in flight", theme.flight)
    draw.under(y + 46, 6, 9, "step 2 pulls", theme.flight)
    draw.under(y + 46, 10, 11, "buffered", theme.buffered)
    return draw


def way_of_an_input(theme: Theme) -> Drawing:
    """From the data set to the weights, and which checkpoint holds which part of it."""
    draw = Drawing(theme, "The way of an input from the data set to the weights, and which file holds which part of it")
    stations = [
        ("data set", "rows, in the sampler's order", theme.faint),
        ("loader", "hands out batches of B", theme.faint),
        ("buffered batch", "(-A) mod B rows, pulled too early", theme.buffered),
        ("in flight", "A - B prompt groups on agl-server", theme.flight),
        ("training step", "takes the B groups that are ready", theme.trained),
        ("weights", "of step N", theme.trained),
    ]
    width, height, gap = 250, 44, 20
    tops = [10.0 + number * (height + gap) for number in range(len(stations))]
    for number, (top, (name, words, colour)) in enumerate(zip(tops, stations, strict=True)):
        draw.box(LEFT, top, width, height, edge=colour)
        draw.centred(LEFT + width / 2, top + 18, name, colour=colour, bold=True)
        draw.centred(LEFT + width / 2, top + 35, words, colour=theme.ink, size=12)
        if number:
            draw.arrow_down(LEFT + width / 2, tops[number - 1] + height, top, colour=theme.faint)

    def held(x: float, first: int, last: int, words: list[str], colour: str) -> None:
        top, bottom = tops[first] + 2, tops[last] + height - 2
        draw.line(x, top, x, bottom, colour=colour, width=3)
        middle = (top + bottom) / 2 - 8 * (len(words) - 1)
        for number, each in enumerate(words):
            draw.text(x + 8, middle + 4 + 16 * number, each, colour=colour, size=12)

    held(LEFT + width + 14, 1, 1, ["VERL: data.pt"], theme.faint)
    held(LEFT + width + 14, 5, 5, ["VERL: actor/, critic/"], theme.faint)
    held(LEFT + width + 14, 2, 3, ["VERL: nothing", "agl-async-ckpt:", "agentlightning_input.pt"], theme.flight)
    return draw


FIGURES = {"one-checkpoint": one_checkpoint, "way-of-an-input": way_of_an_input}


def main(arguments: list[str]) -> int:
    """Write the files, or compare them."""
    stale = []
    for name, figure in FIGURES.items():
        for theme in (LIGHT, DARK):
            path, svg = ASSETS / f"{name}-{theme.name}.svg", figure(theme).svg()
            if "--check" not in arguments:
                path.write_text(svg)
            elif not path.exists() or path.read_text() != svg:
                stale.append(path)
    for path in stale:
        sys.stderr.write(f"{path} is not what scripts/draw_figures.py draws\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
