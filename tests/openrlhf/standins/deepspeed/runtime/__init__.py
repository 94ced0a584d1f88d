"""Stands in for deepspeed.runtime."""
