"""Rollouts that were enqueued and not trained: collect, keep, decide, create again, reclaim."""
