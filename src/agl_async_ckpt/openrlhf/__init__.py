"""Exact resume for OpenRLHF's asynchronous training with oversampling, on the core of this package.

    python -m agl_async_ckpt.openrlhf <the arguments of openrlhf.cli.train_ppo_ray>
    agl_async_ckpt.openrlhf.enable()        # in a launcher of your own, before it imports OpenRLHF's trainer

With `vllm_generate_batch_size > rollout.batch_size` OpenRLHF takes prompts from the loader by the whole generation
batch and keeps the surplus samples in memory; its checkpoint holds the loader alone, so that a resume skips them. Here
every queued batch carries the state of that very boundary, and the checkpoint holds it:

    generator actor   boundary (loader state, tail by reference, exhausted)  -> Ray queue
    trainer actor     tail fetched and encoded                               -> client state of the checkpoint
    resume            client state verified and decoded                      -> generator, before it generates

Importing this package imports neither OpenRLHF nor Ray.
"""

from __future__ import annotations

from agl_async_ckpt.openrlhf.activation import enable

__all__ = ["enable"]
