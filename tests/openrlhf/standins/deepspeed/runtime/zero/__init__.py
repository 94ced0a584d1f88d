"""Stands in for deepspeed.runtime.zero."""
