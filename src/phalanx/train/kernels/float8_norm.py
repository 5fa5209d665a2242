"""RMSNorm, with the residual sum before it, straight to rows of fp8: the normed values are never written in 16 bit.

Forward reads x and the tensor that is added to it, and writes their sum, rows in e4m3 with powers of two as scales,
and 1 / rms of every row for backward. Backward is that of `rms_norm.py`: the gradient comes from an fp8 product, in
16 bit.

Error: that of `float8_rows.py` on top of float32's own. T tokens, D model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.train.kernels.float8_rounding import LEAST
from phalanx.train.kernels.float8_rows import (
    WIDEST_BLOCK,
    empty_rows,
    plain_scaled_rows,
    row_shapes,
)
from phalanx.train.kernels.triton_support import can_launch, on_device

try:
    import triton
    import triton.language as tl

    from phalanx.train.kernels.float8_rows import largest_bits, scale_of_bits
except ImportError:  # torch for CPUs comes without it
    triton = None

torch.library.define(
    "phalanx::float8_norm_rows",
    "(Tensor x, Tensor? more, Tensor weight, float eps) -> (Tensor rows, Tensor scale, Tensor stream, Tensor rms)",
)


def float8_norm_rows(
    x_TD: Tensor, more_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rounded rows of norm(x + more), their scales, the sum (empty without `more`), and 1 / rms of its rows."""
    results: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.phalanx.float8_norm_rows(x_TD, more_TD, weight_D, eps)
    return results


@torch.library.impl("phalanx::float8_norm_rows", ("cpu", "cuda"))
def _norm_rows(
    x_TD: Tensor, more_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, width = x_TD.shape
    if not can_launch(x_TD, weight_D) or width > WIDEST_BLOCK:
        return _plain_norm_rows(x_TD, more_TD, weight_D, eps)
    x_TD = x_TD.contiguous()
    rows, scale = empty_rows(x_TD, width)
    stream = torch.empty_like(x_TD) if more_TD is not None else x_TD.new_empty(0)
    rms = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(width)
    with on_device(x_TD):
        _norm_row8[(tokens,)](
            x_TD, x_TD if more_TD is None else more_TD.contiguous(), weight_D.contiguous(), rows, scale, stream, rms,
            width, eps, ADDS=more_TD is not None, BLOCK=block, FLOOR=LEAST, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return rows, scale, stream, rms


def _plain_norm_rows(
    x_TD: Tensor, more_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = x_TD if more_TD is None else x_TD + more_TD
    wide = stream.to(torch.promote_types(x_TD.dtype, torch.float32))
    rms = torch.rsqrt(wide.square().mean(-1) + eps)
    rows, scale = plain_scaled_rows(wide * rms[:, None] * weight_D.to(wide.dtype))
    return rows, scale, x_TD.new_empty(0) if more_TD is None else stream, rms.float()


@torch.library.register_fake("phalanx::float8_norm_rows")  # type: ignore[untyped-decorator]
def _norm_shapes(
    x_TD: Tensor, more_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del weight_D, eps
    rows, scale = row_shapes(x_TD, x_TD.shape[1])
    stream = x_TD.new_empty(0 if more_TD is None else x_TD.shape)
    return rows, scale, stream, x_TD.new_empty(x_TD.shape[:1], dtype=torch.float32)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _norm_row8(x, more, weight, out, scales, stream, inverse_rms, width, eps,  # type: ignore[no-untyped-def]
                   ADDS: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr):  # fmt: skip
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside, place = column < width, row * width + column
        value = tl.load(x + place, mask=inside, other=0.0)
        if ADDS:
            # Rounded to the stream's dtype first: the norm is of the values that the next layer reads.
            value = (value.to(tl.float32) + tl.load(more + place, mask=inside, other=0.0).to(tl.float32)).to(
                value.dtype
            )
            tl.store(stream + place, value, mask=inside)
        wide = value.to(tl.float32)
        rms = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
        normed = wide * rms * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        scale, undone = scale_of_bits(largest_bits(normed), FLOOR)
        tl.store(out + place, (normed * undone).to(tl.float8e4nv), mask=inside)
        tl.store(scales + row, scale)
        tl.store(inverse_rms + row, rms)
