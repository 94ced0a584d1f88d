"""What a saved state must agree on with the run that resumes it. Batch and queue sizes may change."""

from __future__ import annotations

import logging
from typing import Any

from agl_async_ckpt.codec.content import NoDigestError, digest, sample, share
from agl_async_ckpt.folder.mismatch import CONTENT, LENGTH
from agl_async_ckpt.openrlhf.internals import needs_rollout_log_probs

logger = logging.getLogger(__name__)


def writes_checkpoints(args: Any) -> bool:
    """Tell whether DeepSpeed checkpoints may be written: after some steps, or after the best evaluation."""
    never = (-1, float("inf"))  # OpenRLHF turns the one into the other
    evaluates = args.eval.dataset and args.eval.steps not in never and args.ckpt.best_metric_key != "none"
    return not args.ckpt.disable_ds and bool(args.ckpt.save_steps not in never or evaluates)


def announcement(args: Any, version: str) -> str:
    """Say whether a run with these arguments can be resumed exactly."""
    if writes_checkpoints(args):
        return f"Exact resume of inputs is on (OpenRLHF {version})."
    why = (
        "--ckpt.disable_ds"
        if args.ckpt.disable_ds
        else "no --ckpt.save_steps, and no evaluation that would save its best"
    )
    return (
        f"No checkpoint to resume from is written ({why}): a resume of this run trains its prompts from the beginning."
    )


def data_settings(args: Any, dataset: Any) -> dict[str, Any]:
    """Return what the position of the loader depends on."""
    settings = {LENGTH: len(dataset), "data.dataloader_num_workers": args.data.dataloader_num_workers}
    try:
        settings[CONTENT] = _content(dataset)
    except NoDigestError as error:
        logger.info("A resume will not notice if prompts have changed: %s.", error)
    return settings


def tail_settings(args: Any) -> dict[str, Any]:
    """Return what generated samples depend on, so that they can be trained beside new ones."""
    return {
        "rollout.n_samples_per_prompt": args.rollout.n_samples_per_prompt,
        "log-probabilities of the engine in samples": needs_rollout_log_probs(args),
        "reward.remote_url or train.agent_func_path is set": bool(args.reward.remote_url or args.train.agent_func_path),
    }


def recorded_settings(args: Any) -> dict[str, Any]:
    """Return what may change and is kept for people."""
    return {
        "rollout.batch_size": args.rollout.batch_size,
        "rollout.vllm_generate_batch_size": args.rollout.vllm_generate_batch_size,
        "rollout.n_samples_per_prompt": args.rollout.n_samples_per_prompt,
        "train.async_queue_size": args.train.async_queue_size,
        "train.num_episodes": args.train.num_episodes,
    }


def _content(dataset: Any) -> str:
    """Return a digest of the prompts, labels and images, with how many were read.

    Raises:
        NoDigestError: They hold an object of unknown content.
    """
    rows = sample(len(dataset))
    return f"{digest([[*dataset[row]] for row in rows])} ({share(len(rows), len(dataset))} rows)"
