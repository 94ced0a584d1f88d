"""The account over all lives: what is lost is named, what the uninterrupted run leaves untrained as well is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agl_async_ckpt.exceptions import DamagedStateError
from agl_async_ckpt.ledger.audit import Audit, audit_ledger
from agl_async_ckpt.ledger.entry import Start, Step
from agl_async_ckpt.ledger.reader import Ledger
from tests.ledger.story import Story, dataset, row


def kinds(story: Story) -> list[str]:
    """Kinds of the problems."""
    return [problem.kind for problem in story.audit().problems]


def test_run_without_a_resume_holds_and_every_input_is_accounted_for() -> None:
    """What is in flight, buffered and not reached is named, and nothing of it is a problem."""
    result = Story(dataset(20), 2, 5).start().steps(3).audit()
    assert result.holds
    (epoch,) = result.epochs
    assert (epoch.num_inputs, epoch.num_trained[1], epoch.num_trained[2]) == (20, 6, 0)
    assert epoch.in_flight == [row(6), row(7), row(8)]
    assert epoch.buffered == [row(9)]
    assert epoch.num_not_drawn == 10


def test_untrained_inputs_add_up() -> None:
    """Never trained is lost, dropped, in flight, buffered, left out or not reached: the numbers are the same."""
    story = Story(dataset(27), 2, 5).start().step(drop=[row(1)]).steps(3)
    story.start(4, resume="verl", lose_in_flight=True, lose_buffered=True).steps(3)
    (epoch,) = story.audit().epochs
    pending = [*epoch.lost, *epoch.dropped_by_trainer, *epoch.in_flight, *epoch.buffered]
    assert epoch.num_trained[0] == len(pending) + epoch.num_left_out + epoch.num_skipped + epoch.num_not_drawn
    assert sum(epoch.num_trained.values()) == epoch.num_inputs == 27


@pytest.mark.parametrize("step", [1, 3, 6, 7])
def test_exact_resumes_hold(step: int) -> None:
    """The new life has in flight and buffered what the step left, and goes on at the same row."""
    story = Story(dataset(14), 2, 5).start().steps(8).start(step, resume="exact").steps(10)
    result = story.audit()
    assert result.problems == []
    assert result.lineage.num_discarded == 8 - step
    assert result.epochs[0].num_trained[1] == 14


def test_resume_that_drops_what_was_pulled_is_named_with_place_and_life() -> None:
    """Each lost input, per place; the cause is in the text."""
    story = Story(dataset(40), 2, 5).start().steps(3)
    lost_in_flight, lost_buffered = tuple(story.in_flight), tuple(story.buffered)
    result = story.start(3, resume="verl", lose_in_flight=True, lose_buffered=True).steps(4).end().audit()
    assert [problem.inputs for problem in result.problems] == [lost_in_flight, lost_buffered]
    assert [(problem.life, problem.step) for problem in result.problems] == [(2, 3), (2, 3)]
    assert "in flight at step 3" in result.problems[0].text
    assert "buffered at step 3" in result.problems[1].text
    assert result.lost == [*lost_in_flight, *lost_buffered]
    assert not result.holds


def test_only_the_surviving_lives_count() -> None:
    """A loss in a life that was thrown away is none: the life after it resumed from before."""
    story = Story(dataset(40), 2, 5).start().steps(3)
    story.start(3, resume="verl", lose_in_flight=True).steps(3)
    result = story.start(3, resume="exact").steps(3).audit()
    assert result.holds
    assert [start.life for start in result.walk.resumes] == [3]


def test_resume_of_an_older_checkpoint_that_a_later_life_passed_follows_the_one_that_wrote_it() -> None:
    """Life 2 trained step 5 and 6 anew; a resume from the first life's step 6 continues the first life."""
    story = Story(dataset(60), 2, 5).start().steps(5).step(finish=[row(10), row(12)])
    saved = story._saved[6]
    story.start(4, resume="exact").steps(2)
    assert story._saved[6] != saved
    story._saved[6] = saved
    result = story.start(6, resume="exact").steps(4).audit()
    assert result.holds
    assert [part.start.life for part in result.lineage.parts] == [1, 3]


def test_replayed_epoch_is_named() -> None:
    """The loader began at its first row again, in the middle of an epoch: what was trained is trained twice."""
    story = Story(dataset(12), 2, 5).start().steps(3)
    result = story.start(3, resume="verl", lose_in_flight=True, lose_buffered=True, loader="fresh").steps(4).audit()
    assert sorted(result.repeated)[:6] == [row(0), row(1), row(2), row(3), row(4), row(5)]
    assert result.lost == []  # what was in flight was drawn again
    assert result.epochs[0].num_trained[2] >= 6


