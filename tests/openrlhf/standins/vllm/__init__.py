"""Stands in for vLLM: what OpenRLHF imports at module level, and nothing that generates."""

from __future__ import annotations

__version__ = "0.29.0"


class SamplingParams:
    """Keeps what it is given."""

    def __init__(self, **kwargs: object) -> None:
        self.__dict__.update(kwargs)
