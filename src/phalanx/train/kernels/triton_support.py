"""Where Triton kernels can run: on GPUs, and for tests on a CPU under Triton's own interpreter (TRITON_INTERPRET=1)."""

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
    """Whether our Triton kernels take these tensors; they compute in float32, so not those in float64."""
    if triton is None:
        return False
    return all((one.is_cuda or INTERPRETED) and one.dtype != torch.float64 for one in tensors)


def runs_at_once(*tensors: Tensor) -> bool:
    """Whether these tensors have values, and no compiler looks on.

    Then an operation runs by `autograd.Function` instead of as an operator of torch.library, which does the same and
    works everywhere, but takes the host 0.2 ms a call longer.
    """
    plain = all(type(one) in (Tensor, torch.nn.Parameter) for one in tensors)
    return plain and not torch.compiler.is_compiling()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's GPU, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
