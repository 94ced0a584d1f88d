"""A resume under changed settings is exact, or refused by name: each setting, in both directions."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from agl_async_ckpt.exceptions import StateMismatchError
from tests.rig.agents import AgentTable
from tests.rig.life import run_life
from tests.rig.record import Life
from tests.rig.runs import rewind, settings, uninterrupted
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings
from tests.rig.stream import assert_streams_on

LONG: dict[str, Any] = {"epochs": 9, "total_steps": 7}
"""Long enough for two epochs behind a change."""


def live_on(folder: Path, server: AglServer, runs: list[RunSettings], deaths: list[int]) -> list[Life]:
    """One life for each of `runs`; all but the last end right after the save of a step."""
    server.agents = AgentTable()
    stops = [*deaths, None]
    return [run_life(run, folder, server.url, stop_after_step=stop) for run, stop in zip(runs, stops, strict=True)]


def changed(run: RunSettings, *changes: dict[str, Any]) -> list[RunSettings]:
    """`run`, and `run` after each change, which stays in force."""
    runs = [run]
    for change in changes:
        runs.append(replace(runs[-1], **change))
    return runs


# --- exact --------------------------------------------------------------------------------------------------------

BOTH_WAYS = {
    "loader batch, aligned": ("24/4/6", {"B": 4, "A": 6}, {"B": 2, "A": 4}),
    "loader batch, misaligned": ("23/4/6", {"B": 4, "A": 6}, {"B": 6, "A": 8}),
    "gen_batch_size": ("23/2/5", {"gen_batch_size": 5}, {"gen_batch_size": 3}),
    "async_train_batch_size": ("40/4/12", {"A": 12}, {"A": 8}),
    "no room in flight": ("40/2/12", {"A": 12}, {"A": 3}),
    "least room in flight": ("24/4/8", {"A": 8}, {"A": 5}),
    "rollout.n": ("24/2/5", {"rollout_n": 1}, {"rollout_n": 3}),
    "save_freq": ("24/2/5", {"save_freq": 1}, {"save_freq": 3}),
    "total_epochs": ("12/2/5", {"epochs": 9}, {"epochs": 5}),
    "total_training_steps": ("12/2/5", {"total_steps": 7}, {"total_steps": 9}),
    "workers 0 and 2": ("23/4/6", {"num_workers": 0}, {"num_workers": 2}),
}


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("setting", BOTH_WAYS)
def test_changed_setting_continues_the_stream(server: AglServer, tmp_path: Path, setting: str, back: bool) -> None:
    """In the middle of an epoch, with a tail or rows in flight: the next row is next, in the epochs to come too."""
    case, *sides = BOTH_WAYS[setting]
    first, second = reversed(sides) if back else sides
    runs = changed(settings(case, shuffle=True, **LONG), first, second)[1:]
    lives = live_on(tmp_path, server, runs, [3])
    assert lives[1].start == 3
    assert lives[1].finished
    assert_streams_on(lives, runs, tmp_path)


@pytest.mark.parametrize("workers", [(2, 3), (8, 2, 0), (0, 2, 8, 0)], ids=str)
def test_c18_number_of_workers_may_change_again_and_again(
    server: AglServer, tmp_path: Path, workers: tuple[int, ...]
) -> None:
    """Shuffled, with tail and rows in flight, each change in another epoch."""
    runs = changed(settings("14/4/6", shuffle=True, **LONG), *({"num_workers": number} for number in workers))[1:]
    lives = live_on(tmp_path, server, runs, [2, 3, 5][: len(workers) - 1])
    assert_streams_on(lives, runs, tmp_path)


@pytest.mark.parametrize("workers", [(0, 2), (2, 0)], ids=str)
def test_number_of_workers_may_change_at_the_end_of_an_epoch(
    server: AglServer, tmp_path: Path, workers: tuple[int, int]
) -> None:
    """Step 2 of 12/4/8 drains the epoch exactly; nobody has seen its end yet."""
    runs = changed(settings("12/4/8", shuffle=True, **LONG), *({"num_workers": number} for number in workers))[1:]
    assert_streams_on(live_on(tmp_path, server, runs, [2]), runs, tmp_path)


def test_workers_and_loader_batch_may_change_at_once(server: AglServer, tmp_path: Path) -> None:
    """At a misaligned place: what is left over for the old batch is read without workers."""
    run = settings("23/4/6", shuffle=True, **LONG)
    runs = changed(run, {"num_workers": 2, "B": 6, "A": 8}, {"num_workers": 0, "B": 4, "A": 5})
    assert_streams_on(live_on(tmp_path, server, runs, [2, 3]), runs, tmp_path)


@pytest.mark.parametrize("batch", [2, 6])
def test_c19_another_batch_continues_at_the_ninth_row(server: AglServer, tmp_path: Path, batch: int) -> None:
    """12/4 after 8 rows, batch 4 to 2 and 4 to 6; four rows are left, fewer than the new batch."""
    run = settings("12/4/8", epochs=3)
    lives = live_on(tmp_path, server, changed(run, {"B": batch, "A": batch + 4}), [1])
    pulled = [row for step in lives[1].steps.values() for row in step.pulled]
    assert pulled[:12] == [8, 9, 10, 11, *range(8)]


def test_larger_batch_takes_all_that_the_old_one_would_have(server: AglServer, tmp_path: Path) -> None:
    """23/4/6 to 8/10: rows 8 to 19 are left of the epoch, which batches of 8 alone would cut at 15."""
    run = settings("23/4/6", epochs=3)
    lives = live_on(tmp_path, server, changed(run, {"B": 8, "A": 10}), [1])
    assert lives[1].restored is not None
    assert lives[1].restored.in_flight == (4, 5)
    assert lives[1].restored.buffered == (6, 7, 8, 9, 10, 11)
    assert lives[1].pulls[2] == list(range(6, 14))
    assert lives[1].pulls[3] == [*range(14, 20), 0, 1]
    assert any("the next 4 rows of the epoch are read as one smaller batch" in text for _, text in lives[1].log)


def test_rows_read_ahead_keep_every_kind_of_column(server: AglServer, tmp_path: Path) -> None:
    """Tensor, numeric array, object array and list columns of the file are joined with those of the loader."""
    run = settings("23/4/6", payload="rich", shuffle=True, **LONG)
    runs = changed(run, {"B": 6, "A": 8})
    assert_streams_on(live_on(tmp_path, server, runs, [1]), runs, tmp_path)


def test_c7_smaller_a_trains_everything_in_flight(server: AglServer, tmp_path: Path) -> None:
    """40/4/12 with 8 groups in flight, resumed with A = 8: they wait for room, and none is lost."""
    runs = changed(settings("40/4/12", epochs=3, total_steps=9), {"A": 8})
    lives = live_on(tmp_path, server, runs, [1])
    assert lives[1].restored is not None
    assert len(lives[1].restored.in_flight) == 7
    assert any("1 of the groups waits for room" in text for _, text in lives[1].log)
    assert_streams_on(lives, runs, tmp_path)


def test_tail_longer_than_the_new_batch_is_used_up_in_order(server: AglServer, tmp_path: Path) -> None:
    """A loader batch of 9 leaves a tail of 5 rows for steps of one row."""
    run = settings("20/3/4", gen_batch_size=9, **LONG)
    runs = changed(run, {"gen_batch_size": None, "B": 1, "A": 2})
    lives = live_on(tmp_path, server, runs, [1])
    assert lives[1].restored is not None
    assert len(lives[1].restored.buffered) >= 5
    assert_streams_on(lives, runs, tmp_path)


def test_rollout_n_may_change_again_and_again(server: AglServer, tmp_path: Path) -> None:
    """1, 2, 3 and back to 1: groups in flight get the size of the life that trains them."""
    runs = changed(settings("24/2/5", shuffle=True, **LONG), {"rollout_n": 2}, {"rollout_n": 3}, {"rollout_n": 1})
    assert_streams_on(live_on(tmp_path, server, runs, [1, 3, 4]), runs, tmp_path)


def test_output_folder_may_move(server: AglServer, tmp_path: Path) -> None:
    """A folder that was copied to another machine, and a fork into a new folder."""
    run = settings("14/4/6", shuffle=True, **LONG)
    first = run_life(run, tmp_path / "here", server.url, stop_after_step=2)
    fork = replace(run, resume_mode="resume_path", resume_from_path=str(tmp_path / "here" / "global_step_2"))
    for other, folder in ((run, rewind(tmp_path / "here", tmp_path / "there", 2)), (fork, tmp_path / "fork")):
        server.restart()
        assert_streams_on([first, run_life(other, folder, server.url)], [run, other], folder)


# --- refused ------------------------------------------------------------------------------------------------------

REFUSED = {
    "shorter dataset": ({"n": 12}, {"n": 6}, "dataset length", "12", "6"),
    "columns": ({"columns": ("q",)}, {"columns": ()}, "dataset columns", "'q'", "'question'"),
    "content": ({"text": "question"}, {"text": "exercise"}, "dataset content", "(all 12 rows)", "(all 12 rows)"),
    "seed": ({"seed": 1}, {"seed": 2}, "data.seed", "1", "2"),
    "shuffle": ({"shuffle": True}, {"shuffle": False}, "data.shuffle", "True", "False"),
}


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("what", REFUSED)
def test_changed_inputs_are_refused_by_name(server: AglServer, tmp_path: Path, what: str, back: bool) -> None:
    """Before anything is loaded, with both values and the next safe act."""
    before, now, name, *values = REFUSED[what]
    if back:
        before, now, values = now, before, values[::-1]
    run = settings("12/4/6", shuffle=True, epochs=3)
    run_life(replace(run, **before), tmp_path, server.url, stop_after_step=1)
    with pytest.raises(StateMismatchError) as caught:
        run_life(replace(run, **now), tmp_path, server.url)
    error = caught.value
    assert name in error.fact
    both = [str(value) for _, value in error.rows[:2]]
    assert all(value in shown for value, shown in zip(values, both, strict=True))
    assert "on_mismatch=reset" in error.act
    assert not (tmp_path / "global_step_2").exists()


def test_c17_columns_that_differ_are_named(server: AglServer, tmp_path: Path) -> None:
    """One gone, one new: a join would raise KeyError for the first and drop the second from the whole batch."""
    run = settings("10/4/7", columns=("q",))
    run_life(run, tmp_path, server.url, stop_after_step=1)
    with pytest.raises(StateMismatchError) as caught:
        run_life(replace(run, columns=("z",)), tmp_path, server.url)
    assert caught.value.rows[2:] == (("only in the checkpoint", "q"), ("only in this run", "z"))
    assert "dataset content" not in caught.value.fact, "other columns say it all"


def test_several_differences_are_one_message(server: AglServer, tmp_path: Path) -> None:
    """Nobody wants to find them one start after another."""
    run = settings("12/4/6", shuffle=True)
    run_life(run, tmp_path, server.url, stop_after_step=1)
    with pytest.raises(StateMismatchError, match=r"dataset content, data\.seed, data\.shuffle") as caught:
        run_life(replace(run, seed=3, shuffle=False, text="other", num_workers=2), tmp_path, server.url)
    assert str(caught.value).count("in this run:") >= 3


def test_another_sampler_class_is_refused(server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state need not mean the same order."""
    from torchdata.stateful_dataloader.sampler import RandomSampler
    from verl.trainer import main_ppo

    class Mine(RandomSampler):
        pass

    run = settings("12/4/6", shuffle=True)
    run_life(run, tmp_path, server.url, stop_after_step=1)
    monkeypatch.setattr(main_ppo, "create_rl_sampler", lambda config, dataset: Mine(dataset))
    with pytest.raises(StateMismatchError, match=r"(?s)sampler class differs.*RandomSampler.*Mine"):
        run_life(run, tmp_path, server.url)


