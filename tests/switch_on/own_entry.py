"""The same training through `agl_async_ckpt.run_ppo`; `--runtime-env` initialises Ray first, as a notebook would."""

from __future__ import annotations

import json
import sys

from agl_async_ckpt import run_ppo
from tests.switch_on.train import build_config, parse


def main() -> None:
    args, rest = parse()
    config = build_config(args.model, args.out, [item for item in rest if not item.startswith("--")])
    for item in rest:
        if item.startswith("--runtime-env="):
            import ray

            runtime_env = json.loads(item.partition("=")[2])
            ray.init(address=config.ray_kwargs.ray_init.address, runtime_env=runtime_env)
    rows = [{"question": f"question {row}"} for row in range(8)]
    try:
        run_ppo(config, train_dataset=rows, val_dataset=rows[:2])
    except RuntimeError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
