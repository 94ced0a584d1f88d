"""Stopping on request: who asks, when a step may end the training, and how it is left."""
