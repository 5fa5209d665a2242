"""A small operation to try the kernel lab with: each row divided by its root mean square, times a weight."""

from __future__ import annotations

import torch

from phalanx.train.kernels.kernel_op import KernelOp, KernelWork, Shape

SOUND = """
import torch

OP = "row_norm"


def kernel(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
"""


def _reference(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,)


def _builtin(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6),)


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape["tokens"], shape["width"], generator=source, device=device)
    w = torch.rand(shape["width"], generator=source, device=device) + 0.5
    return x.to(dtype), w.to(dtype)


def _work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    """Forward and backward."""
    numbers = shape["tokens"] * shape["width"]
    return KernelWork(3 * numbers * dtype.itemsize, 2 * numbers * dtype.itemsize, 12 * numbers)


ROW_NORM = KernelOp(
    name="row_norm",
    summary="each row divided by its root mean square, times a weight",
    reference=_reference,
    variants={"builtin": _builtin},
    make_inputs=_inputs,
    shapes=[{"tokens": 256, "width": 512}],
    odd_shapes=[{"tokens": 7, "width": 33}, {"tokens": 2, "width": 5}, {"tokens": 13, "width": 129}],
    count_work=_work,
    error_bound=lambda dtype: 1e-5 if dtype == torch.float32 else 2.0**-7,
    dtypes=(torch.float32, torch.bfloat16),
    gradients=(0, 1),
)
