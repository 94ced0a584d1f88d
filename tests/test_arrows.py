"""Which part of the package may import which: a change of one part is felt by the parts above it alone.

    __init__, __main__, worker, plugin     doors: they import what they open, nobody imports them
    cli, agl, openrlhf                     none imports another
        agl.stop
        agl.in_flight, agl.inputs          neither imports the other
        agl.internals                      what is known of the frameworks
    folder, ledger                         neither imports the other
    storage
    codec
    state, config                          config serves agl
    exceptions
    words, _version, _logging              leaves: they import nothing, anybody may import them

What `if TYPE_CHECKING` imports counts as well: who names a type knows the part that it lies in. The frameworks of
training are imported in `agl` and `openrlhf` alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import agl_async_ckpt

PACKAGE = "agl_async_ckpt"
SOURCE = Path(agl_async_ckpt.__file__).parent

DOORS = {"__init__", "__main__", "worker", "plugin"}
LEAVES = {"words", "_version", "_logging"}
ARROWS = {
    "cli": {"folder", "ledger"},
    "agl": {"agl.stop", "agl.inputs"},
    "agl.stop": {"agl.in_flight"},
    "agl.in_flight": {"agl.internals"},
    "agl.inputs": {"agl.internals"},
    "agl.internals": {"folder", "ledger", "config"},
    "openrlhf": {"folder", "ledger"},
    "folder": {"storage"},
    "ledger": {"storage"},
    "storage": {"codec"},
    "codec": {"state"},
    "state": {"exceptions"},
    "config": {"exceptions"},
    "exceptions": set(),
}
FRAMEWORKS = {"agentlightning", "openrlhf", "ray", "torchdata", "verl"}


@dataclass(frozen=True)
class Import:
    """A line of `file`, which lies in the folder `source`, that imports `module` of the package."""

    source: Path
    file: Path
    line: int
    module: str

    @property
    def importer(self) -> str:
        """The part that imports."""
        return part_of(self.file.relative_to(self.source).with_suffix("").parts)

    @property
    def imported(self) -> str:
        """The part that is imported."""
        return part_of(tuple(self.module.split(".")[1:]) or ("__init__",))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def part_of(names: tuple[str, ...]) -> str:
    """Find the part that a module lies in, from the names of its path below the package."""
    folder = ".".join(names[:2])
    return folder if folder in ARROWS else names[0]


def below(part: str) -> set[str]:
    """Follow the arrows from `part` to their ends."""
    return ARROWS[part].union(*map(below, ARROWS[part]))


def imports_of(file: Path, source: Path) -> Iterator[Import]:
    """Find what `file` imports of the package and of the frameworks, also in its functions, as modules that exist."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno} imports relatively; which part that is, it should say"
            names = [module_of(f"{node.module}.{alias.name}", source) for alias in node.names]
        else:
            continue
        for name in dict.fromkeys(names):
            if name.partition(".")[0] in {PACKAGE, *FRAMEWORKS}:
                yield Import(source, file, node.lineno, name)


def module_of(name: str, source: Path) -> str:
    """Cut the name of a class or a function off, so that a module is left."""
    path = source.parent.joinpath(*name.split("."))
    return name if path.with_suffix(".py").is_file() or path.is_dir() else name.rpartition(".")[0]


def is_allowed(found: Import) -> bool:
    """Tell whether an arrow of the picture leads from the importing part to the imported one."""
    importer, imported = found.importer, found.imported
    if not found.module.startswith(PACKAGE):
        return importer.partition(".")[0] in {"agl", "openrlhf"}
    if importer in DOORS or importer == imported:
        return True
    if importer in LEAVES:
        return False
    return imported in LEAVES or imported in below(importer)


def wrong_arrows(source: Path) -> list[Import]:
    """Find the imports below `source` that the picture does not show."""
    files = sorted(source.rglob("*.py"))
    return [found for file in files for found in imports_of(file, source) if not is_allowed(found)]


def test_parts_import_only_what_lies_below_them() -> None:
    """A new folder or module at the top needs a place in the picture first."""
    parts = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    parts |= {f"agl.{path.name}" for path in (SOURCE / "agl").iterdir() if (path / "__init__.py").exists()}
    assert parts == DOORS | LEAVES | set(ARROWS)
    assert not (wrong := wrong_arrows(SOURCE)), "\n".join(["", *map(str, wrong)])


def test_no_two_modules_import_each_other() -> None:
    """Neither straight nor by way of others."""
    graph: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name = ".".join((PACKAGE, *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = {found.module for found in imports_of(file, SOURCE) if found.module.startswith(PACKAGE)} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("file", "text", "module"),
    [
        ("storage/commit.py", "from agl_async_ckpt.folder.seal import read_seal", "agl_async_ckpt.folder.seal"),
        ("storage/commit.py", "def save():\n    import agl_async_ckpt.agl.save", "agl_async_ckpt.agl.save"),
        ("ledger/reader.py", "from agl_async_ckpt.folder import seal", "agl_async_ckpt.folder.seal"),
        ("agl/internals/loader.py", "from agl_async_ckpt.agl.save import save", "agl_async_ckpt.agl.save"),
        (
            "agl/inputs/fingerprint.py",
            "import agl_async_ckpt.agl.in_flight.standing",
            "agl_async_ckpt.agl.in_flight.standing",
        ),
        ("agl/stop/leaving.py", "from agl_async_ckpt.agl.save import save", "agl_async_ckpt.agl.save"),
        ("ledger/passes.py", "def draw():\n    import torchdata.nodes", "torchdata.nodes"),
        ("agl/save.py", "from agl_async_ckpt.cli import main", "agl_async_ckpt.cli"),
        ("words.py", "from agl_async_ckpt.exceptions import StateFormatError", "agl_async_ckpt.exceptions"),
        ("state.py", "from agl_async_ckpt import __version__", "agl_async_ckpt"),
    ],
)
def test_arrow_that_points_up_is_named_with_its_line(tmp_path: Path, file: str, text: str, module: str) -> None:
    """Also inside a function."""
    source = tmp_path / PACKAGE
    (source / file).parent.mkdir(parents=True)
    for name in ("folder/seal.py", "agl/save.py", "exceptions.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / file).write_text(f"\n\n{text}\n")
    (found,) = wrong_arrows(source)
    assert (found.file, found.line, found.module) == (source / file, 3 + text.count("\n"), module)
