"""Rotary position embedding of queries and keys in one kernel; backward is the same rotation in the other direction.

The halves of a head are rotated (x₁, x₂ → x₁ cos − x₂ sin, x₂ cos + x₁ sin), as in `models/layers.py`.

Error: computed in float32 and rounded once.

B batch, S sequence, N heads, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.train.kernels.kernel_op import Inputs, KernelOp, KernelWork, Outputs, Shape, register_kernel
from phalanx.train.kernels.triton_support import can_launch, on_device, runs_at_once

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

torch.library.define("phalanx::rope", "(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor")


def rotate_heads(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Return heads rotated by the angles of their positions; the tables contain half a head's angles, [S, H / 2]."""
    if runs_at_once(x_BSNH, cos_SH, sin_SH):
        rotated: Tensor = _Turn.apply(x_BSNH, cos_SH, sin_SH)
        return rotated
    turned: Tensor = torch.ops.phalanx.rope(x_BSNH, cos_SH, sin_SH, False)
    return turned


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SH, sin_SH)
        return _turn(x_BSNH, cos_SH, sin_SH, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_SH, sin_SH = ctx.saved_tensors
        return _turn(grads[0], cos_SH, sin_SH, back=True), None, None


@torch.library.impl("phalanx::rope", ("cpu", "cuda"))
def _turn_heads(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor, back: bool) -> Tensor:
    return _turn(x_BSNH, cos_SH, sin_SH, back)


def _turn(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor, back: bool) -> Tensor:
    """Rotate heads forward or, with `back`, backward."""
    if not can_launch(x_BSNH):
        return plain_turn(x_BSNH, cos_SH, -sin_SH if back else sin_SH)
    x_BSNH = x_BSNH.contiguous()
    batch, length, heads, size = x_BSNH.shape
    turned = torch.empty_like(x_BSNH)
    half = size // 2
    width, each = triton.next_power_of_2(half), triton.next_power_of_2(heads)
    with on_device(x_BSNH):
        _turn_token[(batch * length,)](
            x_BSNH, cos_SH.contiguous(), sin_SH.contiguous(), turned, length, heads, half, BACK=back,
            HEADS=each, HALF=width, num_warps=max(1, min(8, each * width // 256)),
        )  # fmt: skip
    return turned


def plain_turn(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """What the kernel computes, in plain operations."""
    wide = torch.promote_types(x_BSNH.dtype, torch.float32)
    first, second = x_BSNH.to(wide).chunk(2, dim=-1)
    cos, sin = cos_SH.to(wide)[:, None], sin_SH.to(wide)[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BSNH.dtype)


@torch.library.register_fake("phalanx::rope")  # type: ignore[untyped-decorator]
def _turned_shape(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor, back: bool) -> Tensor:
    del cos_SH, sin_SH, back
    return torch.empty_like(x_BSNH, memory_format=torch.contiguous_format)


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.back = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def _turn_back(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.phalanx.rope(grad_BSNH, *ctx.saved_tensors, not ctx.back), None, None, None


torch.library.register_autograd("phalanx::rope", _turn_back, setup_context=_keep_tables)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn_token(x, cos, sin, turned, length, heads, half,  # type: ignore[no-untyped-def]
                    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        column, head = tl.arange(0, HALF), tl.arange(0, HEADS)
        angle = (token % length) * half + column
        c = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
        if BACK:
            s = -s
        inside = (head < heads)[:, None] & (column < half)[None, :]
        place = (token * heads + head)[:, None] * (2 * half) + column[None, :]
        first = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(turned + place, first * c - second * s, mask=inside)
        tl.store(turned + place + half, second * c + first * s, mask=inside)


# For the catalogue. -------------------------------------------------------------------------------------------------


def _reference_turn(x_BSNH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Outputs:
    return (plain_turn(x_BSNH, cos_SH, sin_SH),)


def _make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape["batch"], shape["sequence"], shape["heads"], shape["head"])
    half = shape["head"] // 2
    turns = 10_000.0 ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angles = torch.arange(shape["sequence"], device=device, dtype=torch.float64)[:, None] * turns
    rows = torch.randn(size, generator=generator, device=device).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)  # the dtype of the trainer's tables
    return rows, angles.cos().to(wide), angles.sin().to(wide)


def _count_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    count = shape["batch"] * shape["sequence"] * shape["heads"] * shape["head"]
    tables = shape["sequence"] * shape["head"] * 4
    each = count * dtype.itemsize
    return KernelWork(read_bytes=2 * each + 2 * tables, written_bytes=2 * each, flops=6 * count)


def _sizes(*rows: tuple[int, int, int, int]) -> list[Shape]:
    return [{"batch": row[0], "sequence": row[1], "heads": row[2], "head": row[3]} for row in rows]


ROPE = register_kernel(
    KernelOp(
        name="rope",
        summary="rotary positions of queries or keys",
        reference=_reference_turn,
        variants={"builtin": _reference_turn, "triton": lambda x, cos, sin: (rotate_heads(x, cos, sin),)},
        make_inputs=_make_inputs,
        shapes=_sizes(
            (4, 2048, 12, 64), (16, 2048, 32, 64), (16, 2048, 8, 64), (2, 8192, 32, 64), (8, 2048, 16, 128),
            (8, 4096, 32, 128), (2, 8192, 32, 128), (2, 8192, 8, 128), (1, 32768, 32, 128), (1, 32768, 8, 128),
            (2, 8192, 64, 128), (1, 131072, 8, 128), (4, 4096, 40, 128),
        ),
        odd_shapes=_sizes((1, 3, 1, 6), (2, 17, 5, 24), (1, 33, 9, 80), (3, 7, 3, 130)),
        count_work=_count_work,
        error_bound=lambda dtype: 4 * torch.finfo(dtype).eps,
        reduction_length=lambda shape: 2,
        gradients=(0,),
    )
)  # fmt: skip
