"""VERL's load and save, and what of its config decides about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from agl_async_ckpt.agl.internals.configs import overridden
from agl_async_ckpt.agl.internals.protocols import Trainer, TrainerSection


def saves_asynchronously(trainer: Trainer) -> bool:
    """Tell whether VERL leaves the tracker to a later callback (`actor.checkpoint.async_save`)."""
    from omegaconf import OmegaConf

    return bool(OmegaConf.select(trainer.config.actor_rollout_ref, "actor.checkpoint.async_save", default=False))


def finish_background_save(trainer: Trainer) -> None:
    """Wait for a model that is saved in the background, as VERL does at its last step; agent-lightning's loop does not.

    VERL asks its worker group for the method too: only workers that can save in the background have it.
    """
    if not saves_asynchronously(trainer):
        return
    finish = getattr(trainer.actor_rollout_wg, "async_calls_finalize_fn_exec", None)
    if finish is not None:
        finish(blocking=True)


@contextmanager
def once_models_are_written(trainer: Trainer, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in VERL's save after the models are written and before anything names the step as saved.

    VERL asks the training loader for its state at that place, in every supported version, then writes `data.pt` and
    the tracker. There is no other seam: the tracker is written by the same method.
    """
    loader = trainer.train_dataloader
    state_dict = loader.state_dict

    def act_first() -> Any:
        act()
        return state_dict()

    loader.state_dict = act_first
    try:
        yield
    finally:
        del loader.state_dict  # the class's own method shows again


def step_folder(trainer: Trainer) -> Path:
    """Return the folder that VERL's save of the current step writes into."""
    return Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"


def loads_from_hdfs(trainer: Trainer) -> bool:
    """Tell whether VERL will refuse the start: it does not load from HDFS. A start from scratch loads nothing."""
    section = trainer.config.trainer
    return section.default_hdfs_dir is not None and section.resume_mode != "disable"


def loading(trainer: Trainer, step_dir: Path | None, *, past_tracker: bool) -> AbstractContextManager[None]:
    """Have VERL's load, which is the body, take exactly `step_dir`, or nothing.

    Args:
        trainer: The trainer.
        step_dir: An absolute path; VERL cannot read others.
        past_tracker: Have it not look at the output folder's tracker, which it does even for an explicit path, and
            dies in `int()` of a torn one.
    """
    if step_dir is None:
        return overridden(trainer.config.trainer, resume_mode="disable")
    values = {"resume_mode": "resume_path", "resume_from_path": str(step_dir)}
    if past_tracker:
        values["default_local_dir"] = str(step_dir)
    return overridden(trainer.config.trainer, **values)


def capacity_expires(section: TrainerSection, longest_step_s: float) -> bool:
    """Tell whether the machine's time runs out: VERL's own test, which reads it from the environment."""
    from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi

    try:
        return should_save_ckpt_esi(
            max_steps_duration=longest_step_s, redundant_time=section.get("esi_redundant_time", 0)
        )
    except ValueError:  # the variable holds no time
        return False
