"""Hooks for `ray_kwargs.ray_init.runtime_env.worker_process_setup_hook`.

Ray takes one such hook. A training run on GPUs names `agl_async_ckpt.worker.setup` there and is done; this run also
needs the CPU shims and the recorder in every worker, so its own hook calls all three.
"""

from __future__ import annotations

from cpu_training import cpu_backend, recording


def setup() -> None:
    """The run, with the extension on or off (`agentlightning.async_checkpoint.enabled`)."""
    cpu_backend.install()
    from agl_async_ckpt import worker

    worker.setup()
    recording.install()
