"""A resumed run pulls and trains what the uninterrupted run does: from every step, across epoch ends, repeatedly."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.agents import AgentPlan, AgentTable
from tests.rig.child import ChildLife
from tests.rig.life import Death, build_trainer, close_trainer, quiet, run_life
from tests.rig.record import Life, Recorder, lineage, rows_pulled, rows_trained
from tests.rig.runs import (
    assert_balanced,
    assert_continues,
    protected,
    resume_from,
    settings,
    uninterrupted,
)
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings


def lives_with_deaths(
    run: RunSettings, out_dir: Path, server: AglServer, deaths: list[int], plan: AgentPlan | None = None
) -> list[Life]:
    """One life per death, each right after the save of that step, and a last one to the end."""
    server.agents = AgentTable(plan)
    lives = [run_life(run, out_dir, server.url, stop_after_step=step) for step in deaths]
    return [*lives, run_life(run, out_dir, server.url)]


def check_every_step(run: RunSettings, tmp_path: Path, server: AglServer, plan: AgentPlan | None = None) -> None:
    """Resume from each step of a whole protected run, and compare the rest of the stream each time."""
    truth = uninterrupted(run, server, plan)
    whole = protected(run, tmp_path / "whole", server, plan)
    assert_continues(truth, whole)
    assert whole.finished
    for step in list(whole.saves)[:-1]:
        lives = resume_from(run, whole, tmp_path / "whole", tmp_path / str(step), step, server)
        assert_continues(truth, *lives)


@pytest.mark.parametrize(
    ("shuffle", "num_workers"),
    [(False, 0), (True, 0), (True, 2)],
    ids=["sequential-0", "shuffled-0", "shuffled-2"],
)
@pytest.mark.parametrize(("case", "steps"), [("24/2/5", 14), ("40/4/10", 13), ("23/4/6", 13)])
def test_resume_continues_the_stream_from_every_step(
    server: AglServer, tmp_path: Path, case: str, steps: int, shuffle: bool, num_workers: int
) -> None:
    """Killed after any step, across an epoch end or two: pulls, epochs, groups in flight and tail are the same."""
    run = settings(case, epochs=3, total_steps=steps, shuffle=shuffle, num_workers=num_workers)
    check_every_step(run, tmp_path, server)


def test_resume_continues_a_sequential_stream_of_workers_from_every_step(server: AglServer, tmp_path: Path) -> None:
    """The same in the dataset's order, read by workers, over the end of an epoch that leaves a remainder out."""
    check_every_step(settings("23/4/6", epochs=3, total_steps=8, num_workers=2), tmp_path, server)


@pytest.mark.parametrize("gen_batch_size", [1, 3, 5, 8])
def test_resume_is_exact_with_another_loader_batch(server: AglServer, tmp_path: Path, gen_batch_size: int) -> None:
    """data.gen_batch_size differs from data.train_batch_size: the tail varies from step to step."""
    check_every_step(settings("16/2/5", shuffle=True, gen_batch_size=gen_batch_size, epochs=2), tmp_path, server)


def test_resume_is_exact_with_eight_workers(server: AglServer, tmp_path: Path) -> None:
    """VERL's default number of loader workers, across an epoch end."""
    run = settings("20/2/5", shuffle=True, num_workers=8, epochs=2)
    truth = uninterrupted(run, server)
    lives = lives_with_deaths(run, tmp_path, server, [4, 11])
    assert_continues(truth, *lives)


def test_resume_after_every_step_is_exact(server: AglServer, tmp_path: Path) -> None:
    """A process that survives one step only, again and again, makes the uninterrupted run."""
    run = settings("14/4/6", shuffle=True, epochs=3)
    truth = uninterrupted(run, server)
    lives = lives_with_deaths(run, tmp_path, server, list(truth.saves)[:-1])
    assert_continues(truth, *lives)
    for step in truth.saves:
        assert_balanced(truth, step, *lives)


@pytest.mark.parametrize("deaths", [[2, 5], [1, 2, 3], [3, 6, 7]])
def test_resumes_in_a_row_are_exact(server: AglServer, tmp_path: Path, deaths: list[int]) -> None:
    """Two and three resumes, the second before the groups of the first are all trained."""
    run = settings("12/2/7", shuffle=True, epochs=2)
    lives = lives_with_deaths(run, tmp_path, server, deaths)
    assert_continues(uninterrupted(run, server), *lives)


