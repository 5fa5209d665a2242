"""What backward computes again instead of keeping, and what it fetches from host memory."""

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

# Kept by selective recompute: what costs more to do again than to hold. Norms, activations and casts are redone.
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
# Names for a profiler, which FSDP2 gives more often in backward: torch 2.13 counts every operator of a block, and
# refuses experts with shards of their own ("invocation index 3 encountered during backward but not found in storage").
NAMES = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
LEAST_MOVED_BYTES = 2**16  # smaller tensors cost more to move than they free
# Functional collectives return what they received and may be kept. Those of c10d write into a buffer they are given:
# kept, they would hand out the buffer before it is filled.
COLLECTIVES = ("_c10d_functional", "c10d_functional")


def recompute_blocks(blocks: Iterable[nn.Module], kind: str) -> None:
    """Make each block recompute in backward; the module tree and its names stay as they are."""
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
    """A function, because torch.compile follows it: a `partial` around `checkpoint` it passes over without a word."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def _with_buffers_kept(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Computed again, a block must not count its tokens again: batch norm would take every micro-batch in twice."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Compiled, torch itself keeps side effects out of what it computes again.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return forward(*args, **kwargs)
        slots = [(module, key) for module in block.modules() for key, one in module._buffers.items() if one is not None]
        before = [module._buffers[key] for module, key in slots]
        with _disable_current_modes():  # selective recompute counts operators: these are no part of the block
            for (module, key), buffer in zip(slots, before, strict=True):
                module._buffers[key] = buffer.clone() if buffer is not None else None
        try:
            return forward(*args, **kwargs)
        finally:
            for (module, key), buffer in zip(slots, before, strict=True):
                module._buffers[key] = buffer

    return run


def offload_activations(blocks: Iterable[nn.Module]) -> None:
    """Move what each block saves for backward to host memory."""
    for block in blocks:
        block.forward = _on_host(block.forward)


def _on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, lambda back: back()):
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


_computed_again = 0  # how many `keep_nothing` are open


@contextmanager
def keep_nothing() -> Iterator[None]:
    """Selective recompute keeps no product made here: for a traced step, which stands for a compiled one."""
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
    """What a block keeps: nothing of nn.GRU, nn.LSTM and their cells.

    On CPUs these add to and squash their products in place, through views without a version (`unsafe_chunk`): what was
    kept would be changed unnoticed, and backward be wrong (torch 2.13: the gradients of a GRU by 1e-2).
    """
    recurrent = [one for one in block.modules() if isinstance(one, nn.RNNBase | nn.RNNCellBase)]
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

    for one in recurrent:
        one.forward = around(one, one.forward)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE if running else _keep_policy(context, op, *args, **kwargs)

    return policy
