"""Checks where Triton kernels can run: on GPUs, and in tests on a CPU under Triton's interpreter
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # torch for CPUs comes without it
    triton = None

INTERPRETED = triton is not None and hasattr(triton, "knobs") and bool(triton.knobs.runtime.interpret)


def can_launch(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels support these tensors; float64 is not, because they compute in float32."""
    if triton is None:
        return False
    return all((tensor.is_cuda or INTERPRETED) and tensor.dtype != torch.float64 for tensor in tensors)


def runs_at_once(*tensors: Tensor) -> bool:
    """Return whether these tensors have values and no compiler is tracing.

    Then an operation runs through `autograd.Function` instead of as an operator of torch.library. The operator
    computes the same and works everywhere, but costs the host 0.2 ms more per call.
    """
    are_plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    return are_plain and not torch.compiler.is_compiling()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that launches on the tensor's GPU, whichever GPU is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
