"""Properties of an operator as torch dispatches it: kind, bytes, group and peer of a message, FLOPs from its shapes.

FLOPs: 2 per multiply-add, half the scores of causal attention. B batch, N heads, S queries, T keys, H head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import flop_registry

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# Part of an operator's name without underscores -> Phalanx's name. The first match counts.
WORDS = (
    ("wait", ""),
    ("barrier", "barrier"),
    ("reducescatter", "reduce-scatter"),
    ("allreduce", "all-reduce"),
    ("allgather", "all-gather"),
    ("alltoall", "all-to-all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "receive"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)


@cache
def kind_of(op: Any) -> str:
    """Return Phalanx's name of a communication operator; empty for every other operator, and for waiting."""
    if op.namespace not in NAMESPACES:
        return ""
    name = op._opname.replace("_", "")
    return next((word for pattern, word in WORDS if pattern in name), "")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def payload_of(args: Sequence[Any], out: Any) -> tuple[int, str]:
    """Return bytes and dtype of the larger side: a gather's output, a scatter's input."""
    sides = [list(tensors_of(side)) for side in (*args[:2], out)]
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in side) for side in sides]
    largest = max(range(len(sides)), key=lambda place: sizes[place])
    side = sides[largest]
    return sizes[largest], str(side[0].dtype).removeprefix("torch.") if side else ""


def group_of(op: Any, args: Sequence[Any]) -> ProcessGroup:
    """Return the group of a call: a c10d call passes an object, a functional one a name."""
    if op.namespace == "c10d":
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        return ProcessGroup.unbox(boxed)
    names = [arg for arg in args if isinstance(arg, str)]
    return _resolve_process_group(names[-1])  # type: ignore[arg-type]


def peer_of(args: Sequence[Any], group: ProcessGroup) -> int:
    """Return the other rank of a send or receive, as rank of the job."""
    return int(dist.get_global_rank(group, int(args[2])))


aten = torch.ops.aten


def _score_products(q: torch.Tensor, k: torch.Tensor, *, count: int, causal: bool) -> int:
    """Return the FLOPs of `count` products over the S × T scores; a causal kernel computes half of them."""
    batch, heads, queries, head = q.shape
    flops = 2 * count * batch * heads * queries * k.shape[2] * head
    return flops // 2 if causal else flops


def _is_causal(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("is_causal", False))


def _forward_flops(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of the scores and of their product with the values."""
    return _score_products(args[0], args[1], count=2, causal=_is_causal(args, kwargs, 4))


def _backward_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of the recomputed scores and of a product for each of dv, dp, dq, dk."""
    return _score_products(args[1], args[2], count=5, causal=_is_causal(args, kwargs, 7))


def _backward_gpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return _score_products(args[1], args[2], count=5, causal=_is_causal(args, kwargs, 11))


def _forward_cudnn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return _score_products(args[0], args[1], count=2, causal=_is_causal(args, kwargs, 6))


def _backward_cudnn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return _score_products(args[1], args[2], count=5, causal=_is_causal(args, kwargs, 14))


# torch's table lacks the CPU kernel and counts causal attention in full.
ATTENTION: Mapping[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward_cpu,
    aten._scaled_dot_product_flash_attention.default: _forward_flops,
    aten._scaled_dot_product_flash_attention_backward.default: _backward_gpu,
    aten._scaled_dot_product_cudnn_attention.default: _forward_cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _backward_cudnn,
}


@cache
def flop_kind(op: Any) -> str:
    """Return "linear" for a matrix product, "attention" for attention, and an empty string for all other operators."""
    if op in ATTENTION:
        return "attention"
    return "linear" if op._overloadpacket in flop_registry else ""


def count_flops(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of an operator for which `flop_kind` is not empty."""
    if op in ATTENTION:
        return ATTENTION[op](args, kwargs)
    return int(flop_registry[op._overloadpacket](*args, **kwargs, out_val=out))