def test_epoch_that_is_counted_anew_and_an_order_that_begins_anew_are_named() -> None:
    """As VERL 0.8.0 resumes at a step that is a multiple of the loader's length."""
    story = Story(dataset(12), 2, 4).start().steps(11)
    assert (story.epoch, story.loader_rows) == (2, 12)
    story.start(11, resume="verl", lose_in_flight=True, epoch=1, loader="fresh")
    assert kinds(story.steps(2)) == ["order", "epoch", "lost"]


def test_rows_that_a_resume_jumps_over_are_counted() -> None:
    """The loader went on further ahead: the rows between were never handed out, in this epoch or at its end."""
    story = Story(dataset(20), 2, 5).start().steps(3)
    position, *held = story._saved[3]
    story._saved[3] = (position + 4, *held)
    story.start(3, resume="verl").steps(2)
    result = story.audit()
    assert ([problem.kind for problem in result.problems], result.epochs[0].num_skipped) == (["skipped"], 4)
    result = story.steps(6).audit()
    assert ([problem.kind for problem in result.problems], result.epochs[0].num_skipped) == (["skipped"], 4)


def test_rows_that_the_loader_leaves_out_are_no_loss() -> None:
    """13 rows in batches of 2: one row of each epoch, by its position."""
    result = Story(dataset(13), 2, 4).start().steps(7).audit()
    assert result.holds
    assert (result.epochs[0].num_left_out, result.epochs[0].left_out) == (1, [12])
    assert result.epochs[0].num_trained[0] == 1


def test_equal_rows_are_told_apart_by_count() -> None:
    """Three equal rows without positions: each is due once per epoch; one lost copy is one loss."""
    rows = ["same", "a", "same", "b", "c", "same", "d", "e", "f", "g", "h", "i"]
    assert Story(rows, 2, 4).start().steps(12).audit().holds
    story = Story(rows, 2, 4).start().steps(2)
    assert story.in_flight == ["c", "same"]
    result = story.start(2, resume="exact").steps(2).start(4, resume="exact").steps(3).audit()
    assert (result.problems, result.epochs[0].num_trained[1]) == ([], 12)
    story = Story(rows, 2, 4).start().steps(2)
    result = story.start(2, resume="verl", lose_in_flight=True).steps(3).audit()
    assert result.lost == ["c", "same"]


def test_inputs_that_the_trainer_drops_are_no_loss() -> None:
    """A group whose samples were all filtered, and a step without any batch."""
    result = Story(dataset(20), 2, 4).start().step(drop=[row(1)]).step(no_batch=True).steps(2).audit()
    assert result.holds
    assert result.epochs[0].dropped_by_trainer == [row(1), row(2), row(3)]


def test_reset_begins_a_stream_of_its_own() -> None:
    """What was in flight and buffered is lost by name, with the cause; epochs count anew and nothing is repeated."""
    story = Story(dataset(20), 2, 5).start().steps(3)
    lost = [*story.in_flight, *story.buffered]
    story._saved[3] = (0, [], [])
    result = story.start(3, resume="reset").steps(3).audit()
    assert result.lost == lost
    assert "on_mismatch=reset" in result.problems[0].text
    assert [(epoch.stream, epoch.epoch) for epoch in result.epochs] == [(0, 1), (1, 1)]
    assert result.repeated == []


def test_fork_is_audited_from_where_it_begins() -> None:
    """What it took over belongs to no epoch of its own, and an input of it that gets lost is named."""
    story = Story(dataset(30), 2, 5).start().steps(3)
    story.entries.clear()
    story.start(3, resume="exact", is_fork=True, resumed_from="parent/global_step_3").steps(4)
    result = story.audit()
    assert result.holds
    assert result.first.step == 3
    assert len(result.carried_in) == 4
    assert "parent/global_step_3" in result.notes[0]
    assert result.epochs[0].num_inputs == 30 - 10
    story.start(5, resume="verl", lose_in_flight=True).steps(1)
    assert len(story.audit().lost) == 3


def test_run_that_began_without_a_ledger_is_audited_from_where_it_starts() -> None:
    """The checkpoint of an earlier time: a note, not a problem."""
    story = Story(dataset(30), 2, 5).start().steps(3)
    story.entries.clear()
    result = story.start(3, resume="verl", lose_in_flight=True, lose_buffered=True).steps(4).audit()
    assert result.holds
    assert "step 3" in result.notes[0]


