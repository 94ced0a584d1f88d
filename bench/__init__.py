"""What the extension costs, measured: `python -m bench` (make bench). docs/speed.md says what is measured and why."""

MEASUREMENTS = ("saving", "in_flight", "resume_cost", "step_cost", "startup", "blocking")
"""Modules of this package that measure something, in the order in which they run."""
