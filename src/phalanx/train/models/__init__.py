"""Decoder transformers that know nothing of parallelism."""
