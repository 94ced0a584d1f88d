"""A training script of the shape of agent-lightning's examples: composed config, own overrides, dotlist overrides."""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Sequence
from pprint import pprint
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


def own_settings(model: str, out: str) -> dict[str, Any]:
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 2, "dataloader_num_workers": 0},
        "actor_rollout_ref": {
            "rollout": {"n": 1, "name": "vllm", "log_prob_micro_batch_size_per_gpu": 1},
            "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1, "use_kl_loss": False},
            "model": {"path": model, "use_remove_padding": False},
        },
        "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "logger": ["console"], "default_local_dir": out},
        "agentlightning": {"async_rollout": {"enabled": True, "async_train_batch_size": 4}},
    }


def build_config(model: str, out: str, config_overrides: Sequence[str]) -> Any:
    config_dir = str(importlib.resources.files("agentlightning.verl"))
    with initialize_config_dir(config_dir=config_dir, version_base=None):
        base = compose(config_name="config")
    OmegaConf.set_struct(base, False)
    overrides = OmegaConf.create(own_settings(model, out))
    return OmegaConf.merge(base, overrides, OmegaConf.from_dotlist(list(config_overrides)))


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_known_args()


def main() -> None:
    from agentlightning.verl.entrypoint import run_ppo

    args, config_overrides = parse()
    config = build_config(args.model, args.out, config_overrides)
    pprint(OmegaConf.to_container(config, resolve=True))  # noqa: T203
    rows = [{"question": f"question {row}"} for row in range(8)]
    run_ppo(config, train_dataset=rows, val_dataset=rows[:2])


if __name__ == "__main__":
    main()
