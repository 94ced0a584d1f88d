"""`audit`: exit codes, output for people and for programs, pictures, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_async_ckpt.storage.layout import LEDGER_NAME
from tests.cli.conftest import Cli
from tests.ledger.story import Story, dataset

RUNS = Path(__file__).parents[1] / "ledger" / "demo_runs"


def sound() -> Story:
    """A run that has resumed exactly."""
    return Story(dataset(30), 2, 5).start().steps(5).start(3, resume="exact").steps(4).end()


def lossy() -> Story:
    """A run that lost what was pulled."""
    story = Story(dataset(30), 2, 5).start().steps(5)
    return story.start(3, resume="verl", lose_in_flight=True, lose_buffered=True).steps(4)


def test_audit_of_a_sound_run_is_0_and_of_a_lossy_one_1(cli: Cli, tmp_path: Path) -> None:
    """With the lost rows by name, the step and the life."""
    result = cli("audit", sound().write(tmp_path / "sound"))
    assert (result.code, result.err) == (0, "")
    assert "nothing lost, nothing repeated" in result.out
    assert "Training is over" in result.out
    result = cli("audit", lossy().write(tmp_path / "lossy"))
    assert (result.code, result.err) == (1, "")
    assert "3 inputs in flight at step 3 were lost at the resume of life 2" in result.out
    assert "Dataset rows: 6, 7, 8" in result.out
    assert "4 lost, 0 repeated" in result.out
    assert "2 steps thrown away" in result.out


def test_audit_of_a_ledger_with_gaps_says_that_it_cannot_be_told(cli: Cli, tmp_path: Path) -> None:
    """Nothing is known to be lost; beside a loss the gap is counted."""
    for story, text in (
        (sound(), "Whether the promise was kept cannot be told: the ledger does not account for every step.\n"),
        (lossy(), "The promise was not kept: 4 lost, 0 repeated, 2 other problems.\n"),
    ):
        path = story.write(tmp_path) / LEDGER_NAME
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:1], *lines[2:]]))
        result = cli("audit", tmp_path)
        assert (result.code, result.out.endswith(text)) == (1, True), result.out
        path.unlink()


def test_audit_json_holds_what_the_text_says(cli: Cli, tmp_path: Path) -> None:
    """One object."""
    result = cli("audit", lossy().write(tmp_path), "--json")
    values = result.json()
    assert (result.code, values["holds"], values["last_step"], values["lives"]) == (1, False, 7, 2)
    assert [len(problem["inputs"]) for problem in values["problems"]] == [3, 1]
    epoch = values["epochs"][0]
    assert epoch["trained_0"] + epoch["trained_1"] + epoch["trained_2_or_more"] == epoch["num_inputs"] == 30
    assert len(epoch["lost"]) == 4


def test_audit_takes_the_ledger_itself_and_a_step_folder(cli: Cli, tmp_path: Path) -> None:
    """What a user has at hand."""
    folder = sound().write(tmp_path)
    (folder / "global_step_3").mkdir()
    assert cli("audit", folder / LEDGER_NAME).code == 0
    assert cli("audit", folder / "global_step_3").code == 0


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_audit_draws_a_picture(cli: Cli, tmp_path: Path, suffix: str) -> None:
    """And says where."""
    picture = tmp_path / f"stream.{suffix}"
    result = cli("audit", sound().write(tmp_path), "--plot", picture)
    assert (result.code, result.err) == (0, "")
    assert str(picture) in result.out
    assert picture.stat().st_size > 1000


def test_audit_of_a_run_that_is_writing_looks_at_what_is_whole(cli: Cli, tmp_path: Path) -> None:
    """The file grows, and its last line is not finished."""
    story = Story(dataset(30), 2, 5).start().steps(3)
    path = story.write(tmp_path) / LEDGER_NAME
    path.write_bytes(path.read_bytes()[:-20])
    result = cli("audit", tmp_path)
    assert result.code == 0
    assert "steps 1 to 2" in result.out
    assert "unfinished" in result.out
    assert "goes on, or was stopped or killed" in result.out


def test_audit_takes_a_copy_of_a_ledger_under_another_name(cli: Cli, tmp_path: Path) -> None:
    """And says of another file that it is none."""
    copy = tmp_path / "last_week.jsonl"
    copy.write_bytes((sound().write(tmp_path / "run") / LEDGER_NAME).read_bytes())
    assert cli("audit", copy).code == 0
    copy.write_text("notes\n")
    result = cli("audit", copy)
    assert (result.code, f"{copy} is no ledger: line 1" in result.err) == (1, True)


def test_audit_of_an_empty_path_is_not_of_the_working_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is not set must not have another run audited."""
    monkeypatch.chdir(sound().write(tmp_path))
    assert cli("audit", ".").code == 0
    result = cli("audit", "")
    assert (result.code, "The empty path does not exist." in result.err) == (2, True)


