"""Scenes drawn from a seed: sizes, agents, hooks, own columns, retention, validations, and one to three interruptions.

`python -m tests.yardstick.campaign 100 --seed 7` runs some and names those that differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.rig.in_flight import SiblingPlan
from tests.rig.life import Parts, quiet
from tests.rig.server import AglServer
from tests.rig.settings import RunSettings
from tests.yardstick.hooks import CORRECTS_THE_TRACE, POSTS_A_REWARD, POSTS_THE_TRACE, RELABELS
from tests.yardstick.scene import (
    Account,
    Interruption,
    Scene,
    alone,
    assert_resumed,
    assert_same,
    extended,
    interrupted,
)

HOOKS = {"": "", "reward": POSTS_A_REWARD, "trace": CORRECTS_THE_TRACE, "relabel": RELABELS}
MAX_STEPS = 7


@dataclass
class Figures:
    """How many scenes agreed, and how often each trait was among them."""

    scenes: int = 0
    lives: int = 0
    traits: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        traits = ", ".join(f"{name} {count}" for name, count in sorted(self.traits.items()))
        text = f"{self.scenes} scenes ({self.lives} interrupted lives) as by the trainer alone: {traits}"
        return "\n".join([text, f"{len(self.differing)} scenes differ", *self.differing])


def draw_scene(dice: random.Random) -> tuple[Scene, str]:
    """Draw a scene; returns it with the name of its hooks."""
    run = _run(dice)
    hooks = dice.choice(["", "", *HOOKS])
    plan = _plan(dice, run)
    if dice.random() < 0.15:
        # The agents record nothing, the hook posts all of it.
        plan, hooks = replace(plan, outcome=dict.fromkeys(range(run.n), "silent")), "silent agents"
    parts = Parts(sampler=dice.choice([None] * 4 + [with_replacement]))
    if run.payload == "plain" and dice.random() < 0.2:
        parts = replace(parts, collate=number_per_batch)
    return Scene(run, plan, hooks=HOOKS.get(hooks, POSTS_THE_TRACE), parts=parts), hooks


def with_replacement(data: Any, dataset: Any) -> Any:
    """A sampler that draws any row any time."""
    import torch
    from torchdata.stateful_dataloader.sampler import RandomSampler

    generator = torch.Generator()
    generator.manual_seed(int(data.seed))
    return RandomSampler(dataset, replacement=True, generator=generator)


def number_per_batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """VERL's collate function, and a column whose type of number depends on the batch."""
    import numpy as np
    from verl.utils.dataset.rl_dataset import collate_fn

    ids = [int(row["index"]) for row in rows]
    return {**collate_fn(rows), "number": np.asarray(ids, dtype=np.int64 if ids[0] % 2 else np.float64)}


def judge(number: int, server: AglServer, folder: Path) -> tuple[tuple[Interruption, ...], list[str]]:
    """Draw the scene of a number, run it three times and compare.

    Returns:
        The interruptions, and what is special about the scene.

    Raises:
        AssertionError: Names the scene and what differs.
    """
    dice = random.Random(number)
    scene, hooks = draw_scene(dice)
    interruptions: tuple[Interruption, ...] = ()
    try:
        truth = alone(scene, server, folder)
        interruptions = tuple(draw_interruptions(dice, scene.run, truth))
        assert_same(truth, extended(scene, server, folder))
        runs_again = hooks != "silent agents" and {"failed", "silent"} & set(scene.plan.outcome.values())
        assert_resumed(truth, interrupted(scene, server, folder, *interruptions), same_order=not runs_again)
    except Exception as error:
        lines = [f"scene {number}: {scene.run}", scene.plan, f"hooks: {hooks or None}", *interruptions]
        text = "\n  ".join(map(str, lines))
        raise AssertionError(f"{text}\n  {type(error).__name__}: {error}") from error
    return interruptions, _traits(scene, hooks, interruptions)


def run_campaign(numbers: range, server: AglServer, folder: Path) -> Figures:
    """Judge the scenes of some numbers."""
    figures = Figures()
    for number in numbers:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            try:
                interruptions, traits = judge(number, server, Path(place))
            except AssertionError as error:
                figures.differing.append(str(error))
                continue
        figures.scenes += 1
        figures.lives += len(interruptions)
        figures.traits.update(traits)
    return figures


