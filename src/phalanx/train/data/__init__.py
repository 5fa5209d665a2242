"""Datasets: text to token shards, and token shards to batches that are the same for every layout."""