@pytest.mark.parametrize("point", ["pulled", "trained", "updated", "save", "actor_saved"])
def test_death_within_a_step_costs_that_step_only(server: AglServer, tmp_path: Path, point: str) -> None:
    """Wherever in step 4 the process dies, the run resumes from step 3 and does step 4 again, alike."""
    run = settings("14/4/6", epochs=2)
    first = run_life(run, tmp_path, server.url, die_at=(point, 4))
    second = run_life(run, tmp_path, server.url)
    assert first.died == f"{point} 4"
    assert second.start == 3
    assert_continues(uninterrupted(run, server), first, second)


def test_killed_process_resumes_exactly(server: AglServer, tmp_path: Path) -> None:
    """A real SIGKILL between the model and the publication of step 3, loader workers included."""
    run = settings("14/4/6", epochs=2, shuffle=True, num_workers=2)
    with ChildLife(run, tmp_path / "run", server.url, tmp_path / "record.jsonl", stop_at=("actor_saved", 3)) as child:
        child.wait_stopped()
        first = child.kill()
    assert list(first.saves) == [1, 2]
    second = run_life(run, tmp_path / "run", server.url)
    assert second.start == 2
    assert_continues(uninterrupted(run, server), first, second)


def test_resume_with_sparse_saves_goes_back_to_the_last_one(server: AglServer, tmp_path: Path) -> None:
    """With save_freq 3 a death in step 5 resumes from step 3, and what steps 4 and 5 pulled is pulled again."""
    run = settings("24/2/5", save_freq=3, shuffle=True)
    truth = uninterrupted(run, server)
    first = run_life(run, tmp_path, server.url, die_at=("trained", 5))
    second = run_life(run, tmp_path, server.url)
    assert second.start == 3
    assert_continues(truth, first, second)


@pytest.mark.parametrize(("case", "step", "tail"), [("24/4/8", 2, ()), ("14/4/6", 1, (6, 7)), ("10/4/7", 1, (7,))])
def test_tail_is_put_back(server: AglServer, tmp_path: Path, case: str, step: int, tail: tuple[int, ...]) -> None:
    """An empty tail, a partial one, and the last row of an epoch whose successors come from the next."""
    run = settings(case, epochs=2)
    lives = lives_with_deaths(run, tmp_path, server, [step])
    assert lives[1].restored is not None
    assert lives[1].restored.buffered == tail
    assert_continues(uninterrupted(run, server), *lives)


@pytest.mark.parametrize(("case", "epochs", "step"), [("12/4/6", 2, 3), ("24/2/4", 2, 12), ("12/4/8", 3, 6)])
def test_steps_divisible_by_the_loader_length_are_exact(
    server: AglServer, tmp_path: Path, case: str, epochs: int, step: int
) -> None:
    """Where VERL 0.8.0 takes the loader for exhausted, in the middle of an epoch."""
    run = settings(case, epochs=epochs, shuffle=True)
    lives = lives_with_deaths(run, tmp_path, server, [step])
    assert_continues(uninterrupted(run, server), *lives)


def test_groups_in_flight_are_created_again_under_new_ids(server: AglServer, tmp_path: Path) -> None:
    """An old id is never created again; the new rollout names the one it replaces, siblings and order stay."""
    run = settings("24/2/5", rollout_n=2)
    first = run_life(run, tmp_path, server.url, stop_after_step=3)
    orphans = server.rollouts()
    server.restart()
    started_before = len(server.agents.starts)
    second = run_life(run, tmp_path, server.url, die_at=("trained", 4))
    left = server.rollouts()
    assert not set(orphans) & {rid for rid, _ in server.agents.starts[started_before:]}
    created = [row for _, row in server.agents.starts[started_before:]]
    assert created == [6, 6, 7, 7, 8, 8, 9, 9, 10, 10], "in flight first, oldest first, then the new ones"
    replaced = [record.metadata.model_extra["replaces"] for record in left.values() if record.input["index"] == 8]
    assert replaced == [rid for rid, record in orphans.items() if record.input["index"] == 8]
    assert second.pulls[4] == [9, 10]
    assert_continues(uninterrupted(run, server), first, second, until=4)


@pytest.mark.parametrize("deaths", [[1], [3], [1, 4], [2, 3, 4]])
def test_siblings_stay_together(server: AglServer, tmp_path: Path, deaths: list[int]) -> None:
    """With rollout.n = 3 groups keep their size through any number of resumes."""
    run = settings("16/2/5", rollout_n=3, shuffle=True)
    lives = lives_with_deaths(run, tmp_path, server, deaths)
    assert_continues(uninterrupted(run, server), *lives)
    assert {step.num_rollouts for step in lineage(*lives).values()} == {6}


