"""Activation recomputation and offload: blocks recompute values in backward, or fetch them from host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from phalanx.train.parallel.float8 import FP8_PRODUCT

aten = torch.ops.aten

# Saved by selective recompute, because they cost more to compute again than to hold. Norms, activations and casts
# are recomputed.
EXPENSIVE = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_mm.default,
    FP8_PRODUCT,
    torch.ops.phalanx.fp8_product.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
# Profiler operators, which FSDP2 calls more often in backward: torch 2.13 counts every operator of a block, and
# refuses experts with their own shards ("invocation index 3 encountered during backward but not found in storage").
NAMES = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
LEAST_MOVED_BYTES = 2**16  # smaller tensors cost more to move than they free
# Functional collectives return what they received and may be saved. Those of c10d write into a buffer they are
# given: saved, they would return the buffer before it is filled.
COLLECTIVES = ("_c10d_functional", "c10d_functional")


def recompute_blocks(blocks: Iterable[nn.Module], kind: str) -> None:
    """Make each block recompute in backward; the module tree and its names do not change."""
    for block in blocks:
        if kind != "none" and next(block.buffers(), None) is not None:
            block.forward = _with_buffers_kept(block, block.forward)
        if kind == "full":
            block.forward = _checkpointed(block.forward)
        elif kind == "selective":
            SAC_IGNORED_OPS.update(NAMES)
            contexts = partial(create_selective_checkpoint_contexts, _policy_of(block))
            block.forward = _checkpointed(block.forward, context_fn=contexts)


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Wrap `forward` in `checkpoint` as a function, which torch.compile traces; it silently skips a `partial`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def _with_buffers_kept(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` so that recomputation does not update buffers: batch norm would count every micro-batch twice."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Compiled code excludes side effects from recomputation by itself. A graph task id of -1 means that this is
        # not backward.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return forward(*args, **kwargs)
        slots = [
            (module, key) for module in block.modules() for key, buffer in module._buffers.items() if buffer is not None
        ]
        before = [module._buffers[key] for module, key in slots]
        # Selective recompute counts operators, and these clones are not part of the block
        with _disable_current_modes():
            for (module, key), buffer in zip(slots, before, strict=True):
                module._buffers[key] = buffer.clone() if buffer is not None else None
        try:
            return forward(*args, **kwargs)
        finally:
            for (module, key), buffer in zip(slots, before, strict=True):
                module._buffers[key] = buffer

    return run


def offload_activations(blocks: Iterable[nn.Module]) -> None:
    """Move the tensors that each block saves for backward to host memory."""
    for block in blocks:
        block.forward = _on_host(block.forward)


def _on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, lambda back: back()):
            return forward(*args)

    return run


def _to_host(saved: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a saved tensor to host memory with its strides, which compiled backward code relies on.

    Returns a function that loads it. Weights and small tensors stay on the device. torch's own `save_on_cpu` loses
    the strides, moves weights as well, and cannot handle DTensors.
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


_computed_again = 0  # number of open `keep_nothing` contexts


@contextmanager
def keep_nothing() -> Iterator[None]:
    """Make selective recompute save nothing computed here: for a traced step, which represents a compiled one."""
    global _computed_again
    _computed_again += 1
    try:
        yield
    finally:
        _computed_again -= 1


def _keep_policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del args, kwargs
    keep = (op in EXPENSIVE or getattr(op, "namespace", "") in COLLECTIVES) and not _computed_again
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _policy_of(block: nn.Module) -> Callable[..., CheckpointPolicy]:
    """Return a block's selective-recompute policy: save nothing computed in recurrent layers (GRU, LSTM, cells).

    On CPUs these modify their products in place, through views without a version (`unsafe_chunk`): saved values would
    be changed unnoticed and backward be wrong (torch 2.13: the gradients of a GRU by 1e-2).
    """
    recurrent = [module for module in block.modules() if isinstance(module, nn.RNNBase | nn.RNNCellBase)]
    if not recurrent:
        return _keep_policy
    running: list[nn.Module] = []

    def around(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        return run

    for module in recurrent:
        module.forward = around(module, module.forward)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE if running else _keep_policy(context, op, *args, **kwargs)

    return policy
