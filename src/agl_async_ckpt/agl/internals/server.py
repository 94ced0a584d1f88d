"""agl-server's URLs, and what its answers say: agent-lightning's clients write them out, and name them nowhere."""

from __future__ import annotations

import re

ROLLOUTS_URL = "/api/rollouts"
MODELS_URL = "/api/models"
GATEWAY_STATE_URL = "/proxy/state"
"""Polled by a drain until it reports no request: a request that hangs is left out of the answer."""
NUM_PROXIED = "inflight"
"""In the gateway's state, the number of model requests that it is forwarding."""

STATES = ("queuing", "running", "succeeded", "failed")
"""A list of rollouts has to name the states that it wants: the server has no word for all."""
ENDED = ("succeeded", "failed")

_SUBJECTS = (
    (r"/api/rollouts/([^/?]+)/", "the events of rollout {}"),
    (r"/api/rollouts/([^/?]+)$", "rollout {}"),
    (r"/api/rollouts\?", "the list of rollouts"),
    (r"/api/rollouts$", "the creation of rollouts"),
    (r"/api/models", "the registered models"),
    (r"/proxy/", "the gateway's state"),
)


def subject_of(url: str) -> str:
    """Say what a request is about; a route has no name in agent-lightning."""
    for pattern, text in _SUBJECTS:
        found = re.search(pattern, url)
        if found:
            return text.format(*found.groups())
    return f"an answer to {url}"


def rollout_of(url: str) -> str | None:
    """Return the rollout that a URL names: nothing else can be unknown to an agl-server."""
    found = re.search(r"/api/rollouts/([^/?]+)", url)
    return found and found[1]


def posts_event(url: str) -> bool:
    """Tell whether a post to a URL records an event; the server gives events no id, so it cannot tell a repetition."""
    return re.fullmatch(r"/api/rollouts/[^/]+/attempt/[^/]+/events", url) is not None
