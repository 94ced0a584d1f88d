"""Words for people. A leaf: imports nothing of the package."""

from __future__ import annotations


def plural(number: int, one: str, many: str = "") -> str:
    """Say a number with its noun: `1 rollout`, `2 rollouts`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
