"""The training driver, shaped like the training scripts of agent-lightning's examples.

Its config is composed, merged with settings of its own and with `key=value` arguments, and given to `run_ppo`.
"""

from __future__ import annotations

import argparse
import importlib.resources
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from cpu_training.cpu_backend import ROLLOUT_NAME
from cpu_training.hook_values import HOOKS, hook_file
from cpu_training.recording import record
from cpu_training.settings import (
    ASYNC_BATCH,
    ROLLOUTS_PER_INPUT,
    SAVE_EVERY,
    SEED,
    TRAIN_BATCH,
    dataset_rows,
)

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def data_settings() -> dict[str, Any]:
    """What decides the order of the inputs; the uninterrupted stream is read with the same settings."""
    return {"train_batch_size": TRAIN_BATCH, "shuffle": True, "seed": SEED, "dataloader_num_workers": 0}


def settings(run_dir: Path, server_url: str, server_key: str, steps: int, hook: str | None) -> dict[str, Any]:
    """The overrides that make agent-lightning's default config a tiny run on CPU."""
    # With one rollout per input nobody waits for a sibling: each is read as soon as its hook has run.
    rollouts_per_input = 1 if hook else ROLLOUTS_PER_INPUT
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {**data_settings(), "max_prompt_length": 64, "max_response_length": 64},
        "actor_rollout_ref": {
            "model": {
                "path": str(run_dir / "model"),
                # Removing padding needs flash-attn kernels; eager attention runs anywhere.
                "use_remove_padding": False,
                "enable_gradient_checkpointing": False,
                "override_config": {"attn_implementation": "eager"},
            },
            "actor": {
                "strategy": "fsdp2",  # FSDP1 refuses CPU
                # One row per rollout: with mini batches of one input no row is left over and dropped.
                "ppo_mini_batch_size": 1,
                "ppo_micro_batch_size_per_gpu": rollouts_per_input,
                "use_torch_compile": False,
                "use_kl_loss": False,
                "entropy_coeff": 0,
                "optim": {"lr": 1e-3},
                "fsdp_config": {"use_torch_compile": False, "model_dtype": "fp32", "mixed_precision": FP32},
            },
            "rollout": {
                "name": ROLLOUT_NAME,
                "n": rollouts_per_input,
                "tensor_model_parallel_size": 1,
                "log_prob_micro_batch_size_per_gpu": rollouts_per_input,
                "free_cache_engine": False,
                "agent": {"num_workers": 1},
            },
        },
        "reward": {"num_workers": 1},
        "trainer": {
            "n_gpus_per_node": 1,
            "nnodes": 1,
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": SAVE_EVERY,
            "total_epochs": 1,
            "total_training_steps": steps,
            "resume_mode": "auto",
            "default_local_dir": str(run_dir / "checkpoints"),
            "logger": ["console"],
        },
        "agentlightning": {
            "agl_base_url": server_url,
            "agl_key": server_key,
            "rollout_timeout_seconds": 120,
            "hooks": str(hook_file(hook)) if hook else None,
            "local": {"agent_class": "cpu_training.agent.Agent", "env_map": {"AGL_DEMO_INPUT": "input"}},
            "trace_aggregator": {
                "level": "trajectory",
                "trajectory_max_prompt_length": 64,
                "trajectory_max_response_length": 128,
            },
            "async_rollout": {"enabled": True, "async_train_batch_size": ASYNC_BATCH},
        },
        "ray_kwargs": {
            "ray_init": {
                # Made-up resources: VERL asks Ray for a GPU and a handful of CPUs, whatever the machine has.
                "num_cpus": 8,
                "num_gpus": 1,
                "object_store_memory": 200 * 1024**2,
                "include_dashboard": False,
                "runtime_env": {"worker_process_setup_hook": "cpu_training.worker_hook.setup"},
            }
        },
    }


def compose_config(overrides: dict[str, Any], dotlist: list[str]) -> DictConfig:
    """agent-lightning's default config, then `overrides`, then `key=value` arguments."""
    config_dir = str(importlib.resources.files("agentlightning.verl"))
    with initialize_config_dir(config_dir=config_dir, version_base=None):
        base = compose(config_name="config")
    OmegaConf.set_struct(base, False)
    merged = OmegaConf.merge(base, OmegaConf.create(overrides), OmegaConf.from_dotlist(dotlist))
    assert isinstance(merged, DictConfig)
    return merged


def main() -> None:
    """Train; returns when the last step is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--server-key", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--num-inputs", type=int, required=True)
    parser.add_argument("--hook", choices=HOOKS)
    parser.add_argument(
        "--stoppable", action="store_true", help="through agl_async_ckpt.run_ppo, which handles signals"
    )
    args, dotlist = parser.parse_known_args()

    config = compose_config(settings(args.run_dir, args.server_url, args.server_key, args.steps, args.hook), dotlist)
    rows = dataset_rows(args.num_inputs)

    if args.stoppable:
        from agl_async_ckpt import run_ppo
    else:
        from agentlightning.verl.entrypoint import run_ppo

    run_ppo(config, train_dataset=rows, val_dataset=rows[:TRAIN_BATCH])
    record("finished")


if __name__ == "__main__":
    main()
