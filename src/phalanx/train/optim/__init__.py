"""Optimizers over shards of tensors, learning-rate schedules and the loss scale."""
