"""Reading the documentation: sections, tables, fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Path below the repository.
        number: Among the blocks of its page, from 1.
        language: `bash`, `text`, ...; empty if it names none.
        code: Its lines, without the fence.
        line: Of the page, from 1, at which its code begins.
    """

    page: str
    number: int
    language: str
    code: str
    line: int


def all_pages() -> list[Path]:
    """Those of the root, the changelog aside, and every page of the site, folders of it included."""
    return [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, *languages: str) -> list[Block]:
    """Every fenced block of a page, or those of some languages; numbered before the choice."""
    text = page.read_text()
    found = [
        Block(str(page.relative_to(ROOT)), number, match[2], match[3], text.count("\n", 0, match.start(3)) + 1)
        for number, match in enumerate(_FENCE.finditer(text), start=1)
    ]
    return [block for block in found if not languages or block.language in languages]


def sections(page: str, level: int = 2) -> dict[str, str]:
    """Title -> text of the sections of one level; titles in backticks without them."""
    parts = re.split(rf"^{'#' * level} (.+)$", _without_fences((DOCS / page).read_text()), flags=re.MULTILINE)
    titles, texts = parts[1::2], parts[2::2]
    assert len(set(titles)) == len(titles), f"docs/{page} has two sections of one title"
    return {title.strip().strip("`"): _with_fences(text) for title, text in zip(titles, texts, strict=True)}


def table(text: str, *header: str) -> list[list[str]]:
    """Cells of each row of the one table with this header."""
    head = r"^\|" + "".join(rf" *{re.escape(title)} *\|" for title in header) + r"\n\|[-:| ]+\|\n((?:\|.*\n?)+)"
    found = re.findall(head, text, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} tables with the header {header}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found[0].splitlines()]


def names(cells: list[str]) -> list[str]:
    """Every name in backticks in some cells."""
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


# A line of a fenced block may begin with "#", as a title does.
def _without_fences(text: str) -> str:
    return _FENCE.sub(lambda match: re.sub(r"^", "\0", match[0], flags=re.MULTILINE), text)


def _with_fences(text: str) -> str:
    return text.replace("\0", "")
