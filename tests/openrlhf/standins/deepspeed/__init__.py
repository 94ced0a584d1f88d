"""Stands in for DeepSpeed: what OpenRLHF imports at module level; no engine."""

__version__ = version = "0.19.6"


class DeepSpeedEngine:
    """Only its name is asked for."""
