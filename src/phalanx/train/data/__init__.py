"""Text to token shards, and token shards to batches: the same samples in the same order whatever the layout."""
