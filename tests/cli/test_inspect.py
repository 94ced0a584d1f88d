"""`inspect`: one row per step, cheap and safe."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from agl_async_ckpt.cli.inspect import _ranges
from agl_async_ckpt.codec.format import FORMAT_VERSION
from agl_async_ckpt.folder.run_identity import begin_life
from agl_async_ckpt.storage.container import read_trailer
from agl_async_ckpt.storage.layout import FILE_NAME, LOCK_FILE_NAME, RUN_FILE_NAME, SEAL_NAME, TRACKER_NAME
from tests.cli.conftest import Cli
from tests.folder.made import begin_run, flip, plain_save, save_step

KEYS = [
    "step",
    "path",
    "complete",
    "problems",
    "selected",
    "abandoned",
    "epoch",
    "exhausted",
    "buffered_inputs",
    "carry_over_groups",
    "carry_over_rollouts",
    "finished_rollouts",
    "bytes",
    "saved_at",
    "run_id",
    "format_version",
]


def test_json_has_exactly_the_documented_keys(cli: Cli, out: Path) -> None:
    """One object per step, in ascending order."""
    result = cli("inspect", out, "--json")
    rows = result.json()
    assert (result.code, result.err) == (0, "")
    assert [list(row) for row in rows] == [KEYS] * 3
    file = out / "global_step_6" / FILE_NAME
    assert rows[-1] == {
        "step": 6,
        "path": str(out / "global_step_6"),
        "complete": True,
        "problems": [],
        "selected": True,
        "abandoned": False,
        "epoch": 1,
        "exhausted": False,
        "buffered_inputs": 2,
        "carry_over_groups": 1,
        "carry_over_rollouts": 2,
        "finished_rollouts": 1,
        "bytes": file.stat().st_size,
        "saved_at": read_trailer(file).saved_at,
        "run_id": "run-1",
        "format_version": FORMAT_VERSION,
    }
    assert [(row["step"], row["selected"]) for row in rows] == [(2, False), (4, False), (6, True)]


def test_table_shows_each_step_and_which_one_is_selected(cli: Cli, out: Path) -> None:
    """With what it holds, its size and age, and who wrote it."""
    lines = cli("inspect", out).out.splitlines()
    assert lines[0].split() == [
        "step",
        "epoch",
        "buffered",
        "groups",
        "rollouts",
        "finished",
        "size",
        "age",
        "run",
        "version",
        "state",
    ]
    assert [line.split()[0] for line in lines[1:4]] == ["2", "4", "6"]
    assert lines[3].split()[:7] == ["6", "*", "1", "2", "1", "2", "1"]
    assert all(line.endswith("complete") for line in lines[1:4])
    assert lines[5] == f"* {TRACKER_NAME} names step 6."
    assert lines[6].startswith("Run run-1, steps 2, 4, 6: written by ")


def test_step_or_file_alone_is_one_row(cli: Cli, out: Path, tmp_path: Path) -> None:
    """By folder, by file, relative, with a trailing slash, and a file that was copied somewhere."""
    step = out / "global_step_4"
    for path in (step, f"{step}/", step / FILE_NAME):
        (row,) = cli("inspect", path, "--json").json()
        assert (row["step"], row["path"], row["complete"], row["selected"]) == (4, str(step), True, False)
    shutil.copy(step / FILE_NAME, tmp_path / "copy.pt")
    result = cli("inspect", tmp_path / "copy.pt", "--json")
    (row,) = result.json()
    assert result.code == 0
    assert (row["step"], row["complete"], row["buffered_inputs"]) == (4, False, 2)
    assert "no folder global_step_<N>" in row["problems"][0]


def test_step_that_is_not_complete_has_its_reason(cli: Cli, out: Path) -> None:
    """In the row, without its own path; asked for alone the exit code is 1."""
    (out / "global_step_4" / SEAL_NAME).unlink()
    file = out / "global_step_2" / FILE_NAME
    file.write_bytes(file.read_bytes()[:-5])
    result = cli("inspect", out)
    assert result.code == 0
    lines = result.out.splitlines()
    assert f"{FILE_NAME} is damaged" in lines[1]
    assert "did not finish" in lines[2]
    assert str(out) not in "".join(lines[1:3])
    assert [row["complete"] for row in cli("inspect", out, "--json").json()] == [False, False, True]
    assert cli("inspect", out / "global_step_4").code == 1
    assert cli("inspect", out / "global_step_6").code == 0


def test_altered_byte_shows_where_one_step_or_file_is_asked_for(cli: Cli, out: Path, tmp_path: Path) -> None:
    """A listing of many is cheap; one is read to its end."""
    file = out / "global_step_4" / FILE_NAME
    flip(file, 200)
    assert [row["complete"] for row in cli("inspect", out, "--json").json()] == [True] * 3
    for path in (file, file.parent):
        result = cli("inspect", path)
        assert result.code == 1
        assert "does not match its checksum" in result.out
    result = cli("inspect", shutil.copy(file, tmp_path / FILE_NAME))
    assert (result.code, result.out) == (1, "")
    assert "does not match its checksum" in result.err


def test_damaged_file_alone_is_json_too(cli: Cli, out: Path, tmp_path: Path) -> None:
    """A script that asks for JSON gets some, with the problem in it."""
    copy = shutil.copy(out / "global_step_4" / FILE_NAME, tmp_path / FILE_NAME)
    flip(Path(copy), 200)
    result = cli("inspect", copy, "--json")
    (row,) = result.json()
    assert (result.code, result.err) == (1, "")
    assert (row["step"], row["path"], row["complete"], row["bytes"]) == (None, str(copy), False, copy.stat().st_size)
    assert "does not match its checksum" in row["problems"][0]


def test_file_that_is_no_input_state_is_one_for_no_command(cli: Cli, out: Path, tmp_path: Path) -> None:
    """Nothing to check or show: exit code 2, by `inspect` and `verify` alike; under the usual name it is damage."""
    step = out / "global_step_4"
    text, whole, copy = tmp_path / "notes.txt", tmp_path / "loader.pt", tmp_path / "copy.pt"
    text.write_text("no zip")
    shutil.copy(step / "data.pt", whole)
    flip(Path(shutil.copy(step / FILE_NAME, copy)), 200)
    (tmp_path / "named").mkdir()
    shutil.copy(text, tmp_path / "named" / FILE_NAME)
    expected = {text: 2, whole: 2, copy: 1, tmp_path / "named" / FILE_NAME: 1}
    for command in ("inspect", "verify"):
        for path, code in expected.items():
            result = cli(command, path)
            assert result.code == code, (command, path)
            assert ("is no input state of agl-async-ckpt" in result.err) == (code == 2)


def test_step_that_a_trainer_is_saving_is_not_called_damaged(cli: Cli, out: Path) -> None:
    """As long as the folder is in use, and only the one that was written since its trainer came."""
    for step in (4, 6):
        (out / f"global_step_{step}" / SEAL_NAME).unlink()
    (out / TRACKER_NAME).write_text("2")
    file = out / "global_step_6" / FILE_NAME
    file.write_bytes(file.read_bytes()[:-5])
    before = time.time() - 60
    for path in (out / "global_step_4").rglob("*"):
        os.utime(path, (before - 60, before - 60))
    (out / LOCK_FILE_NAME).write_text(f'{{"host": "node-1", "pid": 4711, "since": {before}}}')
    with (out / LOCK_FILE_NAME).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        problems = [row["problems"] for row in cli("inspect", out, "--json").json()]
        assert "did not finish" in problems[1][0]
        assert problems[2] == ["being saved now, by process 4711 on node-1"]
        (found,) = cli("verify", out / "global_step_6", "--json").json()["steps"]
        assert [note["reason"] for note in found["notes"]] == problems[2]
        assert found["sound"]
    assert "is damaged" in cli("inspect", out, "--json").json()[2]["problems"][0]
    assert cli("verify", out / "global_step_6").code == 1


def test_step_without_an_input_state_says_why(cli: Cli, tmp_path: Path) -> None:
    """Plain, lost, or emptied by retention."""
    out = tmp_path / "out"
    plain_save(out, 1)
    begin_run(out, 2)
    for step in (2, 3, 4):
        save_step(out, step)
    for step in (2, 3):
        (out / f"global_step_{step}" / FILE_NAME).unlink()
    shutil.rmtree(out / "global_step_3" / "actor")
    (out / "global_step_3" / SEAL_NAME).unlink()
    rows = cli("inspect", out, "--json").json()
    assert [row["problems"] for row in rows] == [
        ["saved without the input position: the extension was not active"],
        [f"{FILE_NAME} is missing, though this run wrote them before"],
        ["no model and no input position: removed by retention, or never written"],
        [],
    ]
    assert [row["bytes"] is None and row["epoch"] is None for row in rows] == [True, True, True, False]


def test_tracker_that_names_nothing_is_said(cli: Cli, out: Path) -> None:
    """Missing, empty, of a step that is gone."""
    (out / TRACKER_NAME).unlink()
    assert f"There is no {TRACKER_NAME}: no step is selected." in cli("inspect", out).out
    (out / TRACKER_NAME).write_text("")
    assert "No step is selected: " in cli("inspect", out).out
    (out / TRACKER_NAME).write_text("7")
    assert f"{TRACKER_NAME} names step 7, which does not exist." in cli("inspect", out).out


def test_torn_run_file_does_not_stop_the_listing(cli: Cli, out: Path) -> None:
    """It is said, on standard error."""
    (out / RUN_FILE_NAME).write_text("{")
    result = cli("inspect", out, "--json")
    assert result.code == 0
    assert [row["complete"] for row in result.json()] == [True] * 3
    assert result.err.startswith("agl-async-ckpt: warning: ")


def test_exhausted_epoch_is_told(cli: Cli, tmp_path: Path) -> None:
    """The next pull begins another one."""
    save_step(tmp_path, 1, exhausted=True, epoch=3)
    assert cli("inspect", tmp_path, "--json").json()[0]["exhausted"] is True
    assert "3 (exhausted)" in cli("inspect", tmp_path).out


def test_age_counts_from_the_save(cli: Cli, out: Path) -> None:
    """By the time in the file, not by the file system's."""
    (row,) = cli("inspect", out / "global_step_4", "--json").json()
    assert 0 <= time.time() - row["saved_at"] < 300


def test_run_id_of_a_stranger_cannot_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """Trailers are data too."""
    save_step(tmp_path, 1, run_id="\x1b[2J", written_by={"agl-async-ckpt": "\x1b[31m1"})
    text = cli("inspect", tmp_path).out
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_steps_of_a_run_are_summed_up() -> None:
    """A few one by one, many by their ends."""
    assert (_ranges([3]), _ranges([3, 6, 9]), _ranges([3, 6, 9, 12])) == ("3", "3, 6, 9", "3 to 12")


def test_folder_that_is_no_output_folder_ends_with_2(cli: Cli, tmp_path: Path) -> None:
    """As the help says; a run that has not saved yet is one to look at."""
    for words in (("inspect", tmp_path), ("inspect", tmp_path, "--json")):
        result = cli(*words)
        assert (result.code, result.out) == (2, "")
        assert "There are no checkpoints" in result.err
    begin_life(tmp_path)
    result = cli("inspect", tmp_path)
    assert (result.code, "There are no checkpoints" in result.out) == (0, True)
