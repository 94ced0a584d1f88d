"""Stands in for flash-attn's padding helpers, which only a model forward pass calls."""

from typing import Any


def _needs_gpu(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("flash-attn is not installed")


index_first_axis = pad_input = rearrange = unpad_input = _needs_gpu
