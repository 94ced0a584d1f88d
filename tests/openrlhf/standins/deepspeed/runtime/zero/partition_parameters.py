"""Stands in for DeepSpeed's parameter states."""

from enum import Enum


class ZeroParamStatus(Enum):
    """Only its name is asked for."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
