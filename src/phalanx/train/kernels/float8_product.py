"""Products of fp8 matrices on the GPU's tensor cores; on a CPU the same values are multiplied in float32."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 16  # _scaled_mm requires multiples of this for the summed dimension and the width of the result


def multiply_fp8(
    left_MK: tuple[Tensor, Tensor], right_NK: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast_sums: bool = True
) -> Tensor:
    """Return left · rightᵀ of two fp8 matrices, each with one scale per row or one scale for the whole matrix.

    `fast_sums` lets the tensor cores accumulate with less than float32 precision.
    """
    (left_matrix, left_scale), (right_matrix, right_scale) = left_MK, right_NK
    # _scaled_mm needs scales of one kind: both per row, or both for the whole matrix.
    if left_scale.ndim or right_scale.ndim:
        left_scale, right_scale = (
            scale if scale.ndim else scale.expand(matrix.shape[0], 1).contiguous()
            for matrix, scale in (left_MK, right_NK)
        )
        right_scale = right_scale.t()
    if not left_matrix.is_cuda:  # CPUs have no fp8 products
        return ((left_matrix.float() @ right_matrix.float().t()) * (left_scale * right_scale)).to(dtype)
    out: Tensor = torch._scaled_mm(
        left_matrix,
        right_matrix.t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=dtype,
        use_fast_accum=fast_sums,
    )
    return out
