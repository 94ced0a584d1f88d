"""What a URL of the agl-server is about."""

from __future__ import annotations

import pytest

from agl_async_ckpt.agl import internals


@pytest.mark.parametrize(
    ("url", "subject"),
    [
        ("/api/rollouts?state_in=running", "the list of rollouts"),
        ("/api/rollouts", "the creation of rollouts"),
        ("/api/rollouts/r1", "rollout r1"),
        ("/api/rollouts/r1/events", "the events of rollout r1"),
        ("/proxy/pause", "the gateway's state"),
        ("/healthz", "an answer to /healthz"),
    ],
)
def test_subject_of_a_request_is_said_in_words(url: str, subject: str) -> None:
    """An error says what was waited for."""
    assert internals.subject_of(url) == subject
