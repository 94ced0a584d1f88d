"""Which checkpoint a start takes: VERL's choice, and what VERL does not tolerate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from agl_async_ckpt.agl.locate import accept, explicit_step, locate, output_folder, verl_choice
from agl_async_ckpt.exceptions import CheckpointNotFoundError, StateMismatchError
from agl_async_ckpt.folder.decision import decide_latest
from agl_async_ckpt.storage.layout import FILE_NAME, LOADER_FILE_NAME, SEAL_NAME, TRACKER_NAME, step_name
from tests.folder.made import plain_save, save_step
from tests.rig.bare import bare_trainer


def trainer(out: Path | str, mode: str = "auto", path: Any = None) -> Any:
    """The part of a trainer that is looked at."""
    return bare_trainer({"trainer": {"default_local_dir": str(out), "resume_mode": mode, "resume_from_path": path}})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder with complete steps 2, 4 and 6; the tracker names 6."""
    for step in (2, 4, 6):
        save_step(tmp_path / "out", step)
    return tmp_path / "out"


# --- automatic -----------------------------------------------------------------------------------------------------


def test_automatic_resume_follows_the_tracker(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also to a step that is not the newest, and without a word."""
    assert locate(trainer(out)) == out / "global_step_6"
    (out / TRACKER_NAME).write_text("4")
    assert locate(trainer(out)) == out / "global_step_4"
    assert caplog.messages == []


def test_disabled_resume_takes_nothing(out: Path) -> None:
    """Whatever is there."""
    assert locate(trainer(out, "disable")) is None


@pytest.mark.parametrize("make", [False, True], ids=["missing", "empty"])
def test_folder_without_steps_starts_from_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture, make: bool) -> None:
    """The first start of a run needs no warning."""
    if make:
        (tmp_path / "out").mkdir()
    assert locate(trainer(tmp_path / "out")) is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("tracker", "says"),
    [
        ("", "it is empty"),
        ("\0\0\0", "zero bytes"),
        ("12abc", "holds no number, but b'12abc'"),
        ("release", "names a release, not a step"),
        ("9", "names step 9, which does not exist"),
        (None, "is missing"),
    ],
)
def test_tracker_that_cannot_be_followed_gives_the_newest_complete_step(
    out: Path, caplog: pytest.LogCaptureFixture, tracker: str | None, says: str
) -> None:
    """With a warning that says what is wrong and what is taken; VERL would die or start over."""
    if tracker is None:
        (out / TRACKER_NAME).unlink()
    else:
        (out / TRACKER_NAME).write_text(tracker)
    with caplog.at_level(logging.WARNING):
        assert accept(decide_latest(out)) == out / "global_step_6"
    (message,) = caplog.messages
    assert str(out / TRACKER_NAME) in message
    assert says in message
    assert message.endswith(f"Resuming from the newest complete checkpoint, {out / 'global_step_6'}.")


def test_selected_step_that_is_incomplete_is_passed_over(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason and the step that is taken instead are said."""
    (out / "global_step_6" / SEAL_NAME).unlink()
    (out / "global_step_6" / LOADER_FILE_NAME).unlink(missing_ok=True)
    assert accept(decide_latest(out)) == out / "global_step_4"
    assert f"{out / 'global_step_6'} is not complete (" in caplog.messages[0]


def test_selected_step_with_a_damaged_input_file_is_left_to_be_refused(out: Path) -> None:
    """No crash leaves that behind, so it does not give way silently; reading it is an error."""
    (out / "global_step_6" / FILE_NAME).write_bytes(b"")
    assert accept(decide_latest(out)) == out / "global_step_6"


def test_selected_step_of_the_plain_trainer_is_taken_as_it_is(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it may lack an input state is for the caller to say."""
    plain_save(out, 8)
    assert accept(decide_latest(out)) == out / "global_step_8"
    assert caplog.messages == []


def test_unsealed_step_counts_only_if_the_tracker_names_it(out: Path) -> None:
    """A save that died before its tracker is not chosen, though it is the newest."""
    save_step(out, 8, sealed=False)
    assert accept(decide_latest(out)) == out / "global_step_8"
    (out / TRACKER_NAME).write_text("6")
    assert accept(decide_latest(out)) == out / "global_step_6"
    (out / TRACKER_NAME).write_text("")
    assert accept(decide_latest(out)) == out / "global_step_6"


def test_steps_of_which_none_is_complete_are_an_error(out: Path) -> None:
    """Each with its reason: training from scratch would lose them silently."""
    (out / "global_step_2" / FILE_NAME).unlink()
    (out / "global_step_4" / FILE_NAME).write_bytes(b"x")
    (out / "global_step_6" / SEAL_NAME).unlink()
    (out / TRACKER_NAME).write_text("")
    with pytest.raises(StateMismatchError) as caught:
        accept(decide_latest(out))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"No checkpoint in {out} is complete, and training from scratch would lose them silently."
    reasons = [line for line in lines if line.startswith("  global_step_")]
    assert [line.split(":")[0].strip() for line in reasons] == ["global_step_2", "global_step_4", "global_step_6"]
    assert "trainer.resume_mode=resume_path" in lines[-1]


def test_newest_means_highest_number(tmp_path: Path) -> None:
    """10 comes after 9, whatever the order of names."""
    for step in (9, 10):
        save_step(tmp_path, step)
    (tmp_path / TRACKER_NAME).write_text("")
    assert accept(decide_latest(tmp_path)) == tmp_path / "global_step_10"


@pytest.mark.parametrize("tracker", ["5", "", "release"])
def test_tracker_beside_no_step_is_said_and_starts_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tracker: str
) -> None:
    """Nothing can be lost, but somebody may have expected a resume."""
    (tmp_path / TRACKER_NAME).write_text(tracker)
    assert accept(decide_latest(tmp_path)) is None
    (message,) = caplog.messages
    assert message.endswith("and there is no checkpoint beside it: training from scratch.")


# --- explicit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "/", "///", "/.", "/../global_step_4"])
def test_explicit_path_is_normalised(out: Path, suffix: str) -> None:
    """VERL parses the step from the text: a trailing slash breaks it there."""
    assert locate(trainer(out, "resume_path", f"{out / 'global_step_4'}{suffix}")) == out / "global_step_4"


def test_relative_path_counts_from_the_working_folder(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is absolute afterwards."""
    monkeypatch.chdir(out.parent)
    assert explicit_step("out/global_step_2") == out / "global_step_2"
    assert output_folder(trainer("out")) == out


def test_link_to_a_step_is_taken_by_its_own_name(out: Path, tmp_path: Path) -> None:
    """Links are kept: the name says the step, wherever it leads."""
    (tmp_path / "global_step_4").symlink_to(out / "global_step_4")
    assert explicit_step(str(tmp_path / "global_step_4")) == tmp_path / "global_step_4"


@pytest.mark.parametrize("path", [None, "", 4])
def test_missing_explicit_path_is_refused(out: Path, path: Any) -> None:
    """With the value found and what to set."""
    with pytest.raises(CheckpointNotFoundError, match=rf"resume_from_path, got {path!r}\.\nSet it to a checkpoint fol"):
        locate(trainer(out, "resume_path", path))


@pytest.mark.parametrize("name", ["", "global_step_5", "global_step_4/actor", "global_step_4.bak", "best", "a/b"])
def test_path_that_is_no_step_lists_those_nearby(out: Path, name: str) -> None:
    """It says what a checkpoint folder looks like, and which ones there are."""
    given = str(out / name)
    with pytest.raises(CheckpointNotFoundError) as caught:
        locate(trainer(out, "resume_path", given))
    text = str(caught.value)
    assert text.startswith(f"trainer.resume_from_path is no checkpoint folder: {given}\n")
    assert "<output folder>/global_step_<N>" in text
    assert text.endswith("Nearby:\n" + "\n".join(f"  {out / step_name(step)}" for step in (2, 4, 6)))
    assert isinstance(caught.value, FileNotFoundError)


def test_file_with_a_steps_name_is_no_step(out: Path) -> None:
    """A checkpoint is a folder."""
    (out / "global_step_8").write_text("")
    with pytest.raises(CheckpointNotFoundError):
        explicit_step(str(out / "global_step_8"))


def test_path_far_from_any_step_says_so(tmp_path: Path) -> None:
    """There is nothing to list."""
    with pytest.raises(CheckpointNotFoundError, match="There are none nearby"):
        explicit_step(str(tmp_path / "x" / "y" / "z" / "global_step_1"))


def test_list_of_nearby_steps_is_bounded(tmp_path: Path) -> None:
    """The newest eight of many."""
    for step in range(1, 12):
        (tmp_path / step_name(step)).mkdir()
    with pytest.raises(CheckpointNotFoundError) as caught:
        explicit_step(str(tmp_path))
    listed = [line.strip() for line in str(caught.value).partition("Nearby:\n")[2].splitlines()]
    assert listed == [str(tmp_path / step_name(step)) for step in range(4, 12)]


# --- what VERL itself would take ------------------------------------------------------------------------------------


def test_verls_choice_is_told_without_a_word(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For synchronous runs, which stay VERL's own."""
    assert verl_choice(trainer(out)) == out / "global_step_6"
    assert verl_choice(trainer(out, "disable")) is None
    assert verl_choice(trainer(out, "resume_path", str(out / "global_step_2"))) == out / "global_step_2"
    assert verl_choice(trainer(out, "resume_path", str(out / "nothing"))) is None
    (out / TRACKER_NAME).write_text("torn!")
    assert verl_choice(trainer(out)) is None
    assert verl_choice(trainer(out.parent / "missing")) is None
    assert caplog.messages == []
