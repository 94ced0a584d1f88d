"""`VERL_USE_EXTERNAL_MODULES=agl_async_ckpt.plugin`: importing this module switches the extension on, and no more.

verl imports it inside its own import, so nothing of verl may be imported from here.
"""

from __future__ import annotations

from agl_async_ckpt.agl.activation import install

install()
