"""What backward computes again instead of keeping, and what it fetches from host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

# Kept by selective recompute: what costs more to do again than to hold. Norms, activations and casts are redone.
EXPENSIVE = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")


def recompute(blocks: Iterable[nn.Module], kind: str) -> None:
    """Make each block recompute in backward; the module tree and its names stay as they are."""
    for block in blocks:
        if kind == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif kind == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def offload_activations(blocks: Iterable[nn.Module], *, pinned: bool) -> None:
    """Move what each block saves for backward to host memory."""
    for block in blocks:
        block.forward = _on_host(block.forward, pinned=pinned)


def _on_host(forward: Callable[..., Any], *, pinned: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return forward(*args)

    return run


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del args, kwargs
    keep = op in EXPENSIVE or getattr(op, "namespace", "") in COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
