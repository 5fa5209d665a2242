"""Causal self-attention with grouped key and value heads.

B batch, S sequence, D model, N query heads, K key/value heads, H head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.job.model import ModelShape
from phalanx.train.models.rope import Rope

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """softmax(q kᵀ / √H) v over earlier positions, by PyTorch's fused kernels."""
    grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    out_BNSH: Tensor = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=grouped)
    return out_BNSH


class Attention(nn.Module):
    """Projections around `core`, which context parallelism replaces."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = shape.bias or shape.qkv_bias
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.hidden, query, bias=bias)
        self.wk = nn.Linear(shape.hidden, key, bias=bias)
        self.wv = nn.Linear(shape.hidden, key, bias=bias)
        self.wo = nn.Linear(query, shape.hidden, bias=shape.bias)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.core: Core = causal_attention

    def forward(self, x_BSD: Tensor, rope: Rope | None) -> Tensor:
        """Mix each position with the earlier ones; rope=None when positions were added to the embedding."""
        q_BSNH, k_BSKH, v_BSKH = (self._heads(linear(x_BSD)) for linear in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNH, k_BSKH = self.q_norm(q_BSNH), self.k_norm(k_BSKH)
        if rope is not None:
            q_BSNH, k_BSKH = rope.turn(q_BSNH), rope.turn(k_BSKH)
        o_BNSH = self.core(q_BSNH.transpose(1, 2), k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2))
        out_BSD: Tensor = self.wo(o_BNSH.transpose(1, 2).flatten(2))
        return out_BSD

    def _heads(self, flat: Tensor) -> Tensor:
        """The number of heads follows from the rows at hand: a rank of a tensor group holds only some of them."""
        return flat.view(*flat.shape[:-1], -1, self.head_dim)


def repeat_heads(k_BKSH: Tensor, heads: int) -> Tensor:
    """Each key/value head once per query head of its group, for cores that know no groups."""
    return torch.repeat_interleave(k_BKSH, heads // k_BKSH.shape[1], dim=1)
