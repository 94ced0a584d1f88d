"""Prompt groups of a checkpoint under another rollout.n."""

from __future__ import annotations

import uuid

from agl_async_ckpt.state import InFlightRollout, PromptGroup


def resized(group: PromptGroup, size: int) -> list[InFlightRollout]:
    """Return `size` siblings of a group: the trainer insists on rollout.n of the current settings.

    Shrinking keeps tokens that exist before tokens to come. Growing adds fresh siblings that repeat the first one's
    request.
    """
    rollouts = list(group.rollouts)
    if len(rollouts) > size:
        by_worth = sorted(range(len(rollouts)), key=lambda i: not _has_tokens(rollouts[i]))
        return [rollouts[i] for i in sorted(by_worth[:size])]
    template = group.rollouts[0]
    for _ in range(size - len(rollouts)):
        fresh = {**template.enqueued, "rollout_id": uuid.uuid4().hex, "running_at": None, "finished_at": None}
        rollouts.append(InFlightRollout(enqueued=fresh, request=template.request, is_fresh=True))
    return rollouts


def _has_tokens(rollout: InFlightRollout) -> bool:
    return rollout.finished is not None and not rollout.finished.has_failed
