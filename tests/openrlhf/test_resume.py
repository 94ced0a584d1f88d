"""A killed and resumed run trains what the uninterrupted one does, in the same order, wherever it was killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.openrlhf.rig.arguments import version
from tests.openrlhf.rig.stage import SEED, Life, Stage

NUM_RANDOM_SCENES = 100 if version() == "0.11.2" else 15


def resumed(stage: Stage, args: Any, kills: list[int]) -> list[Life]:
    """Live until each kill, then to the end; after a save under another seed, since the order is the saved one."""
    lives: list[Life] = []
    for number, crash_at in enumerate([*kills, None]):
        has_checkpoint = (Path(args.ckpt.path) / "_actor" / "latest").exists()
        lives.append(stage.live(args, crash_at=crash_at, seed=SEED + number if has_checkpoint else SEED))
    return lives


def lineage(lives: list[Life]) -> list[list[str]]:
    """Batches of the steps whose weights survived: a resume discards the steps after its checkpoint."""
    trained: list[list[str]] = []
    for life in lives:
        trained = trained[: life.start_step] + life.trained
    return trained


def check(stage: Stage, folder: Path, num_prompts: int, kills: list[int] | random.Random, **settings: Any) -> None:
    """Compare a killed run with an uninterrupted one: batches, and OpenRLHF's own count of prompts."""
    whole = stage.live(stage.args(folder / "whole", num_prompts, **settings))
    if isinstance(kills, random.Random):
        steps = range(1, len(whole.trained) + 1)
        kills = sorted(kills.sample(steps, min(len(steps), kills.choice([1, 1, 2]))))
    lives = resumed(stage, stage.args(folder / "killed", num_prompts, **settings), kills)
    assert lineage(lives) == whole.trained
    if lives[-1].trained:
        assert lives[-1].counted == whole.counted


@pytest.mark.parametrize(
    ("num_prompts", "crash_at"),
    [
        pytest.param(8, 2, id="tail_left"),
        pytest.param(8, 3, id="generation_batch_used_up"),
        pytest.param(8, 5, id="end_of_episode_not_seen_by_the_loader"),
        pytest.param(7, 4, id="loader_drained_and_tail_left"),
        pytest.param(7, 5, id="loader_drained_and_nothing_left"),
        pytest.param(7, 6, id="in_the_second_episode"),
        pytest.param(3, 2, id="loader_drained_by_the_first_generation"),
        pytest.param(7, 8, id="last_tail_of_the_run"),
    ],
)
def test_resume_is_exact_at_every_kind_of_boundary(
    stage: Stage, tmp_path: Path, num_prompts: int, crash_at: int
) -> None:
    """Two episodes, rollout batch 2, generation batch 4."""
    whole = stage.args(tmp_path / "probe", num_prompts, train__num_episodes=2)
    steps = len(stage.live(whole).trained)
    check(stage, tmp_path, num_prompts, [min(crash_at, steps)], train__num_episodes=2)


def test_finished_run_trains_nothing_more(stage: Stage, tmp_path: Path) -> None:
    """Started again, it ends at once: the last episode was handed out as a whole."""
    args = stage.args(tmp_path, 7)
    stage.live(args)
    assert stage.live(args).trained == []


@pytest.mark.parametrize("queue_size", [1, 4])
def test_state_belongs_to_the_trained_batch_however_far_generation_has_run_ahead(
    stage: Stage, tmp_path: Path, queue_size: int
) -> None:
    """With a queue of 4 the generator is up to five batches ahead of the checkpoint."""
    check(stage, tmp_path, 24, [4, 7], train__async_queue_size=queue_size, rollout__vllm_generate_batch_size=6)


def test_dynamic_filtering_pulls_no_prompt_twice(stage: Stage, tmp_path: Path) -> None:
    """Replacements for filtered prompts move the loader further than the generation batch."""
    check(stage, tmp_path, 20, [2, 4], **FILTERING)


