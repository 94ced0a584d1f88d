"""A clean clone of HEAD, and an environment for it that costs neither a download nor 6 GB."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


def clone_of_head(folder: Path) -> Path:
    """Clone what is committed: what a newcomer gets. Skips where there is no repository, as in an unpacked sdist."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the git repository: a clone of HEAD is tested")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=120)
    return folder


def tracked_files(clone: Path, below: str = ".") -> set[str]:
    """Paths of what git tracks."""
    done = subprocess.run(
        ["git", "ls-files", "-z", below], cwd=clone, capture_output=True, text=True, check=True, timeout=60
    )
    return set(filter(None, done.stdout.split("\0")))


def linked_environment(folder: Path) -> Path:
    """Make an environment that sees the packages and commands of this one, this package aside; returns its `bin`.

    A `.pth` line adds a folder to `sys.path`, and does not read the `.pth` files in it: so an editable install of this
    package is not seen, and what is installed here comes first. Packages of the outer environment cannot be changed
    from it: pip leaves alone what lies outside its own.
    """
    venv.create(folder, symlinks=True)
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    for script in Path(sys.executable).parent.iterdir():
        copy = folder / "bin" / script.name
        if copy.exists() or not os.access(script, os.X_OK) or script.is_dir():
            continue
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            copy.write_bytes(f"#!{folder}/bin/python\n".encode() + rest)
            copy.chmod(0o755)
        else:
            copy.symlink_to(script)
    return folder / "bin"


def variables(binaries: Path) -> dict[str, str]:
    """The environment variables of a shell that has an environment active, without any way to the network for pip."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "FROM")}
    dropped = ("PYTEST_", "MAKE", "PIP_", "RAY_", "VERL_", "AGL_")
    return {name: value for name, value in inherited.items() if not name.startswith(dropped)} | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(binaries.parent),
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
