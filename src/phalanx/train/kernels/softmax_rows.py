"""Kernel helpers for the cross-entropy of rows of logits: the logarithm of a row's sum, and the gradient of every
logit.

Shared by the heads in 16 bit (`linear_cross_entropy.py`) and in fp8 (`float8_head.py`).

T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.train.data.batches import IGNORED

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

# Logits that one program reads at once, and its warps: the fastest of ten on an H200.
ROW_BLOCK, ROW_WARPS = 8192, 8


def plain_row_gradients(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the summed loss with respect to the logits, in float32 or wider, and losses_T."""
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    sums_T1 = wide_TV.logsumexp(dim=1, keepdim=True)
    is_valid_T1 = (targets_T != IGNORED)[:, None]
    column_T1 = torch.where(is_valid_T1, targets_T[:, None], 0)
    losses_T1 = torch.where(is_valid_T1, sums_T1 - wide_TV.gather(1, column_T1), 0.0)
    grad_TV = torch.exp(wide_TV - sums_T1)
    grad_TV.scatter_add_(1, column_T1, torch.full_like(losses_T1, -1.0))
    return torch.where(is_valid_T1, grad_TV, 0.0), losses_T1.squeeze(1)


def row_blocks_and_warps(vocab: int) -> tuple[int, int]:
    """Return the number of logits that a program reads at once, and its number of warps."""
    block = min(ROW_BLOCK, triton.next_power_of_2(vocab))
    return block, max(1, min(ROW_WARPS, block // 256))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def row_log2_sum(start_of_row, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return log2 of the sum of exp(x) over a row, read block by block.

        Computed in powers of two, which saves one multiplication per logit. Each lane has its own sum; they are added
        at the end.
        """
        LOG2E: tl.constexpr = 1.4426950408889634
        columns = tl.arange(0, BLOCK)
        largest = -1e30
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + columns
            x = tl.load(start_of_row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(x, axis=0) * LOG2E)
            total = total * tl.exp2(largest - larger) + tl.exp2(x * LOG2E - larger)
            largest = larger
        return largest + tl.log2(tl.sum(total, axis=0))
