"""Stand-ins for fused GPU kernels in a CPU trace, so that it saves for backward what a GPU would.

RMSNorm always. On a GPU it is one kernel that saves its input and one number per row; on a CPU torch composes it of
casts and products and saves three more copies of the hidden states in float32, 0.2 GB per layer of Llama 3 8B at
4,096 tokens, which is a quarter of its activations. If blocks and loss are compiled, also what the compiler fuses and
a dry trace can predict: a gated MLP saves gate, up and their product, not the activation between them, selective
recompute saves no last product of a block, and the loss saves the logits in their own format and nothing in float32
(measured on an H200, benchmarks/2026-11-16-memory.md and 2026-11-16-h200-profile.md).

D model, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.train.models.layers import Mlp
from phalanx.train.parallel.recompute import keep_nothing


class _RmsNorm(torch.autograd.Function):
    """The arithmetic of torch's composed RMSNorm, with a backward from the input and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide_D = x_D.to(torch.promote_types(x_D.dtype, torch.float32))
        scale_1 = torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_D, weight_D, scale_1)
        return (wide_D * scale_1).to(x_D.dtype) * weight_D

    @staticmethod
    def backward(ctx: Any, grad_D: Tensor) -> tuple[Tensor, Tensor, None]:
        x_D, weight_D, scale_1 = ctx.saved_tensors
        normed_D = x_D.to(scale_1.dtype) * scale_1
        inner_D = grad_D.to(scale_1.dtype) * weight_D.to(scale_1.dtype)
        dx_D = scale_1 * (inner_D - normed_D * (inner_D * normed_D).mean(-1, keepdim=True))
        rows = list(range(grad_D.ndim - 1))
        return dx_D.to(x_D.dtype), (grad_D.to(scale_1.dtype) * normed_D).sum(rows).to(weight_D.dtype), None


class _GatedProduct(torch.autograd.Function):
    """The shapes of act(gate) · up in one kernel; a fake tensor has no values to compute."""

    @staticmethod
    def forward(ctx: Any, gate_F: Tensor, up_F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_F, up_F)
        return torch.empty_like(up_F)

    @staticmethod
    def backward(ctx: Any, grad_F: Tensor) -> tuple[Tensor, Tensor]:
        gate_F, up_F = ctx.saved_tensors
        return torch.empty_like(gate_F), torch.empty_like(up_F)


class _FusedLoss(torch.autograd.Function):
    """The shapes of a compiled cross-entropy: logits in, their gradient out."""

    @staticmethod
    def forward(ctx: Any, logits_V: Tensor) -> Tensor:
        ctx.save_for_backward(logits_V)
        return torch.empty((), dtype=torch.float32, device=logits_V.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits_V,) = ctx.saved_tensors
        return torch.empty_like(logits_V)


class _SplitLoss(torch.autograd.Function):
    """The shapes of a compiled cross-entropy over split logits, for which torch saves a log-softmax in float32.

    The gradient is formed in float32 too.
    """

    @staticmethod
    def forward(ctx: Any, logits_V: Tensor) -> Tensor:
        ctx.save_for_backward(logits_V, torch.empty_like(logits_V, dtype=torch.float32))
        return torch.empty((), dtype=torch.float32, device=logits_V.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits_V, log_softmax_V = ctx.saved_tensors
        wide_V = torch.empty_like(log_softmax_V)
        del wide_V
        return torch.empty_like(logits_V)


def fused_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Replacement for `summed_loss` in a trace of a compiled step."""
    del targets_BS
    kind = _SplitLoss if isinstance(logits_BSV, DTensor) else _FusedLoss
    out: Tensor = kind.apply(logits_BSV)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def fused_products() -> Iterator[None]:
    """Make MLPs save for backward what compiled ones do."""
    composed = Mlp.forward

    def forward(mlp: Mlp, x: Tensor) -> Tensor:
        if mlp.gate is None or mlp.drops_product:
            return composed(mlp, x)
        up = mlp.up(x)
        product = _GatedProduct.apply(mlp.gate(x), up)  # type: ignore[no-untyped-call]
        # The block's last product is part of the next block's input, so no backward needs it
        with keep_nothing():
            out: Tensor = mlp.down(product)
        return out

    Mlp.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Mlp.forward = composed  # type: ignore[method-assign]


@contextmanager
def fused_norms() -> Iterator[None]:
    """Make norms save as little for backward as a GPU's kernel does."""
    composed = F.rms_norm

    def rms_norm(
        x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None:
            return composed(x, list(normalized_shape), weight, eps)
        out: Tensor = _RmsNorm.apply(x, weight, eps or 0.0)  # type: ignore[no-untyped-call]
        return out

    F.rms_norm = rms_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.rms_norm = composed
