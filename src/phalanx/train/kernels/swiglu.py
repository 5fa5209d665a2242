"""silu(gate) · up, alone or fused with the matrix product that follows it, without keeping the product for backward.

A gated MLP keeps gate, up and their product: 3 of the 5 widest tensors that a layer keeps. `gated_down` multiplies
the product by the next matrix and drops it; backward recomputes it in the kernel of the gradients of gate and up,
which reads both anyway. That costs one more write of the MLP's width per layer and saves one tensor. torch's compiler
would keep the product: it recognizes that forward has already computed it.

Error: computed in float32 and rounded once, so half a unit in the last place of each result plus float32's own error.

T tokens, F MLP width, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from phalanx.train.kernels.kernel_op import Inputs, KernelOp, KernelWork, Outputs, Shape, register_kernel
from phalanx.train.kernels.triton_support import can_launch, on_device, runs_at_once

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

TILE, WARPS = 1024, 4  # six choices were within 3 % of each other and of a copy on an H200

# silu(gate) · up. ---------------------------------------------------------------------------------------------------

torch.library.define("phalanx::swiglu", "(Tensor gate, Tensor up) -> Tensor")
torch.library.define("phalanx::swiglu_gradients", "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
torch.library.define(
    "phalanx::swiglu_gradients_", "(Tensor(a!) grad, Tensor gate, Tensor up) -> (Tensor up_gradient, Tensor product)"
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, with gradients."""
    if runs_at_once(gate, up):
        activated: Tensor = _Swiglu.apply(gate, up)
        return activated
    product: Tensor = torch.ops.phalanx.swiglu(gate, up)
    return product


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return _both_gradients(grads[0], *ctx.saved_tensors)


