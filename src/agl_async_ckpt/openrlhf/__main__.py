"""`python -m agl_async_ckpt.openrlhf`: OpenRLHF's own command, with exact resume of its inputs."""

from __future__ import annotations

import runpy
import sys

from agl_async_ckpt._logging import ensure_visible
from agl_async_ckpt.exceptions import AsyncCheckpointError
from agl_async_ckpt.openrlhf.activation import enable
from agl_async_ckpt.openrlhf.internals import TRAIN_COMMAND, root_cause


def main() -> int:
    """Run OpenRLHF's command with the arguments of this process.

    Returns:
        0, or 1 after an error of this package, whose text then stands alone at the end of the output. Every other
        error leaves as OpenRLHF raises it.
    """
    ensure_visible()
    try:
        enable()
        runpy.run_module(TRAIN_COMMAND, run_name="__main__", alter_sys=True)
    except Exception as error:
        cause = root_cause(error)
        if not isinstance(cause, AsyncCheckpointError):
            raise
        sys.stderr.write(f"error: {cause}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
