"""Training state: checkpoints (docs/checkpoints.md), and replicas of it in host memory (docs/vault.md)."""
