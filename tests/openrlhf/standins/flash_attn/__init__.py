"""Stands in for flash-attn, which needs a GPU."""
