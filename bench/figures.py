"""What a measurement returns: figures, each with its goal if it has one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        measurement: Name of the measurement that it is of.
        what: What was measured, in words; unique within a measurement.
        value: The number.
        unit: `x` for a ratio, else a unit of time or size.
        at_most: The goal; None for a number that is told and not judged.
        against: What a ratio was measured against, or what else a reader needs beside the number.
    """

    measurement: str
    what: str
    value: float
    unit: str
    at_most: float | None = None
    against: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if there is none."""
        return None if self.at_most is None else self.value <= self.at_most

    def to_json(self) -> dict[str, Any]:
        """The figure as plain values."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Figure:
        """The inverse of `to_json`."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def told(value: float, unit: str) -> str:
    """A number with its unit, as the table shows it."""
    if unit == "x":
        return f"{value:.2f}x"
    if unit == "bytes":
        for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if abs(value) >= size:
                return f"{value / size:.2f} {name}"
        return f"{value:.0f} bytes"
    if unit == "s":
        if abs(value) < 1e-3:
            return f"{value * 1e6:.0f} us"
        return f"{value * 1e3:.2f} ms" if abs(value) < 1 else f"{value:.2f} s"
    return f"{value:.2f} {unit}"
