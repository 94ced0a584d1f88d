"""The message of a broken contract."""

from __future__ import annotations

import importlib.metadata


def broken(package: str, what: str, *, used_in: str) -> str:
    """Message of a failed contract.

    Args:
        package: Distribution that changed.
        what: What the extension relies on, as a fact.
        used_in: Module of the extension to look at.
    """
    version = importlib.metadata.version(package)
    return (
        f"{package} {version} no longer keeps this: {what}. Adapt src/agl_async_ckpt/{used_in}, or narrow the versions."
    )


def agl(what: str, used_in: str) -> str:
    """Message of a contract with agent-lightning."""
    return broken("agentlightning", what, used_in=used_in)
