"""What the package exports, and that asking for it costs no import of the frameworks."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agl_async_ckpt

REPO_DIR = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "ray", "omegaconf", "hydra", "verl", "agentlightning", "torchdata", "transformers")


def resolves(dotted: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            found = getattr(found, name, None)
        return found is not None
    return False


def imported_after(*statements: str) -> list[set[str]]:
    """Heavy packages that a fresh interpreter has imported after each statement."""
    look = f"found.append(sorted({set(HEAVY)!r} & set(sys.modules)))"
    lines = ["import json, sys", "found = []", *(line for statement in statements for line in (statement, look))]
    lines.append("print(json.dumps(found))")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        cwd=REPO_DIR,
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [set(item) for item in json.loads(run.stdout)]


def test_exported_names_are_pinned() -> None:
    """Adding or removing a public name is a decision."""
    assert agl_async_ckpt.__all__ == [
        "AsyncCheckpointMixin",
        "AsyncCheckpointTrainer",
        "StopRequested",
        "TrainingStopped",
        "__version__",
        "run_ppo",
    ]
    assert dir(agl_async_ckpt) == agl_async_ckpt.__all__


def test_unknown_name_is_an_attribute_error() -> None:
    """Lazy exports answer like any module."""
    with pytest.raises(AttributeError, match="'agl_async_ckpt' has no attribute 'AsyncCheckpointer'"):
        agl_async_ckpt.AsyncCheckpointer  # type: ignore[attr-defined]  # noqa: B018


def test_plain_import_is_light_and_the_launcher_imports_no_framework() -> None:
    """Ray imports the package in every worker: no torch for the package, no verl or agent-lightning for a launcher."""
    plain, worker, plugin, names = imported_after(
        "import agl_async_ckpt",
        "import agl_async_ckpt.worker, agl_async_ckpt.agl.activation",
        "import agl_async_ckpt.plugin",
        "from agl_async_ckpt import AsyncCheckpointMixin, StopRequested, TrainingStopped, run_ppo",
    )
    assert plain == worker == plugin == set()
    assert not names & {"verl", "agentlightning", "ray", "omegaconf", "hydra", "torchdata", "transformers"}


def test_page_on_switching_on_names_what_exists() -> None:
    """Hook, plugin, function and classes are there under the names that people copy; so is the variable."""
    pytest.importorskip("agentlightning")
    from agl_async_ckpt import worker
    from agl_async_ckpt.agl import activation

    installed = activation._installed
    activation._installed = True  # importing the plugin must not switch this process on
    try:
        page = (REPO_DIR / "docs" / "switching-on.md").read_text()
        names = set(re.findall(r"\bagl_async_ckpt(?:\.\w+)+", page))
        assert {worker.SETUP_HOOK, "agl_async_ckpt.plugin", "agl_async_ckpt.run_ppo"} <= names
        assert [name for name in names if not resolves(name)] == []
    finally:
        activation._installed = installed
    assert set(re.findall(r"from agl_async_ckpt import (\w+)", page)) <= {*agl_async_ckpt.__all__, "worker"}
    assert f"`{worker.CHAINED_HOOK_VARIABLE}=" in page