@pytest.mark.parametrize("restart_server", [False, True], ids=["server alive", "server restarted"])
def test_every_input_is_trained_once(server: AglServer, tmp_path: Path, restart_server: bool) -> None:
    """Over the lineage nothing is lost and nothing is trained twice, whether or not the server survived."""
    run = settings("24/2/6", shuffle=True)
    truth = uninterrupted(run, server)
    lives = [run_life(run, tmp_path, server.url, stop_after_step=step) for step in (2, 5)]
    if restart_server:
        server.restart()
    lives.append(run_life(run, tmp_path, server.url))
    assert_continues(truth, *lives)
    trained = rows_trained(lineage(*lives))
    assert len(trained) == len(set(trained))


def test_rich_columns_come_back_equal(server: AglServer, tmp_path: Path) -> None:
    """Tensor, numeric array, object array and list columns of the tail: value, type, dtype and shape."""
    run = settings("12/2/5", payload="rich", shuffle=True, epochs=2)
    truth = uninterrupted(run, server)
    lives = lives_with_deaths(run, tmp_path / "run", server, [2, 5])
    assert_continues(truth, *lives)

    with quiet():
        trainer = build_trainer(run, tmp_path / "tail", server.url)
        trainer.global_steps = 0
        trainer._load_checkpoint()
        trainer.global_steps, trainer.epoch = 1, 1
        trainer._next_train_batch_dict_with_size(5)
        trainer._save_checkpoint()
        want = trainer._next_train_batch_dict_with_size(6)
        close_trainer(trainer)
        again = build_trainer(run, tmp_path / "tail", server.url)
        again.global_steps = 0
        again._load_checkpoint()
        got = again._next_train_batch_dict_with_size(6)
        close_trainer(again)
    assert list(got) == list(want)
    for name in want:
        assert_same(got[name], want[name], name)


def assert_same(got: Any, want: Any, name: str) -> None:
    """Equal in type, dtype, shape and value; arrays of objects element by element."""
    import numpy as np
    import torch

    assert type(got) is type(want), name
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert torch.equal(got, want), name
    elif isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.tolist() == want.tolist(), name
    else:
        assert got == want, name


def test_step_without_a_batch_does_not_move_the_stream(server: AglServer, tmp_path: Path) -> None:
    """Step 2 of 12/4/6 trains nothing and saves nothing; the position at step 3 counts rows, not steps."""
    run = settings("12/4/6", epochs=2)
    plan = AgentPlan(step_outcome={2: "overlong"})
    lives = lives_with_deaths(run, tmp_path, server, [3], plan)
    assert lives[0].saves.keys() == {1, 3}
    assert_continues(uninterrupted(run, server, plan), *lives)


def test_resume_with_a_critic_is_exact(server: AglServer, tmp_path: Path) -> None:
    """A critic changes what VERL saves, not the stream; both models are of the step."""
    run = settings("12/2/5", use_critic=True, shuffle=True)
    lives = lives_with_deaths(run, tmp_path, server, [2])
    assert_continues(uninterrupted(run, server), *lives)
    assert lives[1].weights == {"actor": 2, "critic": 2}
    assert (tmp_path / "global_step_2" / "critic").is_dir()


def test_validation_before_training_leaves_the_stream_alone(server: AglServer, tmp_path: Path) -> None:
    """A validation on start has rollouts of its own, before the first training step re-creates those in flight."""
    run = settings("14/4/6", val_before_train=True, shuffle=True, epochs=2)
    lives = lives_with_deaths(run, tmp_path, server, [1, 3])
    assert_continues(uninterrupted(run, server), *lives)


def test_fit_twice_in_one_process_starts_afresh(server: AglServer, tmp_path: Path) -> None:
    """The second `fit` of a trainer does not begin with the tail and the groups of the first."""
    run = settings("14/4/6", resume_mode="disable", total_steps=2)
    recorder = Recorder()
    with quiet():
        trainer = build_trainer(run, tmp_path, server.url, recorder=recorder)
        trainer.fit()
        trainer.fit()
        close_trainer(trainer)
    pulls = [event["rows"] for event in recorder.events if event["kind"] == "pulled"]
    assert pulls == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]] * 2


def test_fit_twice_with_resume_continues(server: AglServer, tmp_path: Path) -> None:
    """A second `fit` that resumes goes on where the newest checkpoint stands, not where the object stands."""
    run = settings("14/4/6", epochs=2)
    recorder = Recorder()
    deaths = iter([3])

    def die_once(point: str, step: int) -> bool:
        return point == "pulled" and step == 3 and next(deaths, None) is not None

    with quiet():
        trainer = build_trainer(run, tmp_path, server.url, recorder=recorder, die_at=die_once)
        with pytest.raises(Death):
            trainer.fit()
        seen = len(recorder.events)
        trainer.fit()
        close_trainer(trainer)
    lives = Life.from_events(recorder.events[:seen]), Life.from_events(recorder.events[seen:])
    assert lives[1].start == 2
    assert_continues(uninterrupted(run, server), *lives)