def test_steps_without_a_line_cannot_be_told() -> None:
    """`ledger: false` for a while, or lost lines: the promise is not shown, so it does not hold."""
    story = Story(dataset(40), 2, 5).start().steps(2)
    story.step(record=False).step(record=False)
    story.start(4, resume="exact").steps(2)
    result = story.audit()
    assert [problem.kind for problem in result.problems] == ["gap"]
    assert "steps 3 to 4" in result.problems[0].text
    story = Story(dataset(40), 2, 5).start().step().step(record=False).step()
    assert "gap" in kinds(story)


def test_input_that_vanishes_within_a_life_is_named() -> None:
    """Not a resume, yet neither trained nor in flight any more."""
    story = Story(dataset(40), 2, 5).start().steps(2)
    gone = story.in_flight.pop(0)
    result = story.step().audit()
    assert (result.problems[0].kind, result.problems[0].inputs) == ("lost", (gone,))


def test_input_from_nowhere_is_named() -> None:
    """A line of the ledger that does not follow from those before it."""
    story = Story(dataset(40), 2, 5).start().steps(2)
    story.in_flight.append("stranger")
    assert "unexplained" in kinds(story.step())


def test_start_that_has_done_no_step_is_part_of_the_account() -> None:
    """A job that has just been resumed: its losses show at once."""
    story = Story(dataset(40), 2, 5).start().steps(3).start(3, resume="verl", lose_in_flight=True)
    assert len(story.audit().lost) == 3


def test_json_is_plain_and_complete() -> None:
    """Everything of the result goes through JSON."""
    values = Story(dataset(13), 2, 5).start().steps(3).start(2, resume="drop", lose_in_flight=True).steps(6).audit()
    assert json.loads(json.dumps(values.as_json()))["holds"] is False


def test_ledger_without_a_start_is_refused() -> None:
    """Lines whose life has no start say nothing."""
    story = Story(dataset(10), 2, 5).start().steps(1)
    del story.entries[0]
    with pytest.raises(DamagedStateError, match="no start"):
        story.audit()


def without(story: Story, *kinds_and_indices: tuple[type, int]) -> Audit:
    """The account of a ledger in which lines are missing: the n-th of a kind, counted from 0 or from the end."""
    entries = list(story.entries)
    for kind, index in kinds_and_indices:
        entries.remove([entry for entry in entries if isinstance(entry, kind)][index])
    return audit_ledger(Ledger(Path("ledger"), tuple(entries)))


@pytest.mark.parametrize(
    ("kind", "index"), [(Start, 0), (Start, -1), (Step, 0), (Step, 2), (Step, -1)], ids=lambda value: str(value)[-12:]
)
def test_missing_line_is_a_problem_wherever_it_was(kind: type, index: int) -> None:
    """What it held cannot be told, so the promise cannot be said to hold."""
    story = Story(dataset(40), 2, 5).start().steps(3).start(3, resume="exact").steps(3).end()
    assert story.audit().holds
    result = without(story, (kind, index))
    assert not result.holds
    assert result.problems


@pytest.mark.parametrize(
    ("index", "found"),
    [
        pytest.param(2, ["gap"], id="step"),
        pytest.param(0, ["gap"], id="start"),
        pytest.param(5, [], id="step_that_a_resume_has_thrown_away"),
    ],
)
def test_line_that_cannot_be_read_is_a_problem_exactly_if_the_account_needs_it(index: int, found: list[str]) -> None:
    """The line itself is a note; what it leaves untold is the problem, and names the steps."""
    story = Story(dataset(60), 2, 5).start().steps(5)
    story.start(3, resume="exact").steps(4)
    entries = tuple(entry for number, entry in enumerate(story.entries) if number != index)
    result = audit_ledger(Ledger(Path("ledger"), entries, ((index + 1, "no line of a ledger"),)))
    assert sorted({problem.kind for problem in result.problems} & {"gap"}) == found
    assert bool(result.problems) == bool(found)
    assert f"1 line of the ledger cannot be read (line {index + 1})." in result.notes


def test_one_of_something_is_said_in_the_singular() -> None:
    """One orphan line, and one input that is trained again."""
    story = Story(dataset(20), 2, 5).start().steps(1)
    orphan = story.entries[-1]
    story.entries = [*Story(dataset(20), 2, 5).start().steps(3).entries]
    story.entries.append(replace(orphan, run_id="another run"))
    texts = [problem.text for problem in story.audit().problems]
    assert texts == ["1 line belongs to a life whose start is missing; left out."]
