"""`python -m agl_async_ckpt`: the command of the same name as the project."""

from __future__ import annotations

import sys

from agl_async_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