def test_partial_rollout_is_exact(stage: Stage, tmp_path: Path) -> None:
    """Generation goes on while weights are updated."""
    check(stage, tmp_path, 16, [3], train__partial_rollout_enable=True, train__async_queue_size=4)


def test_loader_workers_are_exact(stage: Stage, tmp_path: Path) -> None:
    """The state of a loader with workers, over the end of an episode."""
    check(stage, tmp_path, 7, [3, 5], data__dataloader_num_workers=2, train__num_episodes=2)


def test_uninterrupted_run_trains_every_prompt_once_per_episode(stage: Stage, tmp_path: Path) -> None:
    """The last tail too, which is smaller than a batch, on versions that drop it."""
    life = stage.live(stage.args(tmp_path, 7, train__num_episodes=2))
    every = sorted(map(str, range(7)))
    assert [sorted(life.prompts[:7]), sorted(life.prompts[7:])] == [every, every]
    assert life.counted == {"episode": 1, "total_consumed_prompts": 14}


def test_filtered_last_prompts_do_not_cost_the_accepted_ones(stage: Stage, tmp_path: Path) -> None:
    """The loader drains while a replacement is looked for; every third prompt is filtered."""
    life = stage.live(stage.args(tmp_path, 10, **FILTERING))
    assert sorted(set(life.prompts)) == [str(number) for number in range(10) if number % 3]


@pytest.mark.skipif(version() == "0.11.0", reason="OpenRLHF 0.11.0 loses the last tail, which this one trains")
def test_uninterrupted_run_is_the_one_of_openrlhf(stage: Stage, tmp_path: Path) -> None:
    """Switching the extension on changes neither the order of prompts nor the batches."""
    settings = {"train__num_episodes": 2, "rollout__vllm_generate_batch_size": 5}
    ours = stage.live(stage.args(tmp_path / "ours", 13, **settings))
    theirs = stage.live(stage.args(tmp_path / "theirs", 13, **settings), extended=False)
    assert (ours.trained, ours.counted) == (theirs.trained, theirs.counted)


def test_best_checkpoint_holds_the_boundary_too(stage: Stage, tmp_path: Path) -> None:
    """Written after an evaluation, and no regular one."""
    settings = {
        "ckpt__save_steps": -1,
        "eval__steps": 1,
        "eval__dataset": stage.folder / "prompts_3.jsonl",
        "eval__split": "train",
    }
    stage.args(tmp_path, 3)  # writes the file
    whole = stage.live(stage.args(tmp_path / "whole", 12, **settings))
    lives = resumed(stage, stage.args(tmp_path / "killed", 12, **settings), [5])
    assert 0 < lives[1].start_step < 5
    assert lineage(lives) == whole.trained


@pytest.mark.parametrize("seed", range(NUM_RANDOM_SCENES))
def test_random_scene_trains_what_the_uninterrupted_run_does(stage: Stage, tmp_path: Path, seed: int) -> None:
    """Killed once or twice at random steps, saved at every one or every second."""
    draw = random.Random(seed)
    batch, filtering = draw.randint(1, 3), draw.random() < 0.3
    settings: dict[str, Any] = {
        "rollout__batch_size": batch,
        "rollout__vllm_generate_batch_size": draw.randint(batch, 3 * batch),
        "rollout__n_samples_per_prompt": draw.randint(1, 2),
        "train__async_queue_size": draw.choice([1, 4]),
        "train__num_episodes": draw.randint(1, 2),
        "train__partial_rollout_enable": draw.random() < 0.3,
        "ckpt__save_steps": draw.randint(1, 2),
    }
    check(stage, tmp_path, draw.randint(1, 12), draw, **settings | (FILTERING if filtering else {}))


FILTERING: dict[str, Any] = {
    "algo__dynamic_filtering_enable": True,
    "algo__dynamic_filtering_range": "0 1",
    "rollout__n_samples_per_prompt": 2,
}
"""Every third prompt has the full score and is filtered out."""
