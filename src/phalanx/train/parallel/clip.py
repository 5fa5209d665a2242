"""The true global gradient norm under any layout, in the one small collective a step needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.train.parallel.tensor_shard import TensorShard


def squared_norm(pieces: Sequence[TensorShard], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the squared norm: summed over all ranks of the job it is the whole, each value once.

    Copies that another rank counts add nothing, unless one of them is not finite: that is heard of from every rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    for owner, weight in ((True, 1.0), (False, 0.0)):
        mine = [grad for piece, grad in zip(pieces, grads, strict=True) if piece.owner is owner and grad.numel()]
        if mine:
            # Norms first, squares after: foreach makes one pass over the gradients without a temporary copy.
            wide = torch.promote_types(mine[0].dtype, torch.float32)
            total += torch.stack(torch._foreach_norm(mine, 2, dtype=wide)).double().square().sum() * weight
    return total


def scale_gradients(grads: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply every gradient in place; nothing is done for exactly one."""
    if factor != 1.0 and grads:
        torch._foreach_mul_(list(grads), factor)
