"""Stands in for vLLM's helpers."""

import uuid


def random_uuid() -> str:
    """Return 32 hexadecimal digits."""
    return uuid.uuid4().hex