# --- the cases by number ------------------------------------------------------------------------------------------


def test_c1_first_pull_begins_with_the_tail(server: AglServer, tmp_path: Path) -> None:
    """14/4/6 resumed from step 1 pulls 6 to 9, the first two from the tail, with 4 and 5 still in flight."""
    run = settings("14/4/6", epochs=2)
    lives = lives_with_deaths(run, tmp_path, server, [1])
    assert lives[1].restored is not None
    assert lives[1].restored.in_flight == (4, 5)
    assert lives[1].pulls[2] == [6, 7, 8, 9]
    assert_continues(uninterrupted(run, server), *lives)


@pytest.mark.parametrize("deaths", [[1], [2], [3], [4], [5], [1, 2, 3, 4, 5]])
def test_c2_every_row_is_trained_exactly_once(server: AglServer, tmp_path: Path, deaths: list[int]) -> None:
    """24/4/8, one epoch, resumed after any step or after every one."""
    run = settings("24/4/8")
    lives = lives_with_deaths(run, tmp_path, server, deaths)
    assert sorted(rows_trained(lineage(*lives))) == list(range(24))
    assert_continues(uninterrupted(run, server), *lives)


def test_c2_rows_that_are_always_slow_are_never_dropped(server: AglServer, tmp_path: Path) -> None:
    """Rows 3, 9 and 17 finish last; they are in flight through every resume and are not lost."""
    run = settings("24/4/8")
    plan = AgentPlan(rank={3: 1, 9: 1, 17: 1})
    truth = uninterrupted(run, server, plan)
    lives = lives_with_deaths(run, tmp_path, server, [1, 2, 3, 4, 5], plan)
    assert_continues(truth, *lives)
    assert set(lives[-1].saves[6].in_flight) >= {3, 9, 17}


def test_c4_resume_in_mid_epoch_stays_in_the_epoch(server: AglServer, tmp_path: Path) -> None:
    """12/4/6 shuffled, step 3: next pull and epoch are those of the uninterrupted run."""
    run = settings("12/4/6", shuffle=True, epochs=2)
    truth = uninterrupted(run, server)
    lives = lives_with_deaths(run, tmp_path, server, [3])
    assert lives[1].pulls[4] == truth.pulls[4]
    assert lives[1].epochs[4] == truth.epochs[4] == 2
    assert_continues(truth, *lives)


def test_c5_number_of_steps_and_last_epoch_stay(server: AglServer, tmp_path: Path) -> None:
    """14/4/6, two epochs, resumed from step 2: as many steps, and the same last epoch, as uninterrupted."""
    run = settings("14/4/6", epochs=2)
    truth = uninterrupted(run, server)
    lives = lives_with_deaths(run, tmp_path, server, [2])
    steps = lineage(*lives)
    assert max(steps) == max(truth.steps)
    assert steps[max(steps)].epoch == truth.epochs[max(truth.steps)]


def test_c6_first_pull_is_b_and_not_a(server: AglServer, tmp_path: Path) -> None:
    """14/4/6 with two groups in flight pulls four inputs after the resume."""
    run = settings("14/4/6", epochs=2)
    lives = lives_with_deaths(run, tmp_path, server, [1])
    assert len(lives[1].pulls[2]) == 4


def test_c7_fewer_active_groups_than_are_in_flight(server: AglServer, tmp_path: Path) -> None:
    """40/4/12 with eight groups in flight, resumed with A = 8, trains on, and loses nothing."""
    run = settings("40/4/12")
    truth = uninterrupted(run, server)
    first = run_life(run, tmp_path, server.url, stop_after_step=2)
    assert len(first.saves[2].in_flight) == 8
    second = run_life(replace(run, A=8), tmp_path, server.url)
    steps = lineage(first, second)
    assert second.pulls[3] == truth.pulls[3][:1], "room for one new input beside seven old groups"
    pulled = rows_pulled(steps)
    assert pulled == rows_pulled(truth.steps)[: len(pulled)]
    last = second.saves[max(second.saves)]
    assert sorted([*rows_trained(steps), *last.in_flight]) == sorted(pulled)


