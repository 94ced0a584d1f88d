"""What is known of agent-lightning, VERL, torchdata and Ray lies in `agl/internals`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import agl_async_ckpt
from agl_async_ckpt.agl import internals

SOURCE = Path(agl_async_ckpt.__file__).parent
FILES = [
    file
    for file in sorted(SOURCE.rglob("*.py"))
    if file.relative_to(SOURCE).parts[:2] != ("agl", "internals") and file.relative_to(SOURCE).parts[0] != "openrlhf"
]
FRAMEWORKS = {"agentlightning", "verl", "torchdata", "ray"}
ENTRANCES = {
    "agl/async_checkpoint_trainer.py": {"agentlightning"},  # its base class
    "agl/entrypoint.py": {"agentlightning", "ray"},  # `run_ppo` around agent-lightning's
}
OF_PYTHON = {"_exit", "_replace"}


def nodes(file: Path) -> Iterator[ast.AST]:
    """What runs in a module: the base class of a mixin may be named for the type checker."""
    to_do: list[ast.AST] = [ast.parse(file.read_text())]
    while to_do:
        node = to_do.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            to_do += node.orelse
        else:
            to_do += ast.iter_child_nodes(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Private names that this package defines: functions, methods, and attributes that a method assigns."""
    found = set()
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def test_private_names_of_frameworks_are_used_in_internals_alone() -> None:
    """Overridden methods aside, which are called by `self` and `super()`."""
    protocols = (internals.Trainer, internals.RolloutManager)
    methods = {name for protocol in protocols for name in internals.methods_of(protocol)}
    attributes = {name for protocol in protocols for name in protocol.__annotations__}
    ours = (own_names() | OF_PYTHON) - methods - attributes
    wrong = []
    for file in FILES:
        for node in nodes(file):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in ours:
                continue
            if node.attr not in methods or ast.unparse(node.value) not in ("self", "super()"):
                wrong.append(f"{file.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_frameworks_are_imported_in_internals_alone() -> None:
    """And where the package stands in their place."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        for node in nodes(file):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            frameworks = FRAMEWORKS & {name.partition(".")[0] for name in names}
            if frameworks:
                found.setdefault(file.relative_to(SOURCE).as_posix(), set()).update(frameworks)
    assert found == ENTRANCES


def test_broken_contracts_name_modules_that_exist() -> None:
    """The message of a contract says which module is to be adapted."""
    wrong = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("agl", "verl", "broken"):
                named = [*node.args[-1:], *(keyword.value for keyword in node.keywords if keyword.arg == "used_in")][-1]
                if isinstance(named, ast.Constant) and not (SOURCE / str(named.value)).is_file():
                    wrong.append(f"{file.name}:{named.lineno} names {named.value}")
    assert not wrong, "\n".join(wrong)