def test_audit_of_a_ledger_that_may_not_be_read_is_2(cli: Cli, tmp_path: Path, stranger: Callable[[], None]) -> None:
    """The promise is neither kept nor broken."""
    path = sound().write(tmp_path) / LEDGER_NAME
    assert cli("audit", tmp_path).code == 0  # everything that it imports is imported now
    path.chmod(0)
    stranger()
    result = cli("audit", tmp_path)
    assert (result.code, result.err) == (2, f"agl-async-ckpt: {path} cannot be read: Permission denied.\n")


def test_bad_input_is_one_paragraph_without_a_traceback(cli: Cli, tmp_path: Path) -> None:
    """No path, a folder without a ledger, no ledger at all in the file, a picture of an unknown kind."""
    folder = sound().write(tmp_path / "sound")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / LEDGER_NAME).write_bytes(b"\x80\x81\n\xff")
    cases = [
        (("audit", tmp_path / "nothing"), 2, "does not exist"),
        (("audit", tmp_path / "empty"), 2, LEDGER_NAME),
        (("audit", tmp_path / "damaged"), 1, "is no ledger"),
        (("audit", folder, "--plot", tmp_path / "x.pdf"), 2, ".png, .svg, .html"),
        (("audit", folder, "--plot", tmp_path / "no" / "x.png"), 2, "No such file"),
        (("audit",), 2, "PATH"),
    ]
    for arguments, code, text in cases:
        result = cli(*arguments)
        assert (result.code, result.out) == (code, ""), arguments
        assert text in result.err
        assert "Traceback" not in result.err


@pytest.mark.parametrize("name", ["stock", "protected"])
def test_audit_of_a_real_run_of_the_demo_says_what_its_verdict_says(cli: Cli, name: str) -> None:
    """Ledger and verdict of `make demo`: the recorder that the verdict comes from knows nothing of the ledger."""
    verdict = json.loads((RUNS / name / "verdict.json").read_text())
    result = cli("audit", RUNS / name, "--json")
    values = result.json()
    assert result.code == (0 if verdict["holds"] else 1)
    lost = [int(each.partition("@")[2]) for problem in values["problems"] for each in problem["inputs"]]
    assert sorted(lost) == verdict["lost"]
    assert bool(lost) == (name == "stock")
    (epoch,) = values["epochs"]
    assert epoch["repeated"] == [] == verdict["repeated"]
    assert [int(each.partition("@")[2]) for each in epoch["in_flight_at_end"]] == verdict["in_flight"]
    assert [int(each.partition("@")[2]) for each in epoch["buffered_at_end"]] == verdict["buffered"]
    assert epoch["trained_1"] == len(verdict["trained_once"])
    where = {int(each.partition("@")[2]): problem for problem in values["problems"] for each in problem["inputs"]}
    for row, place in verdict["lost_where"].items():
        assert place in where[int(row)]["text"]
