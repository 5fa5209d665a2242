"""Proof that a layout computes what one process computes: the same losses, gradients and weights, in float64."""