@torch.library.impl("phalanx::swiglu", ("cpu", "cuda"))
def _multiply_gate(gate: Tensor, up: Tensor) -> Tensor:
    return _product(gate, up)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    if not can_launch(gate, up):
        return plain_product(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    with on_device(gate):
        _product_tile[(triton.cdiv(gate.numel(), TILE),)](gate, up, product, gate.numel(), TILE=TILE, num_warps=WARPS)
    return product


@torch.library.register_fake("phalanx::swiglu")  # type: ignore[untyped-decorator]
def _product_shape(gate: Tensor, up: Tensor) -> Tensor:
    del up
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def plain_product(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the kernel's result in plain operations."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


def _plain_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and the product, in plain operations."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    wide_grad, wide_gate, wide_up = grad.to(wide), gate.to(wide), up.to(wide)
    share = torch.sigmoid(wide_gate)
    active = wide_gate * share
    by_gate = wide_grad * wide_up * (share + active * (1.0 - share))
    return by_gate.to(grad.dtype), (wide_grad * active).to(grad.dtype), (active * wide_up).to(grad.dtype)


@torch.library.impl("phalanx::swiglu_gradients", ("cpu", "cuda"))
def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _both_gradients(grad, gate, up)


def _both_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not can_launch(grad, gate, up):
        return _plain_gradients(grad, gate, up)[:2]
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
    _launch_gradients(grad, gate, up, by_gate, by_up, None)
    return by_gate, by_up


@torch.library.register_fake("phalanx::swiglu_gradients")  # type: ignore[untyped-decorator]
def _gradient_shapes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    del grad
    return torch.empty_like(gate), torch.empty_like(up)


@torch.library.impl("phalanx::swiglu_gradients_", ("cpu", "cuda"))
def _gradients_and_product(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite `grad`, the gradient of the product, with that of gate; return the gradient of up and the product."""
    if not can_launch(grad, gate, up):
        by_gate, by_up, product = _plain_gradients(grad, gate, up)
        grad.copy_(by_gate)
        return by_up, product
    assert grad.is_contiguous()
    gate, up = gate.contiguous(), up.contiguous()
    by_up, product = torch.empty_like(up), torch.empty_like(up)
    _launch_gradients(grad, gate, up, grad, by_up, product)
    return by_up, product


@torch.library.register_fake("phalanx::swiglu_gradients_")  # type: ignore[untyped-decorator]
def _gradient_and_product_shapes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    del grad, gate
    return torch.empty_like(up), torch.empty_like(up)


def _launch_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, by_gate: Tensor, by_up: Tensor, product: Tensor | None
) -> None:
    with on_device(gate):
        _gradient_tile[(triton.cdiv(gate.numel(), TILE),)](
            grad, gate, up, by_gate, by_up, by_up if product is None else product, gate.numel(),
            MAKES_PRODUCT=product is not None, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip


def _keep_factors(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = torch.ops.phalanx.swiglu_gradients(grad, *ctx.saved_tensors)
    return gradients


torch.library.register_autograd("phalanx::swiglu", _swiglu_backward, setup_context=_keep_factors)


# The product times the next matrix. ---------------------------------------------------------------------------------


def gated_down(gate: Tensor, up: Tensor, weight_DF: Tensor) -> Tensor:
    """Return (silu(gate) · up) weightᵀ; only gate, up and weight are kept for backward."""
    if torch.compiler.is_compiling():
        out: Tensor = gated_down_op(gate, up, weight_DF)
        return out
    projected: Tensor = _GatedDown.apply(gate, up, weight_DF)
    return projected


class _GatedDown(torch.autograd.Function):
    """`gated_down_op` as an autograd.Function, so that a trace shows both matrix products."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight_DF)
        return torch.ops.phalanx.swiglu(gate, up) @ weight_DF.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _down_gradients(grads[0], *ctx.saved_tensors)


def _down_gradients(grad: Tensor, gate: Tensor, up: Tensor, weight_DF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_TD = grad.flatten(0, -2).contiguous()
    by_gate = grad_TD @ weight_DF
    by_up, product_TF = torch.ops.phalanx.swiglu_gradients_(by_gate, gate.flatten(0, -2), up.flatten(0, -2))
    by_weight = grad_TD.t() @ product_TF
    return by_gate.view(gate.shape), by_up.view(up.shape), by_weight


@torch.library.custom_op("phalanx::gated_down", mutates_args=())
def gated_down_op(gate: Tensor, up: Tensor, weight_DF: Tensor) -> Tensor:
    """Run `gated_down` as one operator, for compiled code."""
    return torch.ops.phalanx.swiglu(gate, up) @ weight_DF.t()


@gated_down_op.register_fake
def _down_shape(gate: Tensor, up: Tensor, weight_DF: Tensor) -> Tensor:
    del up
    return gate.new_empty((*gate.shape[:-1], weight_DF.shape[0]))


@torch.library.custom_op("phalanx::gated_down_gradients", mutates_args=())
def _gated_down_gradients(grad: Tensor, gate: Tensor, up: Tensor, weight_DF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _down_gradients(grad, gate, up, weight_DF)


@_gated_down_gradients.register_fake
def _down_gradient_shapes(grad: Tensor, gate: Tensor, up: Tensor, weight_DF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    del grad
    return gate.new_empty(gate.shape), up.new_empty(up.shape), weight_DF.new_empty(weight_DF.shape)


def _gated_down_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = _gated_down_gradients(grad, *ctx.saved_tensors)
    return gradients


gated_down_op.register_autograd(_gated_down_backward, setup_context=_keep_factors)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _product_tile(gate, up, product, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < count
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(product + place, g / (1.0 + tl.exp(-g)) * u, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gradient_tile(grad, gate, up, by_gate, by_up, product, count,  # type: ignore[no-untyped-def]
                       MAKES_PRODUCT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < count
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-g))
        active = g * share
        tl.store(by_gate + place, d * u * (share + active * (1.0 - share)), mask=inside)
        tl.store(by_up + place, d * active, mask=inside)
        if MAKES_PRODUCT:
            tl.store(product + place, active * u, mask=inside)


# For the catalogue. -------------------------------------------------------------------------------------------------


def reference_swiglu(gate: Tensor, up: Tensor) -> Outputs:
    """Plain operations."""
    return (silu(gate) * up,)


def _make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape["tokens"], shape["width"])
    return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))


def _count_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    """Count the work of forward and backward: gate and up are read twice, their gradients and the product written."""
    each = shape["tokens"] * shape["width"] * dtype.itemsize
    return KernelWork(read_bytes=5 * each, written_bytes=3 * each, flops=14 * shape["tokens"] * shape["width"])


def _sizes(*rows: tuple[int, int]) -> list[Shape]:
    return [{"tokens": tokens, "width": width} for tokens, width in rows]


SWIGLU = register_kernel(
    KernelOp(
        name="swiglu",
        summary="silu(gate) · up, the middle of a gated MLP",
        reference=reference_swiglu,
        variants={"builtin": reference_swiglu, "triton": lambda gate, up: (swiglu(gate, up),)},
        make_inputs=_make_inputs,
        shapes=_sizes(
            (4096, 2048), (16384, 3072), (32768, 5504), (4096, 8192), (8192, 8192), (16384, 8192), (32768, 8192),
            (4096, 14336), (8192, 14336), (16384, 14336), (4096, 28672), (8192, 28672), (2048, 53248),
        ),
        odd_shapes=_sizes((1, 7), (13, 129), (37, 513), (255, 1031)),
        count_work=_count_work,
        error_bound=lambda dtype: 4 * torch.finfo(dtype).eps,
        reduction_length=lambda shape: 1,
        gradients=(0, 1),
    )
)  # fmt: skip
