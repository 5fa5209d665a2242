"""silu(gate) · up and its gradients, written straight to rows of fp8: neither is ever written in 16 bit.

Gate and up are the two halves of each row, as one product of the input with both matrices computes them, and so are
their gradients: one scale for both halves of a row, for the one product of backward. Forward reads 4 bytes per
element of the product and writes 1; backward reads 6 and writes 2, where plain operations would also write and reread
4 bytes in 16 bit.

Error: that of `float8_rows.py` on top of float32's own. T tokens, F MLP width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from phalanx.train.kernels.float8_rounding import LEAST
from phalanx.train.kernels.float8_rows import empty_rows, plain_scaled_rows, row_blocks, row_shapes
from phalanx.train.kernels.triton_support import can_launch, on_device

try:
    import triton
    import triton.language as tl

    from phalanx.train.kernels.float8_rows import largest_bits, scale_of_bits
except ImportError:  # torch for CPUs comes without it
    triton = None

torch.library.define("phalanx::float8_swiglu_rows", "(Tensor gate_up) -> (Tensor, Tensor)")
torch.library.define("phalanx::float8_swiglu_gradient_rows", "(Tensor grad, Tensor gate_up) -> (Tensor, Tensor)")


def float8_swiglu_rows(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return rounded rows of silu(gate) · up, [T, F], and their scales, [T, 1]; `gate_up` is [T, 2F]."""
    rounded_and_scale: tuple[Tensor, Tensor] = torch.ops.phalanx.float8_swiglu_rows(gate_up)
    return rounded_and_scale


def float8_swiglu_gradient_rows(grad_TF: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return rounded rows of the gradients of gate and up, [T, 2F], and their scales; `grad_TF` is the product's."""
    rounded_and_scale: tuple[Tensor, Tensor] = torch.ops.phalanx.float8_swiglu_gradient_rows(grad_TF, gate_up)
    return rounded_and_scale


@torch.library.impl("phalanx::float8_swiglu_rows", ("cpu", "cuda"))
def _product_rows(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    width = gate_up.shape[1] // 2
    if not can_launch(gate_up):
        return plain_scaled_rows(exact_product(gate_up))
    gate_up = gate_up.contiguous()
    rows, scale = empty_rows(gate_up, width)
    block, parts = row_blocks(width)
    with on_device(gate_up):
        _product_row8[(len(gate_up),)](
            gate_up, rows, scale, width, BLOCK=block, PARTS=parts, FLOOR=LEAST,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return rows, scale


def exact_product(gate_up: Tensor) -> Tensor:
    """silu(gate) · up in float32 or wider."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=1)
    return silu(gate) * up


@torch.library.impl("phalanx::float8_swiglu_gradient_rows", ("cpu", "cuda"))
def _gradient_rows(grad_TF: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    width = grad_TF.shape[1]
    if not can_launch(grad_TF, gate_up):
        return plain_scaled_rows(exact_gradients(grad_TF, gate_up))
    grad_TF, gate_up = grad_TF.contiguous(), gate_up.contiguous()
    rows, scale = empty_rows(gate_up, 2 * width)
    block, parts = row_blocks(width)
    with on_device(gate_up):
        _gradient_row8[(len(gate_up),)](
            grad_TF, gate_up, rows, scale, width, BLOCK=block, PARTS=parts, FLOOR=LEAST,
            num_warps=max(1, min(32, block // 512)),
        )  # fmt: skip
    return rows, scale


def exact_gradients(grad_TF: Tensor, gate_up: Tensor) -> Tensor:
    """Gradients of gate and up side by side, in float32 or wider."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    grad, (gate, up) = grad_TF.to(wide), gate_up.to(wide).chunk(2, dim=1)
    share = torch.sigmoid(gate)
    active = gate * share
    return torch.cat((grad * up * (share + active * (1.0 - share)), grad * active), dim=1)


@torch.library.register_fake("phalanx::float8_swiglu_rows")  # type: ignore[untyped-decorator]
def _product_shapes(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return row_shapes(gate_up, gate_up.shape[1] // 2)


@torch.library.register_fake("phalanx::float8_swiglu_gradient_rows")  # type: ignore[untyped-decorator]
def _gradient_shapes(grad_TF: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    del grad_TF
    return row_shapes(gate_up, gate_up.shape[1])


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _read_product(gate_up, start, place, width):  # type: ignore[no-untyped-def]
        g = tl.load(gate_up + start + place, mask=place < width, other=0.0).to(tl.float32)
        u = tl.load(gate_up + start + width + place, mask=place < width, other=0.0).to(tl.float32)
        return g / (1.0 + tl.exp(-g)) * u

    @triton.jit  # type: ignore[untyped-decorator]
    def _product_row8(gate_up, out, scales, width,  # type: ignore[no-untyped-def]
                      BLOCK: tl.constexpr, PARTS: tl.constexpr, FLOOR: tl.constexpr):  # fmt: skip
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        product = _read_product(gate_up, row * width * 2, column, width)
        bits = largest_bits(product)
        if PARTS > 1:
            for block in range(1, PARTS):
                bits = tl.maximum(
                    bits, largest_bits(_read_product(gate_up, row * width * 2, column + block * BLOCK, width))
                )
        scale, undone = scale_of_bits(bits, FLOOR)
        tl.store(scales + row, scale)
        tl.store(out + row * width + column, (product * undone).to(tl.float8e4nv), mask=column < width)
        if PARTS > 1:
            for block in range(1, PARTS):
                place = column + block * BLOCK
                more = _read_product(gate_up, row * width * 2, place, width)
                tl.store(out + row * width + place, (more * undone).to(tl.float8e4nv), mask=place < width)

    @triton.jit  # type: ignore[untyped-decorator]
    def _read_gradients(grad, gate_up, row, place, width):  # type: ignore[no-untyped-def]
        inside = place < width
        d = tl.load(grad + row * width + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate_up + row * width * 2 + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(gate_up + row * width * 2 + width + place, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-g))
        active = g * share
        return d * u * (share + active * (1.0 - share)), d * active

    @triton.jit  # type: ignore[untyped-decorator]
    def _gradient_row8(grad, gate_up, out, scales, width,  # type: ignore[no-untyped-def]
                       BLOCK: tl.constexpr, PARTS: tl.constexpr, FLOOR: tl.constexpr):  # fmt: skip
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        by_gate, by_up = _read_gradients(grad, gate_up, row, column, width)
        bits = tl.maximum(largest_bits(by_gate), largest_bits(by_up))
        if PARTS > 1:
            for block in range(1, PARTS):
                more_gate, more_up = _read_gradients(grad, gate_up, row, column + block * BLOCK, width)
                bits = tl.maximum(bits, tl.maximum(largest_bits(more_gate), largest_bits(more_up)))
        scale, undone = scale_of_bits(bits, FLOOR)
        tl.store(scales + row, scale)
        start = row * width * 2
        tl.store(out + start + column, (by_gate * undone).to(tl.float8e4nv), mask=column < width)
        tl.store(out + start + width + column, (by_up * undone).to(tl.float8e4nv), mask=column < width)
        if PARTS > 1:
            for block in range(1, PARTS):
                place = column + block * BLOCK
                more_gate, more_up = _read_gradients(grad, gate_up, row, place, width)
                tl.store(out + start + place, (more_gate * undone).to(tl.float8e4nv), mask=place < width)
                tl.store(out + start + width + place, (more_up * undone).to(tl.float8e4nv), mask=place < width)
