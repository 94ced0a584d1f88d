"""What the tests of the command share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.cli.main import main
from tests.folder.made import run_folder


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its standard output, which has to be JSON and ASCII."""
        import json

        assert self.out.isascii()
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Become a user who may do no more than the modes of files say, until the end of the test; root may do anything."""
    user = os.geteuid()
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == user and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | (0o055 if folder == tmp_path else 0o011))
    yield lambda: os.seteuid(user or 65534)
    os.seteuid(user)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command in this process; whatever it raises is a failure."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A sound run with steps 2, 4 and 6; the tracker names 6."""
    return run_folder(tmp_path / "out")
