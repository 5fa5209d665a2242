"""How tokens reach experts in compiled blocks: a layer is compiled and timed each way, and the faster is taken.

The compiler copies rows in one pass too, and adds what stands beside them in the same pass; a kernel of ours keeps it
from that. So neither is timed alone, but a norm, a mixture of experts and the sum behind it, with experts so narrow
that moving rows is most of the work. Blocks that are not compiled take what `selector.choose_variant` measures.
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
FLUSHES = 200  # some 12 ms on an H200: the host issues a whole layer meanwhile


def expert_shape(shape: ModelShape, tokens: int) -> Shape:
    """Sizes of both operations."""
    return {"tokens": tokens, "width": shape.hidden, "experts": shape.experts, "chosen": shape.experts_per_token}


def can_choose(shape: ModelShape, dtype: torch.dtype, *, compiled: bool) -> bool:
    """Whether there is something to choose: compiled, only experts whose products are grouped.

    Others run one after the other in sizes that change with every step, which are not compiled to advantage anyway.
    """
    return shape.is_moe and (not compiled or (dtype is torch.bfloat16 and shape.hidden % 8 == 0))


def choose_in_layer(
    op: KernelOp, shape: ModelShape, asked: Shape, dtype: torch.dtype, device: torch.device, *, backend: str,
    folder: Path | None,
) -> KernelChoice:  # fmt: skip
    """The faster way of one of the two operations in a compiled block; remembered as other choices are."""
    key = choice_key(op.name, {**asked, "shared": shape.shared_experts, "compiled": 1}, dtype, device)

    def measure() -> dict[str, Timing]:
        drawn = [device] if device.type == "cuda" else []
        calls = {}
        # A run that measured draws the same numbers afterwards as one that remembered.
        with torch.random.fork_rng(drawn):
            for variant in [BUILTIN, *([OURS] if is_right(op, OURS, dtype, device) else [])]:
                ours = op.name if variant == OURS else ""
                with contextlib.suppress(torch.OutOfMemoryError):
                    calls[variant] = layer_call(shape, asked["tokens"], dtype, device, backend=backend, ours=ours)
            timings = time_in_turn(calls, device, rounds=10, flushes=FLUSHES)
        calls.clear()
        torch.cuda.empty_cache()
        torch._dynamo.reset()  # the versions compiled here count against the limit of a block's own
        return {BUILTIN: Timing(median_ms=math.inf)} | timings

    return choose_measured(op.name, key, [BUILTIN, OURS], measure, folder=folder)


def layer_call(
    shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device, *, backend: str, ours: str
) -> Callable[[], object]:
    """Forward and backward of the compiled layer, with one operation by our kernel or none."""
    with device:
        layer = _ExpertLayer(replace(shape, expert_ffn=NARROW)).to(dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=shape.hidden**-0.5)
        x_BSD = torch.randn(1, tokens, shape.hidden, dtype=dtype, requires_grad=True)
        grad_BSD = torch.randn_like(x_BSD)
    use_expert_kernels(layer.moe.experts, gather=ours == GATHER, combine=ours == COMBINE)
    layer.moe.experts.requires_grad_(False)  # only what moves rows is of interest
    layer.compile(backend=backend)

    def call() -> object:
        layer.zero_grad()
        return torch.autograd.grad(layer(x_BSD), x_BSD, grad_BSD)

    return call


class _ExpertLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm_of(shape)
        self.moe = Moe(shape)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = x_BSD + self.moe(self.norm(x_BSD))
        return out_BSD


def use_expert_kernels(experts: Experts, *, gather: bool, combine: bool) -> None:
    """Let a layer's rows move by our kernels, or by plain operations."""
    experts.gather_kernel = gather_rows if gather else None
    experts.combine_kernel = combine_rows if combine else None
