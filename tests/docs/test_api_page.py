"""docs/api.md documents every public name, and names nothing that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import DOCS, ROOT

SOURCE = ROOT / "src"
DIRECTIVES = re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.MULTILINE)


def exported() -> set[str]:
    """Dotted names of every `__all__` of a package that has one; read, not imported: a framework may be absent."""
    found: set[str] = set()
    for path in SOURCE.rglob("__init__.py"):
        package = ".".join(path.relative_to(SOURCE).parent.parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {f"{package}.{name}" for name in ast.literal_eval(node.value)}
    return found


def defines(module: Path) -> set[str]:
    """Public names that a module assigns, defines or imports at its top, under a condition too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_") or name.startswith("__")}


def module_of(dotted: str) -> Path | None:
    """The file of a module or package; None if it is neither."""
    place = SOURCE.joinpath(*dotted.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


def documented() -> set[str]:
    """Dotted names on the page, those inside a module that is documented as a whole included."""
    found = set(DIRECTIVES)
    for name in DIRECTIVES:
        if (module := module_of(name)) is not None:
            found |= {f"{name}.{member}" for member in defines(module)}
    return found


def test_every_public_name_is_documented() -> None:
    """Of each package: under the name that users import, or with the module of errors, which is there as a whole."""
    errors = {name.rpartition(".")[2] for name in documented() if name.startswith("agl_async_ckpt.exceptions.")}
    missing = {name for name in exported() - documented() if name.rpartition(".")[2] not in errors}
    assert exported()
    assert not missing


def test_every_documented_name_is_there() -> None:
    """And one directly below a package that has an `__all__` stands in it."""
    packages = {name.rpartition(".")[0] for name in exported()}
    for name in DIRECTIVES:
        if module_of(name) is not None:
            continue
        parent, _, member = name.rpartition(".")
        module = module_of(parent)
        assert module is not None, name
        assert member in defines(module), name
        assert parent not in packages or name in exported(), f"{name} is not public"


def test_no_name_is_documented_twice() -> None:
    """Two places would drift apart."""
    assert len(DIRECTIVES) == len(set(DIRECTIVES))
