"""A run of the rig as a script that knows nothing of the extension.

`--settings` is the JSON of a `RunSettings`, `--url` the address of the agl-server.
"""

from __future__ import annotations

import argparse


def main() -> None:
    from agentlightning.verl.entrypoint import run_ppo
    from omegaconf import OmegaConf

    from tests.rig.settings import RunSettings, compose_config, dataset_rows

    parser = argparse.ArgumentParser()
    for name in ("model", "out", "settings", "url"):
        parser.add_argument(f"--{name}", required=True)
    args, config_overrides = parser.parse_known_args()
    settings = RunSettings.from_json(args.settings)
    # What VERL's `validate_config` and the task runner want beyond what the trainer does.
    needed = [
        f"actor_rollout_ref.model.path={args.model}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    ]
    config = compose_config(settings, args.out, args.url)
    config = OmegaConf.merge(config, OmegaConf.from_dotlist([*needed, *config_overrides]))
    rows = dataset_rows(settings)
    run_ppo(config, train_dataset=rows, val_dataset=rows[:2])


if __name__ == "__main__":
    main()