def _run(dice: random.Random) -> RunSettings:
    b = dice.randint(1, 3)
    a = dice.randint(b + 1, 3 * b + 2)
    gen_batch_size = dice.choice([None, None, None, dice.randint(1, 4)])
    test_freq = dice.choice([0, 0, 0, 1, 2])
    val_before_train = dice.random() < 0.2
    return RunSettings(
        n=dice.randint(max(a, gen_batch_size or 0), 20),  # the played agents tell groups apart by their rows
        B=b,
        A=a,
        shuffle=dice.random() < 0.5,
        seed=dice.randint(0, 3),
        epochs=dice.randint(1, 3),
        num_workers=dice.choice([0] * 9 + [2]),
        gen_batch_size=gen_batch_size,
        rollout_n=dice.choice([1, 1, 2, 2, 3]),
        save_freq=dice.choice([1, 1, 1, 2]),
        total_steps=dice.randint(4, MAX_STEPS),
        use_critic=dice.random() < 0.2,
        max_ckpt_to_keep=dice.choice([None, None, 1, 2]),
        mini_batch=dice.randint(1, b),
        val_before_train=val_before_train,
        # The rig collates rows of a validation as the trainer's buffer has them, which `DataProto` does not take.
        payload="plain" if test_freq or val_before_train else dice.choice(["plain", "rich"]),
        overrides=(f"trainer.test_freq={test_freq}",) if test_freq else (),
    )


def _plan(dice: random.Random, run: RunSettings) -> SiblingPlan:
    rows = range(run.n)

    def some(share: float) -> list[int]:
        return [row for row in rows if dice.random() < share]

    # A step all of whose rows bring nothing ends the trainer alone as well: one such row at most, among others.
    outcome = {dice.choice(rows): dice.choice(["failed", "silent", "overlong"])} if run.B > 1 and run.n > 4 else {}
    return SiblingPlan(
        rank=dict.fromkeys(some(0.15), 1),
        outcome=outcome if dice.random() < 0.4 else {},
        early=dict.fromkeys(some(0.4), 1) if run.rollout_n > 1 else {},
    )


def draw_interruptions(dice: random.Random, run: RunSettings, truth: Account) -> list[Interruption]:
    """Draw one to three interruptions before the last step of the trainer alone."""
    last = max(truth.steps)
    if last == 1:
        return [Interruption("trained", 1)]
    steps = sorted(dice.sample(range(1, last), min(last - 1, dice.randint(1, 3))))
    found = [_interruption(dice, run, truth, step) for step in steps]
    has_forked = False
    for index, end in enumerate(found):  # a fork's folder holds no step of before
        found[index] = replace(end, back_to=None, fork=False) if has_forked else end
        has_forked = has_forked or end.fork
    return found


def _interruption(dice: random.Random, run: RunSettings, truth: Account, step: int) -> Interruption:
    points = ["pulled", "trained"]
    if truth.steps[step].samples:
        points.append("updated")
    test_freq = next((int(text.partition("=")[2]) for text in run.overrides), 0)
    if test_freq and step % test_freq == 0:
        points += ["validating", "validating"]
    if step in truth.lives[0].saves:
        points += ["save", "actor_saved", "saved", "saved", "saved"]
    server = dice.choice(["alive", "restarted"])
    meanwhile = dice.choice(["", "", "ok", "failed"])
    if dice.random() < 0.2:
        return Interruption(dice.choice(["pulled", "trained"]), step, how="stop", server=server)
    point = dice.choice(points)
    back_to = None
    fork = False
    if point == "saved" and run.max_ckpt_to_keep is None and dice.random() < 0.3:
        back_to = dice.choice([saved for saved in truth.lives[0].saves if saved <= step])
        fork = back_to is not None and dice.random() < 0.5
    return Interruption(point, step, server=server, meanwhile=meanwhile, back_to=back_to, fork=fork)


def _traits(scene: Scene, hooks: str, interruptions: tuple[Interruption, ...]) -> list[str]:
    """Name what is special about a scene."""
    run, plan = scene.run, scene.plan
    traits = {
        f"hook {hooks}": bool(hooks),
        "siblings": run.rollout_n > 1,
        "bad row": bool(plan.outcome) and hooks != "silent agents",
        "kept few": run.max_ckpt_to_keep is not None,
        "critic": run.use_critic,
        "validations": run.val_before_train or bool(run.overrides),
        "rich columns": run.payload == "rich",
        "surplus": run.mini_batch > 1,
        "loader workers": run.num_workers > 0,
        "sampler with replacement": scene.parts.sampler is not None,
        "numbers of two types": scene.parts.collate is not None,
    }
    for end in interruptions:
        traits[f"{end.how} at {end.point}"] = True
        traits[f"server {end.server}"] = True
        traits["fork" if end.fork else "roll-back"] = end.back_to is not None
    return [name for name, holds in traits.items() if holds]


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("scenes", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one (default: 0)")
    args = parser.parse_args(argv)
    with quiet():
        server = AglServer().start()
    try:
        with tempfile.TemporaryDirectory(prefix="yardstick-") as folder:
            figures = run_campaign(range(args.seed, args.seed + args.scenes), server, Path(folder))
            print(figures)  # noqa: T201
    finally:
        server.stop()
    return 1 if figures.differing else 0


if __name__ == "__main__":
    sys.exit(main())
