"""Simulate a cluster and its queue: when jobs of all sizes start, and the node-time that is idle or lost."""
