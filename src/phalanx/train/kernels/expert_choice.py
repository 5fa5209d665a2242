"""Choice of the kernels that move tokens to experts in compiled blocks: a layer is compiled and timed with each.

The compiler also copies rows in one pass, and fuses additions next to it into the same pass; a custom kernel prevents
that. So the kernels are not timed alone but in a layer: a norm, a mixture of experts and the residual sum, with
experts so narrow that moving rows is most of the work. Blocks that are not compiled use `selector.choose_variant`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.job.model import ModelShape
from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.moe_permute import EXPERT_COMBINE, EXPERT_GATHER, combine_rows, gather_rows
from phalanx.train.kernels.selector import (
    BUILTIN,
    KernelChoice,
    Timing,
    choice_key,
    choose_measured,
    is_right,
    time_in_turn,
)
from phalanx.train.models.layers import norm_of
from phalanx.train.models.moe import Experts, Moe

GATHER, COMBINE = EXPERT_GATHER.name, EXPERT_COMBINE.name
OURS = "triton"
NARROW = 64  # width of the experts that are timed
FLUSHES = 200  # some 12 ms on an H200, in which the host issues a whole layer


def expert_shape(shape: ModelShape, tokens: int) -> Shape:
    """Return the sizes of both operations, gather and combine."""
    return {"tokens": tokens, "width": shape.hidden, "experts": shape.experts, "chosen": shape.experts_per_token}


def can_choose(shape: ModelShape, dtype: torch.dtype, *, compiled: bool) -> bool:
    """Return whether row movement has a kernel choice: in compiled blocks, only where expert products are grouped.

    Otherwise experts run one after the other in sizes that change with every step, which compilation does not speed
    up.
    """
    return shape.is_moe and (not compiled or (dtype is torch.bfloat16 and shape.hidden % 8 == 0))


def choose_in_layer(
    op: KernelOp, shape: ModelShape, asked: Shape, dtype: torch.dtype, device: torch.device, *, backend: str,
    folder: Path | None,
) -> KernelChoice:  # fmt: skip
    """Select the faster variant of gather or combine in a compiled block; the choice is cached as others are."""
    key = choice_key(op.name, {**asked, "shared": shape.shared_experts, "compiled": 1}, dtype, device)

    def measure() -> dict[str, Timing]:
        forked_devices = [device] if device.type == "cuda" else []
        calls = {}
        # A run that measures must draw the same random numbers afterwards as a run that uses the cache.
        with torch.random.fork_rng(forked_devices):
            for variant in [BUILTIN, *([OURS] if is_right(op, OURS, dtype, device) else [])]:
                kernel_name = op.name if variant == OURS else ""
                with contextlib.suppress(torch.OutOfMemoryError):
                    calls[variant] = layer_call(
                        shape, asked["tokens"], dtype, device, backend=backend, ours=kernel_name
                    )
            timings = time_in_turn(calls, device, rounds=10, flushes=FLUSHES)
        calls.clear()
        torch.cuda.empty_cache()
        torch._dynamo.reset()  # versions compiled here would count towards the recompile limit of the model's blocks
        return {BUILTIN: Timing(median_ms=math.inf)} | timings

    return choose_measured(op.name, key, [BUILTIN, OURS], measure, folder=folder)


def layer_call(
    shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device, *, backend: str, ours: str
) -> Callable[[], object]:
    """Return a call of forward and backward of the compiled layer; `ours` names the operation with a Triton kernel."""
    with device:
        layer = _ExpertLayer(replace(shape, expert_ffn=NARROW)).to(dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=shape.hidden**-0.5)
        x_BSD = torch.randn(1, tokens, shape.hidden, dtype=dtype, requires_grad=True)
        grad_BSD = torch.randn_like(x_BSD)
    use_expert_kernels(layer.moe.experts, gather=ours == GATHER, combine=ours == COMBINE)
    layer.moe.experts.requires_grad_(False)  # only the movement of rows is timed
    layer.compile(backend=backend)

    def call() -> object:
        layer.zero_grad()
        return torch.autograd.grad(layer(x_BSD), x_BSD, grad_BSD)

    return call


class _ExpertLayer(nn.Module):
    """A norm, a mixture of experts and the residual sum."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm_of(shape)
        self.moe = Moe(shape)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = x_BSD + self.moe(self.norm(x_BSD))
        return out_BSD


def use_expert_kernels(experts: Experts, *, gather: bool, combine: bool) -> None:
    """Set whether a layer's rows are moved by the Triton kernels or by plain operations."""
    experts.gather_kernel = gather_rows if gather else None
    experts.combine_kernel = combine_rows if combine else None
