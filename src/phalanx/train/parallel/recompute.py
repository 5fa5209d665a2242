"""What backward computes again instead of keeping, and what it fetches from host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

# Kept by selective recompute: what costs more to do again than to hold. Norms, activations and casts are redone.
EXPENSIVE = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
LEAST_MOVED_BYTES = 2**16  # smaller tensors cost more to move than they free
# Functional collectives return what they received and may be kept. Those of c10d write into a buffer they are given:
# kept, they would hand out the buffer before it is filled.
COLLECTIVES = ("_c10d_functional", "c10d_functional")


def recompute(blocks: Iterable[nn.Module], kind: str) -> None:
    """Make each block recompute in backward; the module tree and its names stay as they are."""
    for block in blocks:
        if kind == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif kind == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def offload_activations(blocks: Iterable[nn.Module]) -> None:
    """Move what each block saves for backward to host memory."""
    for block in blocks:
        block.forward = _on_host(block.forward)


def _on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            return forward(*args)

    return run


def _to_host(saved: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A copy in host memory, with the same strides: compiled backward code counts on them.

    torch's own `save_on_cpu` forgets the strides, carries the weights away as well, and cannot take split tensors.
    """
    if isinstance(saved, DTensor):
        back, mesh, placements = _to_host(saved._local_tensor), saved.device_mesh, saved.placements
        size, stride = saved.size(), saved.stride()
        return lambda: DTensor.from_local(back(), mesh, placements, run_check=False, shape=size, stride=stride)
    weight = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
    if weight or saved.numel() * saved.element_size() < LEAST_MOVED_BYTES:
        return lambda: saved
    device = saved.device
    host = torch.empty_strided(saved.size(), saved.stride(), dtype=saved.dtype, device="cpu", pin_memory=saved.is_cuda)
    host.copy_(saved, non_blocking=saved.is_cuda)
    return lambda: host if host.device == device else host.to(device, non_blocking=True)


def _from_host(back: Callable[[], torch.Tensor]) -> torch.Tensor:
    return back()


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del args, kwargs
    keep = op in EXPENSIVE or getattr(op, "namespace", "") in COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
