"""Which kernels a run's step uses: chosen when its engine is built, told when it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from phalanx.hardware.kernel_choices import kernel_cache_folder
from phalanx.plan.lean_step import loss_chunk
from phalanx.train.kernels.model_kernels import LayerKernels, choose_layer_kernels
from phalanx.train.kernels.selector import BUILTIN, KernelChoice
from phalanx.train.optim.adamw import AdamW
from phalanx.train.optim.base import Optimizer
from phalanx.train.parallel.float8_choice import choose_float8_head, choose_float8_layers
from phalanx.train.rank_settings import Settings
from phalanx.units import format_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKernels:
    """What a step's optimizer and layers run by; None where nothing was chosen."""

    optimizer: KernelChoice | None = None
    layers: LayerKernels | None = None
    float8: KernelChoice | None = None  # of whole layers in fp8
    float8_head: KernelChoice | None = None

    def describe(self) -> list[str]:
        """For a person."""
        lines = self.layers.describe() if self.layers is not None else []
        lines += [one.describe() for one in (self.float8, self.float8_head) if one is not None]
        return [*lines, self.optimizer.describe()] if self.optimizer is not None else lines


def choose_kernels(
    optimizer: Optimizer, models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int
) -> StepKernels:
    """Choose before the first step; every rank calls this."""
    folder = kernel_cache_folder(os.environ)
    return StepKernels(
        optimizer=choose_optimizer_kernel(optimizer, device, world=world),
        layers=choose_layer_kernels(models, settings, device, world=world, folder=folder),
        float8=choose_float8_layers(models, settings, device, world=world, folder=folder),
        float8_head=choose_float8_head(models, settings, device, world=world, folder=folder),
    )


def choose_optimizer_kernel(optimizer: Optimizer, device: torch.device, *, world: int) -> KernelChoice | None:
    """Let AdamW take its faster kernel; every rank calls this, and all take what rank 0 measured.

    Ranks that hold copies of a weight must round it alike.
    """
    if device.type != "cuda" or not isinstance(optimizer, AdamW):
        return None
    choice = optimizer.choose_kernel(kernel_cache_folder(os.environ)) if world == 1 or dist.get_rank() == 0 else None
    is_ours = torch.tensor([float(choice is not None and choice.variant != BUILTIN)], device=device)
    if world > 1:
        dist.broadcast(is_ours, 0)
        # What one rank can run another may not: its shards may be empty, or in another format.
        able = torch.tensor([float(optimizer.takes_own_kernel)], device=device)
        dist.all_reduce(able, op=dist.ReduceOp.MIN)
        is_ours *= able
    optimizer.kernel = "triton" if is_ours.item() else BUILTIN
    return choice


def kernel_lines(engine: Engine) -> list[str]:
    """What this rank's step does otherwise than plain PyTorch, for a person; nothing on a CPU by default."""
    settings, shape, device = engine.settings, engine.shape, engine.device
    layout, size = settings.layout, settings.compute_dtype.itemsize
    tokens = layout.micro_batch * settings.sequence // layout.context
    lines = []
    if settings.chunks_loss(shape, device):
        part, each = int(loss_chunk(tokens, shape.vocab)), shape.vocab * size
        if part < tokens:
            held = f"logits of {part:,} tokens at a time, {format_bytes(part * each)} of {format_bytes(tokens * each)}"
        else:
            held = f"logits become their gradient in place, {format_bytes(tokens * each)}"
        lines.append(f"head and loss: {held}")
    elif settings.fp8_head:
        lines.append("head and loss: in 16 bit; fp8 needs a loss in parts (train.lean, no tensor or pipeline ranks)")
    if settings.drops_product(shape, device):
        saved = tokens * shape.ffn * size * len(engine.parts[0].model.layers)
        lines.append(f"MLP: backward makes gate · up again instead of keeping {format_bytes(saved)}")
    return [*lines, *engine.kernels.describe()]
