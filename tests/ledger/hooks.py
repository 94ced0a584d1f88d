"""Hooks that change every request, each sibling's in another way."""

from __future__ import annotations

import itertools
from typing import Any

from agentlightning.hooks import RolloutHooks

_count = itertools.count()


class Relabel(RolloutHooks):
    """Adds a number to the input."""

    def on_enqueue(self, request: Any) -> Any:
        """Change the request."""
        return request.model_copy(update={"input": {**request.input, "relabelled": next(_count)}})