def test_c20_synchronous_resume_with_inputs_pending_is_refused(server: AglServer, tmp_path: Path) -> None:
    """12/4/6 with tail and rows in flight: the counts of both."""
    run = settings("12/4/6")
    run_life(run, tmp_path, server.url, stop_after_step=1)
    with pytest.raises(StateMismatchError, match=r"(?s)buffered inputs: +2\n +prompt groups in flight: +2\n"):
        run_life(replace(run, async_mode=False), tmp_path, server.url)


def test_workers_of_an_unknown_torchdata_are_one_error_with_both_numbers(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state whose format nobody has looked at is not converted; with the saved number it opens as ever."""
    from agl_async_ckpt.agl import internals

    run = settings("14/4/6", **LONG)
    first = run_life(run, tmp_path, server.url, stop_after_step=1)
    written_by = internals.written_by()
    monkeypatch.setattr(internals, "written_by", lambda: {**written_by, "torchdata": "0.12.1"})
    with pytest.raises(StateMismatchError) as caught:
        run_life(replace(run, num_workers=2), tmp_path, server.url)
    error = caught.value
    assert error.fact == "Input state does not fit this run: data.dataloader_num_workers differs."
    assert error.rows == (
        (f"in checkpoint {tmp_path}/global_step_1", "0"),
        ("in this run", "2"),
        ("because", "the loader state is that of torchdata 0.12.1, and only 0.11 is known"),
    )
    assert error.act.startswith("Resume with 0, or set ")
    assert_streams_on([first, run_life(run, tmp_path, server.url)], [run, run], tmp_path)


def test_checkpoint_without_a_content_digest_resumes(
    server: AglServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written before there was one: what is absent is not compared."""
    from agl_async_ckpt.agl.inputs import fingerprint
    from agl_async_ckpt.agl.inputs.dataset_content import DatasetContent, read_content
    from agl_async_ckpt.storage.commit import load_state

    run = settings("14/4/6", **LONG)
    with monkeypatch.context() as patch:
        patch.setattr(
            fingerprint, "read_content", lambda dataset: DatasetContent(read_content(dataset).columns, None, "none yet")
        )
        first = run_life(run, tmp_path, server.url, stop_after_step=2)
    assert "dataset content" not in load_state(tmp_path / "global_step_2").fingerprint.must_match
    second = run_life(run, tmp_path, server.url)
    assert "dataset content" in load_state(tmp_path / "global_step_3").fingerprint.must_match
    assert_streams_on([first, second], [run, run], tmp_path)


# --- reset --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("change", [{"n": 16}, {"seed": 9}, {"shuffle": False}, {"text": "other"}, {"columns": ("z",)}])
def test_reset_begins_the_changed_inputs_at_their_first_row(
    server: AglServer, tmp_path: Path, change: dict[str, Any], step: int
) -> None:
    """on_mismatch=reset drops loader position, tail, groups in flight and epoch together; step and weights stay."""
    run = settings("14/4/6", epochs=3, shuffle=True)
    truth = uninterrupted(replace(run, **change), server)
    server.restart()
    run_life(run, tmp_path, server.url, stop_after_step=step)
    old = set(server.rollouts())
    reset = replace(run, **change, extension={"on_mismatch": "reset"})
    second = run_life(reset, tmp_path, server.url, stop_after_step=step + 2)
    assert second.start == step
    assert second.weights == {"actor": step}
    assert second.restored is not None
    assert (second.restored.epoch, second.restored.in_flight, second.restored.buffered) == (0, (), ())
    for number in (1, 2):
        assert second.steps[step + number].pulled == truth.steps[number].pulled
        assert second.steps[step + number].trained == truth.steps[number].trained
        assert second.steps[step + number].epoch == truth.steps[number].epoch
    assert not old & set(server.rollouts()), "what was in flight is taken off the server"


def test_reset_says_what_it_drops(server: AglServer, tmp_path: Path) -> None:
    """The difference, the counts, and the rollouts that were removed from the server."""
    run = settings("14/4/6", rollout_n=2)
    run_life(run, tmp_path, server.url, stop_after_step=1)
    second = run_life(
        replace(run, text="other", extension={"on_mismatch": "reset"}), tmp_path, server.url, stop_after_step=2
    )
    said = [text for text in second.warnings if "dataset content differs" in text]
    assert len(said) == 1
    assert "dropping the saved position as a whole: loader position, epoch 1, 2 buffered inputs and " in said[0]
    assert "2 prompt groups in flight" in said[0]
    assert any("Removed 4 rollouts" in text for _, text in second.log)


def test_reset_that_is_not_needed_changes_nothing(server: AglServer, tmp_path: Path) -> None:
    """The setting may stay in the config: it acts on a position that does not fit, and on no other."""
    run = settings("14/4/6", shuffle=True, extension={"on_mismatch": "reset"}, **LONG)
    runs = changed(run, {"B": 3, "A": 7, "num_workers": 2})
    assert_streams_on(live_on(tmp_path, server, runs, [2]), runs, tmp_path)


# --- any subset ---------------------------------------------------------------------------------------------------


@st.composite
def changing_runs(draw: st.DrawFn) -> tuple[list[RunSettings], list[int]]:
    """Two or three lives of one dataset, with anything between them changed that may change."""
    n = draw(st.integers(8, 24), "n")
    shuffle, seed = draw(st.booleans(), "shuffle"), draw(st.integers(0, 3), "seed")
    deaths = sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=2), "deaths"))
    runs: list[RunSettings] = []
    for _ in range(len(deaths) + 1):
        b = draw(st.integers(1, 4), "B")
        runs.append(
            RunSettings(
                n,
                b,
                draw(st.integers(b + 1, 3 * b + 3), "A"),
                shuffle=shuffle,
                seed=seed,
                epochs=draw(st.integers(20, 30), "epochs"),
                total_steps=draw(st.integers(7, 9), "total_steps"),
                num_workers=draw(st.sampled_from([0] * 9 + [1]), "num_workers"),
                gen_batch_size=draw(st.none() | st.integers(1, 8), "gen_batch_size"),
                rollout_n=draw(st.integers(1, 3), "rollout_n"),
            )
        )
    return runs, deaths


@pytest.mark.timeout(600)
@profile(
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(drawn=changing_runs())
def test_any_subset_of_settings_may_change_between_lives(
    server: AglServer, drawn: tuple[list[RunSettings], list[int]]
) -> None:
    """Whatever changes among what may change: no row is lost, none comes twice, and the order is kept."""
    runs, deaths = drawn
    server.reset()
    with tempfile.TemporaryDirectory(prefix="rig-changed-") as folder:
        assert_streams_on(live_on(Path(folder), server, runs, deaths), runs, Path(folder))
