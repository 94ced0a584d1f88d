"""`show`: the contents of one step."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from agl_async_ckpt.storage.layout import FILE_NAME, TRACKER_NAME
from tests.cli.conftest import Cli
from tests.folder.made import group, plain_save, save_step
from tests.golden.sample import NUMPY_2, objects


def test_position_rows_and_groups_are_shown(cli: Cli, out: Path) -> None:
    """The step that a resume takes, if the output folder is given."""
    text = cli("show", out).out
    assert text.startswith(f"{out / 'global_step_6' / FILE_NAME}: step 6 of run run-1\n")
    assert "Buffered: 2 rows pulled and not yet enqueued.\nrow  question\n  0  1+1?\n  1  2+2?\n" in text
    assert "(1 more column: --column NAME)" in text
    assert "In flight: 1 prompt group, oldest first." in text
    (line,) = [line for line in text.splitlines() if line.startswith("data-7")]
    assert line.split()[1] == "6"
    assert line.endswith(" d  1 of 2    7+7?      3")
    (out / TRACKER_NAME).write_text("4")
    assert "step 4 of run" in cli("show", out).out


def test_json_holds_everything_uncut(cli: Cli, tmp_path: Path) -> None:
    """Texts whole, tensors by dtype and shape, all rows, all columns."""
    long = "x" * 5000
    batch = {"text": objects(*[long] * 9), "ids": torch.zeros(9, 4, dtype=torch.int32)}
    save_step(tmp_path, 3, buffered_batch=batch, carry_over=tuple(group(f"d{i}", 3, {"q": i}) for i in range(8)))
    found = cli("show", tmp_path, "--json").json()
    assert found["buffered"] == [{"text": long, "ids": "<int32 [4]>"}] * 9
    assert [item["input"] for item in found["carry_over"]] == [{"q": i} for i in range(8)]
    assert found["carry_over"][0]["rollouts"] == [
        {"rollout_id": "d0-0", "finished": False},
        {"rollout_id": "d0-1", "finished": False},
    ]
    assert (found["step"], found["epoch"], found["exhausted"], found["run_id"]) == (3, 1, False, "run-1")
    assert found["fingerprint"] == {"must_match": {"seed": 7}, "recorded": {}}
    some = cli("show", tmp_path, "--json", "--rows", "2", "--column", "ids", "--column", "q").json()
    assert some["buffered"] == [{"ids": "<int32 [4]>"}] * 2
    assert [item["input"] for item in some["carry_over"]] == [{"q": 0}, {"q": 1}]
    assert (some["num_buffered_inputs"], some["num_carry_over_groups"]) == (9, 8)


def test_rows_and_columns_are_chosen(cli: Cli, tmp_path: Path) -> None:
    """Five rows and four columns without being told; long texts are cut."""
    batch = {f"c{i}": objects(*["word " * 100] * 7) for i in range(6)}
    save_step(tmp_path, 3, buffered_batch=batch, carry_over=())
    lines = cli("show", tmp_path).out.splitlines()
    assert lines[5].split() == ["row", "c0", "c1", "c2", "c3"]
    assert lines[6] == "  0" + f"  {'word ' * 7}word…" * 4
    assert [line.split()[0] for line in lines[6:11]] == ["0", "1", "2", "3", "4"]
    assert lines[11] == "(2 more: --rows 7; 2 more columns: --column NAME)"
    lines = cli("show", tmp_path, "--rows", "7", "--column", "c5").out.splitlines()
    assert lines[5].split() == ["row", "c5"]
    assert lines[12].startswith("  6  word")
    lines = cli("show", tmp_path, "--rows", "0").out.splitlines()
    assert lines[4:7] == [
        "Buffered: 7 rows pulled and not yet enqueued.",
        "",
        "In flight: 0 prompt groups, oldest first.",
    ]


@pytest.mark.parametrize(
    ("buffered", "expected"), [(("q", "b", "a", "z"), ["q", "b", "a", "c"]), ((), ["a", "b", "c", "q"])]
)
def test_columns_in_flight_stand_in_one_order(
    cli: Cli, tmp_path: Path, buffered: tuple[str, ...], expected: list[str]
) -> None:
    """That of the buffered rows, then by name, in whatever order the trainer had them."""
    batch = {name: objects("text") for name in buffered} or None
    for step, names in enumerate(itertools.permutations("abcq"), 1):
        carry_over = (group("d", step, dict.fromkeys(names, 1)),)
        path = save_step(tmp_path, step, buffered_batch=batch, carry_over=carry_over)
        (header,) = [line for line in cli("show", path).out.splitlines() if line.startswith("data_id")]
        assert header.split()[4:] == expected


def test_unknown_column_names_the_known_ones(cli: Cli, out: Path) -> None:
    """Exit code 2."""
    result = cli("show", out, "--column", "questoin")
    assert (result.code, result.out) == (2, "")
    assert result.err == "agl-async-ckpt: There is no column 'questoin'. There are: question, input_ids, level.\n"


def test_columns_of_tensors_alone_are_shown_by_shape(cli: Cli, tmp_path: Path) -> None:
    """Where nothing else is there, and an input that is no mapping."""
    batch = {"ids": torch.zeros(1, 4, dtype=torch.int64), "mask": np.ones((1, 4), dtype=bool)}
    save_step(tmp_path, 3, buffered_batch=batch, carry_over=(group("d", 3, "a plain text"),))  # type: ignore[arg-type]
    text = cli("show", tmp_path).out
    assert "  0  <int64 [4]>  <bool [4]>" in text
    assert "a plain text" in text


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_data_cannot_steer_the_terminal(cli: Cli, tmp_path: Path, arguments: list[str]) -> None:
    """Not in values, not in column names, not in ids."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    save_step(
        tmp_path,
        3,
        buffered_batch={evil: objects(evil)},
        carry_over=(group(evil, 3, {evil: evil}),),
        run_id=evil,
        written_by={evil: evil},
    )
    text = cli("show", tmp_path, *arguments).out
    assert "owned" in text
    assert not set(evil) & set(text) - set("]0;owned[2J31m")


def test_every_kind_of_value_is_shown(cli: Cli) -> None:
    """The golden file, whole, with each of its columns; its loader state is of no torchdata."""
    path = NUMPY_2
    found = cli("show", path, "--json").json()
    assert found["rows_pulled_in_epoch"] is None
    assert len(found["buffered"]) == 2
    columns = [argument for name in found["buffered"][0] for argument in ("--column", name)]
    result = cli("show", path, *columns)
    assert (result.code, result.err) == (0, "")
    assert "cannot be told from its state" in result.out


def test_plain_step_and_empty_run_have_nothing_to_show(cli: Cli, tmp_path: Path) -> None:
    """Each by its reason."""
    plain_save(tmp_path / "plain", 3)
    result = cli("show", tmp_path / "plain")
    assert (result.code, result.out) == (1, "")
    assert "saved while the extension was not active" in result.err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / TRACKER_NAME).write_text("3")
    result = cli("show", tmp_path / "begun")
    assert result.code == 2
    assert "Nothing to show" in result.err
