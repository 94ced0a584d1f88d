"""Wheel and sdist: what they hold, and that what is installed from them works away from the checkout."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from agl_async_ckpt import __version__
from tests.docs.environment import clone_of_head, linked_environment, tracked_files, variables
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NOT_SHIPPED = {".ci/run"}
"""Tracked files that an sdist does without."""


@dataclass(frozen=True)
class Built:
    """What `make build` has made of a clone."""

    clone: Path
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Wheel and sdist of a clean clone of HEAD."""
    clone = clone_of_head(tmp_path_factory.mktemp("clone") / "agl-async-ckpt")
    binaries = linked_environment(clone / ".venv")
    (clone / ".venv" / ".installed").touch()
    run(["make", "build"], clone, binaries)
    (wheel,) = (clone / "dist").glob("*.whl")
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    return Built(clone, wheel, sdist)


@pytest.fixture(scope="module")
def binaries(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh environment in which the wheel is installed, by pip and without its index."""
    found = linked_environment(tmp_path_factory.mktemp("fresh") / "venv")
    command = ["python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(built.wheel)]
    run(command, found.parent, found)
    return found


def run(command: list[str], cwd: Path, binaries: Path) -> str:
    """Run a command in an environment; returns its standard output."""
    done = subprocess.run(
        command, cwd=cwd, env=variables(binaries), capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    """Every tracked file of it, the marker of type hints too; no tests, no examples."""
    found = set(zipfile.ZipFile(built.wheel).namelist())
    package = {path.removeprefix("src/") for path in tracked_files(built.clone, "src/agl_async_ckpt")}
    assert "agl_async_ckpt/py.typed" in package
    metadata = f"agl_async_ckpt-{__version__}.dist-info/"
    assert {path for path in found if not path.startswith(metadata)} == package
    assert {path for path in found if path.startswith(metadata)} >= {f"{metadata}licenses/LICENSE"}


def test_sdist_holds_what_git_tracks(built: Built) -> None:
    """All that its tests, its docs and its Makefile need."""
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names == (tracked_files(built.clone) - NOT_SHIPPED) | {"PKG-INFO"}


def test_installed_wheel_shows_its_commands(binaries: Path, tmp_path: Path) -> None:
    """Away from the checkout: the command, its help, and the module of the same name."""
    from agl_async_ckpt.cli.main import COMMANDS

    shown = run(["agl-async-ckpt", "--help"], tmp_path, binaries)
    for command in COMMANDS:
        assert f"\n    {command} " in shown
    for call in (["agl-async-ckpt"], ["python", "-m", "agl_async_ckpt"]):
        assert run([*call, "--version"], tmp_path, binaries) == f"agl-async-ckpt {__version__}\n"
    place = run(["python", "-c", "import agl_async_ckpt; print(agl_async_ckpt.__file__)"], tmp_path, binaries)
    assert Path(place.strip()).is_relative_to(binaries.parent)


def test_tests_of_an_unpacked_sdist_pass_against_the_wheel(built: Built, binaries: Path, tmp_path: Path) -> None:
    """Some of each kind, which read pages, golden files and sources."""
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    files = ["tests/cli/test_inspect.py", "tests/docs/test_docs.py", "tests/docs/test_format_page.py"]
    run(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], unpacked, binaries)


def test_make_installs_the_wheel_and_does_so_once(built: Built, tmp_path: Path) -> None:
    """`FROM=wheel`: what is imported is no file of the checkout; a second call does nothing, a change is built anew."""
    binaries = built.clone / ".venv" / "bin"
    command = ["make", "install", "FROM=wheel"]
    assert "is ready, with dist/agl_async_ckpt-" in run(command, built.clone, binaries)
    place = ["python", "-c", "import agl_async_ckpt; print(agl_async_ckpt.__file__)"]
    assert "/.venv/lib/" in run(place, tmp_path, binaries)
    assert "Nothing to be done" in run([*command, "-n"], built.clone, binaries)
    (built.clone / "src" / "agl_async_ckpt" / "py.typed").touch()
    assert "python -m build" in run([*command, "-n"], built.clone, binaries)
    assert "install" in run(["make", "install", "FROM=source", "-n"], built.clone, binaries)


def test_tools_that_build_are_pinned() -> None:
    """Without isolation they come from the environment."""
    pins = (ROOT / "constraints.txt").read_text()
    for name in ("build", "hatchling"):
        assert f"\n{name}==" in pins
