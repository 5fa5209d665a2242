"""Products of matrices that were rounded to fp8, by the GPU's tensor cores; on a CPU the same numbers in float32."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 16  # _scaled_mm wants multiples of this in what it sums over and in the width of its result


def multiply_fp8(
    left_MK: tuple[Tensor, Tensor], right_NK: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast_sums: bool = True
) -> Tensor:
    """left rightᵀ of matrices that were rounded with one scale per row, or with one for all."""
    (left, left_scale), (right, right_scale) = left_MK, right_NK
    if left_scale.ndim or right_scale.ndim:  # both per row, or both for all
        left_scale, right_scale = (
            scale if scale.ndim else scale.expand(matrix.shape[0], 1).contiguous()
            for matrix, scale in (left_MK, right_NK)
        )
        right_scale = right_scale.t()
    if not left.is_cuda:  # no fp8 products there: the same numbers, multiplied in float32
        return ((left.float() @ right.float().t()) * (left_scale * right_scale)).to(dtype)
    out: Tensor = torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast_sums
    )
    return out
