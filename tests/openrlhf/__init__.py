"""Tests of the extension for OpenRLHF; they need its environment (make test-openrlhf)."""