def test_c8_finished_run_does_nothing_more(server: AglServer, tmp_path: Path) -> None:
    """12/4/12, one epoch, finished after step 2; started again it pulls nothing."""
    run = settings("12/4/12")
    first = run_life(run, tmp_path, server.url)
    again = run_life(run, tmp_path, server.url)
    assert list(first.steps) == [1, 2]
    assert again.start == 2
    assert again.steps == {}
    assert again.finished


def test_c9_slow_row_comes_back_alone(server: AglServer, tmp_path: Path) -> None:
    """Row 2 takes until step 5; what is in flight at step 4 comes back, nothing after row 2 is trained twice."""
    run = settings("24/4/8")
    plan = AgentPlan(hold={2: 5})
    truth = uninterrupted(run, server, plan)
    lives = lives_with_deaths(run, tmp_path, server, [4], plan)
    assert lives[1].restored is not None
    assert lives[1].restored.in_flight == truth.saves[4].in_flight
    assert lives[1].restored.in_flight[0] == 2
    assert_continues(truth, *lives)
    assert sorted(rows_trained(lineage(*lives))) == list(range(24))


def test_c11_later_epochs_stay_full(server: AglServer, tmp_path: Path) -> None:
    """12/4/6, four epochs, resumed from step 2: every epoch gives each row once."""
    run = settings("12/4/6", epochs=4)
    lives = lives_with_deaths(run, tmp_path, server, [2])
    pulled = rows_pulled(lineage(*lives))
    assert [pulled[i : i + 12] for i in range(0, 36, 12)] == [list(range(12))] * 3
    assert_continues(uninterrupted(run, server), *lives)


@pytest.mark.parametrize(("case", "step"), [("8/4/8", 1), ("10/4/6", 2), ("10/4/8", 1), ("8/4/6", 1), ("8/4/12", 1)])
@pytest.mark.parametrize("shuffle", [False, True], ids=["sequential", "shuffled"])
def test_c12_epoch_advances_exactly_once(
    server: AglServer, tmp_path: Path, case: str, step: int, shuffle: bool
) -> None:
    """At an exactly drained loader, StopIteration seen or not, no epoch is empty and none repeats."""
    run = settings(case, epochs=3, shuffle=shuffle)
    lives = lives_with_deaths(run, tmp_path, server, [step])
    assert_continues(uninterrupted(run, server), *lives)


def test_c13_more_epochs_continue_in_their_own_order(server: AglServer, tmp_path: Path) -> None:
    """A finished run of one epoch, given two, trains the second one in the second one's order."""
    run = settings("12/4/6", shuffle=True)
    first = run_life(run, tmp_path, server.url)
    assert first.finished
    longer = replace(run, epochs=2)
    second = run_life(longer, tmp_path, server.url)
    assert second.start == max(first.steps)
    assert_continues(uninterrupted(longer, server), first, second)


def test_c14_first_pull_begins_with_the_last_row(server: AglServer, tmp_path: Path) -> None:
    """10/4/7 resumed from step 1 pulls row 7 first."""
    run = settings("10/4/7", epochs=2)
    lives = lives_with_deaths(run, tmp_path, server, [1])
    assert lives[1].pulls[2] == [7, 0, 1, 2]
    assert_continues(uninterrupted(run, server), *lives)


def test_c15_position_does_not_come_from_step_numbers(server: AglServer, tmp_path: Path) -> None:
    """Three steps without a batch before the only checkpoint, at step 5."""
    run = settings("24/4/6", shuffle=True, epochs=2, save_freq=5)
    plan = AgentPlan(step_outcome={2: "overlong", 3: "overlong", 4: "overlong"})
    lives = lives_with_deaths(run, tmp_path, server, [5], plan)
    assert lives[1].start == 5
    assert_continues(uninterrupted(run, server, plan), *lives)


@pytest.mark.parametrize("val_before_train", [False, True])
def test_c16_dropped_samples_are_those_of_the_uninterrupted_run(
    server: AglServer, tmp_path: Path, val_before_train: bool
) -> None:
    """With a mini-batch of 3 one of 4 samples is dropped at random; the resumed run drops the same ones."""
    import numpy as np
    import torch

    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)

    run = settings("40/4/6", mini_batch=3, val_before_train=val_before_train, seed=16 + val_before_train)
    seed(1)
    truth = uninterrupted(run, server)
    seed(1)
    first = run_life(run, tmp_path, server.url, stop_after_step=3)
    seed(2)
    second = run_life(run, tmp_path, server.url)
    assert all(len(step.updated) == 3 for step in truth.steps.values())
    steps = lineage(first, second)
    assert {n: sorted(step.updated) for n, step in steps.items()} == {
        n: sorted(step.updated) for n, step in truth.steps.items()
    }
