"""Exit codes, and errors as one paragraph: whatever PATH is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.cli import main as cli_main
from agl_async_ckpt.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED
from agl_async_ckpt.storage.layout import FILE_NAME
from tests.cli.conftest import Cli

MODULE = [sys.executable, "-m", "agl_async_ckpt"]
LOOKING = [name for name in cli_main.COMMANDS if name != "audit"]
"""Commands that this folder tests; the ledger has tests of its own."""


def is_one_paragraph(text: str) -> bool:
    """An error of ours: named, no traceback, no empty line in it."""
    return text.startswith("agl-async-ckpt: ") and "Traceback" not in text and "\n\n" not in text


@pytest.mark.parametrize("command", LOOKING)
def test_missing_path_is_a_usage_error(cli: Cli, tmp_path: Path, command: str) -> None:
    """Exit code 2, the path named, nothing on standard output."""
    for path in (tmp_path / "none", tmp_path / "none" / "global_step_4", ""):
        result = cli(command, path)
        assert (result.code, result.out) == (2, "")
        assert is_one_paragraph(result.err)
        assert "does not exist" in result.err
        assert str(path) in result.err


@pytest.mark.parametrize("command", LOOKING)
def test_path_that_may_not_be_read_is_a_usage_error(
    cli: Cli, out: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason of the system. (The tests may run as root, who may read everything.)"""

    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("agl_async_ckpt.cli.target.os.scandir", refuse)
    result = cli(command, out)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"agl-async-ckpt: {out}: Permission denied\n"


@pytest.mark.parametrize("command", LOOKING)
def test_folder_without_permission_is_a_usage_error(cli: Cli, out: Path, command: str) -> None:
    """The real thing: as another user, where the tests run as root."""
    assert cli(command, out).code == 0  # everything that it imports is imported now
    out.chmod(0)
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)
        result = cli(command, out)
    finally:
        os.seteuid(user)
        out.chmod(0o755)
    assert (result.code, result.out) == (2, "")
    assert is_one_paragraph(result.err)
    assert "Permission denied" in result.err


@pytest.mark.parametrize("command", LOOKING)
def test_file_that_is_no_checkpoint_is_refused(cli: Cli, out: Path, command: str) -> None:
    """A text, an empty file, VERL's own file: never a traceback."""
    (out / "notes.txt").write_text("x" * 100)
    (out / "empty").touch()
    for path in (out / "notes.txt", out / "empty", out / "global_step_4" / "data.pt"):
        result = cli(command, path)
        assert result.code in (1, 2)
        assert is_one_paragraph(result.err) or command == "verify"
        assert str(path) in result.err + result.out


@pytest.mark.parametrize("command", LOOKING)
def test_thing_that_is_neither_file_nor_folder_is_refused(cli: Cli, tmp_path: Path, command: str) -> None:
    """A pipe would block for ever."""
    os.mkfifo(tmp_path / "pipe")
    result = cli(command, tmp_path / "pipe")
    assert result.code == 2
    assert "neither a folder nor a regular file" in result.err


@pytest.mark.parametrize("command", LOOKING)
def test_link_that_leads_nowhere_is_a_usage_error(cli: Cli, tmp_path: Path, command: str) -> None:
    """Said as the system says it."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    result = cli(command, tmp_path / "link")
    assert result.code == 2
    assert is_one_paragraph(result.err)


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["inspect"], ["inspect", "a", "b"], ["show", "a", "--rows", "-1"]], ids=str
)
def test_wrong_arguments_are_a_usage_error(cli: Cli, arguments: list[str]) -> None:
    """By argparse, with the usage."""
    result = cli(*arguments)
    assert result.code == 2
    assert result.err.startswith("usage: agl-async-ckpt")


@pytest.mark.parametrize("command", cli_main.COMMANDS)
def test_help_has_examples_and_exit_codes(cli: Cli, command: str) -> None:
    """Each example is one of this command."""
    result = cli(command, "--help")
    assert result.code == 0
    examples = result.out.partition("examples:\n")[2].partition("exit codes:\n")
    lines = [line.strip() for line in examples[0].splitlines() if line.strip()]
    assert lines
    assert all(line.startswith(f"agl-async-ckpt {command} ") for line in lines)
    assert [line.split()[0] for line in examples[2].splitlines() if line[2:3].isdigit()] == ["0", "1", "2"]


def test_help_lists_every_command(cli: Cli) -> None:
    """And the exit codes."""
    result = cli("--help")
    assert result.code == 0
    assert all(f"    {name} " in result.out for name in cli_main.COMMANDS)
    assert "exit codes:" in result.out


def test_interrupt_ends_without_a_traceback(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """130, as a shell has it."""

    def interrupt(_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("agl_async_ckpt.cli.inspect.find_target", interrupt)
    result = cli("inspect", out)
    assert (result.code, result.out, result.err) == (EXIT_INTERRUPTED, "", "")


def test_module_is_the_command_and_a_closed_pipe_ends_it_quietly(out: Path) -> None:
    """`python -m agl_async_ckpt inspect ... | head -0`: 141, nothing on standard error."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [*MODULE, "inspect", str(out)], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (EXIT_BROKEN_PIPE, "")


def test_interrupt_of_the_process_leaves_no_traceback(tmp_path: Path) -> None:
    """The real signal, while the command waits for the reader of its long output."""
    for step in range(1, 1001):
        (tmp_path / f"global_step_{step}").mkdir()
    with subprocess.Popen(
        [*MODULE, "inspect", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            while not _is_full(process.stdout.fileno()):
                assert process.poll() is None, "the output is too short to fill the pipe"
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, error) == (EXIT_INTERRUPTED, b"")


def _is_full(reading_end: int) -> bool:
    """Whether a write to the pipe would wait. Its number of bytes does not tell: the last page need not be full."""
    writing_end = os.open(f"/proc/self/fd/{reading_end}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [writing_end], [], 0)[1]
    finally:
        os.close(writing_end)


def test_damaged_file_is_named_by_every_command(cli: Cli, out: Path) -> None:
    """Exit code 1, also when the file itself is given."""
    file = out / "global_step_6" / FILE_NAME
    file.write_bytes(file.read_bytes()[:-1])
    for command in ("inspect", "show", "verify", "plan"):
        for path in (file, file.parent):
            result = cli(command, path)
            assert result.code == 1, command
            assert "damaged" in result.out + result.err
    assert cli("show", out).code == 1
    assert cli("verify", out).code == 1
    assert cli("plan", out).code == 1
    assert cli("inspect", out).code == 0


def test_empty_folder_has_nothing_to_look_at(cli: Cli, tmp_path: Path) -> None:
    """Planning in it works; there is nothing to list, to show or to verify."""
    assert {command: cli(command, tmp_path).code for command in ("inspect", "plan", "show", "verify")} == {
        "inspect": 2,
        "plan": 0,
        "show": 2,
        "verify": 2,
    }
    assert "Training from scratch" in cli("plan", tmp_path).out


def test_folder_above_a_run_names_the_run(cli: Cli, out: Path) -> None:
    """A step too high is the usual slip."""
    assert f"Did you mean {out}?" in cli("verify", out.parent).err
    assert f"Did you mean {out}?" in cli("inspect", out.parent).err


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("path", ["", "missing"])
def test_closed_stream_is_no_error(out: Path, closed: str, path: str) -> None:
    """What a shell has closed is not written to; the exit code is the same as ever."""
    command = [*MODULE, "inspect", str(out / path)]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    expected = subprocess.run(command, capture_output=True, check=False).returncode
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == expected == (2 if path else 0)
    assert "Traceback" not in done.stderr + done.stdout
