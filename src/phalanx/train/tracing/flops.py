"""FLOPs of an operator from its shapes: 2 per multiply-add, half the scores of causal attention.

B batch, N heads, S queries, T keys, H head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _products(q: torch.Tensor, k: torch.Tensor, *, count: int, causal: bool) -> int:
    """`count` products over the S × T scores; a causal kernel computes half of them."""
    batch, heads, queries, head = q.shape
    whole = 2 * count * batch * heads * queries * k.shape[2] * head
    return whole // 2 if causal else whole


def _flag(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("is_causal", False))


def _forward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Scores, and their product with the values."""
    return _products(args[0], args[1], count=2, causal=_flag(args, kwargs, 4))


def _backward_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Scores again, and a product for each of dv, dp, dq, dk."""
    return _products(args[1], args[2], count=5, causal=_flag(args, kwargs, 7))


def _backward_gpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return _products(args[1], args[2], count=5, causal=_flag(args, kwargs, 11))


# torch's own table lacks the CPU kernel and counts causal attention as if it were not.
ATTENTION: Mapping[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward_cpu,
    aten._scaled_dot_product_flash_attention.default: _forward,
    aten._scaled_dot_product_flash_attention_backward.default: _backward_gpu,
}


@cache
def what_of(op: Any) -> str:
    """Whether an operator is a "linear" product or "attention"; empty for all others."""
    if op in ATTENTION:
        return "attention"
    return "linear" if op._overloadpacket in flop_registry else ""


def count_flops(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of an operator that `what_of` knows."""
    if op in ATTENTION:
        return ATTENTION[op](args, kwargs)
    return int(flop_registry[op._overloadpacket](*args, **kwargs, out_val=out))
