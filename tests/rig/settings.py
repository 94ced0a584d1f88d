"""What a run of the rig looks like: one frozen, JSON-able record, and the framework config made from it."""

from __future__ import annotations

import functools
import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunSettings:
    """One training run. `n/B/A` as in the case notation: rows, data.train_batch_size, async_train_batch_size.

    Attributes:
        n: Rows of the dataset.
        B: `data.train_batch_size`, prompt groups trained per step.
        A: `async_train_batch_size`, prompt groups active per step; ignored if `async_mode` is False.
        mini_batch: `ppo_mini_batch_size`; 1 drops no sample, ever.
        extension: The section `agentlightning.async_checkpoint`, or None to leave it out.
        text: What the question of each row begins with.
        columns: Further columns of the dataset.
        payload: `plain`, or `rich` for tensor, numeric numpy, object numpy and list columns.
        overrides: Further dotlist overrides, applied last.
    """

    n: int
    B: int
    A: int
    shuffle: bool = False
    seed: int = 1
    epochs: int = 1
    num_workers: int = 0
    gen_batch_size: int | None = None
    rollout_n: int = 1
    save_freq: int = 1
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    total_steps: int | None = None
    async_mode: bool = True
    extension: dict[str, Any] | None = None
    use_critic: bool = False
    max_ckpt_to_keep: int | None = None
    async_save: bool = False
    mini_batch: int = 1
    val_before_train: bool = False
    text: str = "question"
    columns: tuple[str, ...] = ()
    payload: str = "plain"
    overrides: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Text from which `from_json` builds an equal record."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunSettings:
        """The inverse of `to_json`."""
        values = json.loads(text)
        values["overrides"] = tuple(values["overrides"])
        values["columns"] = tuple(values["columns"])
        return cls(**values)


def dataset_rows(settings: RunSettings) -> list[dict[str, Any]]:
    """(n,) rows; `extra_info.index`, which agent-lightning copies to `index`, is the row id."""
    return [
        {
            "question": f"{settings.text} {row}",
            "extra_info": {"index": row},
            **{name: f"{name} of {row}" for name in settings.columns},
        }
        for row in range(settings.n)
    ]


@functools.cache
def _base_config() -> bytes:
    """agent-lightning's config, pickled: unpickling takes a third of the time of a deep copy."""
    from agentlightning import verl as agl_verl
    from hydra import compose, initialize_config_dir

    assert agl_verl.__file__ is not None
    with initialize_config_dir(str(Path(agl_verl.__file__).parent), version_base=None):
        return pickle.dumps(compose("config"))


def compose_config(settings: RunSettings, out_dir: Path | str, base_url: str) -> Any:
    """agent-lightning's own config, composed with hydra, with the values of `settings` on top.

    Args:
        settings: The run.
        out_dir: `trainer.default_local_dir`; a relative one stays relative.
        base_url: Of the agl-server.

    Returns:
        A `DictConfig`. Struct mode is off, as in agent-lightning's examples; VERL switches it on by itself.
    """
    from omegaconf import OmegaConf

    config = pickle.loads(_base_config())
    OmegaConf.set_struct(config, False)
    values: dict[str, Any] = {
        "data.train_batch_size": settings.B,
        "data.val_batch_size": 2,
        "data.shuffle": settings.shuffle,
        "data.seed": settings.seed,
        "data.dataloader_num_workers": settings.num_workers,
        "actor_rollout_ref.model.path": "rig/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": settings.mini_batch,
        "actor_rollout_ref.actor.checkpoint.async_save": settings.async_save,
        "actor_rollout_ref.rollout.n": settings.rollout_n,
        "critic.enable": settings.use_critic,
        "algorithm.adv_estimator": "gae" if settings.use_critic else "grpo",
        "algorithm.enable_rollout_level_advantage": not settings.use_critic,
        "trainer.total_epochs": settings.epochs,
        "trainer.total_training_steps": settings.total_steps,
        "trainer.save_freq": settings.save_freq,
        "trainer.resume_mode": settings.resume_mode,
        "trainer.resume_from_path": settings.resume_from_path,
        "trainer.default_local_dir": str(out_dir),
        "trainer.max_actor_ckpt_to_keep": settings.max_ckpt_to_keep,
        "trainer.max_critic_ckpt_to_keep": settings.max_ckpt_to_keep,
        "trainer.val_before_train": settings.val_before_train,
        "trainer.logger": [],
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "agentlightning.agl_base_url": base_url,
        "agentlightning.async_rollout.enabled": settings.async_mode,
        "agentlightning.async_rollout.async_train_batch_size": settings.A if settings.async_mode else None,
        # Short rows: the padding is most of what a step computes.
        "agentlightning.trace_aggregator.trajectory_max_prompt_length": 8,
        "agentlightning.trace_aggregator.trajectory_max_response_length": 8,
    }
    if settings.gen_batch_size is not None:
        values["data.gen_batch_size"] = settings.gen_batch_size
    if settings.extension is not None:
        values["agentlightning.async_checkpoint"] = settings.extension
    for name, value in values.items():
        OmegaConf.update(config, name, value, force_add=True)
    if settings.overrides:
        config = OmegaConf.merge(config, OmegaConf.from_dotlist(list(settings.overrides)))
    return config
