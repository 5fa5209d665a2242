"""Kernels of Phalanx: each with a reference in plain PyTorch, and a Triton kernel for GPUs where that is faster."""
