"""Make the package's few lines of log visible where the framework hides INFO.

VERL configures the root logger at WARNING in every process, so a line that says that the extension is active, or what
a resume restored, would be lost. A level that the user set on our logger is respected.
"""

from __future__ import annotations

import logging

LOGGER_NAME = "agl_async_ckpt"


def ensure_visible() -> None:
    """Let INFO records of this package reach a handler. Idempotent."""
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))
        logger.addHandler(handler)
