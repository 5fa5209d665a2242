"""Decoder transformers, independent of parallelism, and the interface to a user's own network."""
