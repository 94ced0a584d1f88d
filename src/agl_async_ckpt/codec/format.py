"""The name, the version and the limits of the format of an input state. A leaf: imports nothing."""

from __future__ import annotations

FORMAT_NAME = "agl-async-ckpt input state"
FORMAT_VERSION = 2
"""A file of any other version is refused."""

MAX_DEPTH = 100
"""Of lists and dicts in a value."""
