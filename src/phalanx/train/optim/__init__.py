"""Optimizers over pieces of tensors, learning-rate schedules and the loss scale."""
