"""Hooks for `ray_kwargs.ray_init.runtime_env.worker_process_setup_hook`.

Ray takes one such hook. A training run on GPUs names `agl_async_ckpt.worker.setup` there and is done; this run also
needs the CPU shims and the recorder in every worker, so its own hook calls all three.
"""

from __future__ import annotations

from cpu_training import cpu_backend, recording


def protected() -> None:
    """The run with the extension."""
    cpu_backend.install()
    from agl_async_ckpt import worker

    worker.setup()
    recording.install()


def stock() -> None:
    """The run without it: agent-lightning's own hook, as its `run_ppo` sets it by default."""
    cpu_backend.install()
    from agentlightning.verl.per_rollout_loss import register_in_worker

    register_in_worker()
    recording.install()
