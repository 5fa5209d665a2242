"""Training state: checkpoints on disk (docs/checkpoints.md) and in host memory (docs/in-memory-checkpoints.md)."""
