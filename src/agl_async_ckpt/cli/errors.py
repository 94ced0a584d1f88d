"""Errors of the command line alone."""

from __future__ import annotations

from agl_async_ckpt.exceptions import AsyncCheckpointError


class UsageError(AsyncCheckpointError):
    """The command cannot be carried out as it was given: exit code 2."""
