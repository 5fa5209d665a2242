"""The kernels of a step: selected when the engine is built, printed at the start, compared with the time of step 3."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from phalanx.hardware.kernel_choices import kernel_cache_folder
from phalanx.plan.lean_step import loss_chunk
from phalanx.train.kernels.attention import choose_attention
from phalanx.train.kernels.layer_timing import layer_call, time_layers
from phalanx.train.kernels.model_kernels import LOSS, LayerKernels, choose_layer_kernels
from phalanx.train.kernels.selector import BUILTIN, KernelChoice, Timing, choice_key, choose_measured
from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.optim.adamw import AdamW
from phalanx.train.optim.base import Optimizer
from phalanx.train.parallel.float8_choice import choose_float8_head, choose_float8_layers
from phalanx.train.rank_settings import Settings
from phalanx.units import format_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

# A step may take this much longer than its kernels did when they were timed: on an H200 products held at the power
# limit reach 690 TFLOP/s after 774 to 793 in a short test, and embedding, gradient norm and host come on top.
PROMISE_SLACK = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKernels:
    """The selected kernels of a step's optimizer and layers; None where there was no choice."""

    optimizer: KernelChoice | None = None
    attention: KernelChoice | None = None
    layers: LayerKernels | None = None
    # A whole compiled layer, which has one variant: timed for the promise only.
    layer: KernelChoice | None = None
    float8: KernelChoice | None = None  # a whole layer in fp8
    float8_head: KernelChoice | None = None

    def describe(self) -> list[str]:
        """Return a line per choice for the console."""
        lines = [self.attention.describe()] if self.attention is not None else []
        lines += self.layers.describe() if self.layers is not None else []
        lines += [choice.describe() for choice in (self.float8, self.float8_head) if choice is not None]
        return [*lines, self.optimizer.describe()] if self.optimizer is not None else lines

    def promise(self, *, layers: int, micro_batches: int) -> StepPromise | None:
        """Return the sum of the measured times of a step's parts, or None if one of them was not measured."""
        layer = self.float8 or self.layer
        head = self.float8_head or (self.layers.choices.get(LOSS) if self.layers is not None else None)
        times = [choice.time_ms if choice is not None else None for choice in (layer, head, self.optimizer)]
        if None in times:
            return None
        layer_ms, head_ms, optimizer_ms = (time_ms for time_ms in times if time_ms is not None)
        return StepPromise(
            layers_ms=layers * micro_batches * layer_ms, head_ms=micro_batches * head_ms, optimizer_ms=optimizer_ms
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPromise:
    """Milliseconds of a step's layers, of its head and loss and of its optimizer, each as measured on its own."""

    layers_ms: float
    head_ms: float
    optimizer_ms: float

    @property
    def total_ms(self) -> float:
        """Time of a step without its other parts; embedding, gradient norm and host come on top."""
        return self.layers_ms + self.head_ms + self.optimizer_ms

    def compare(self, step_s: float) -> tuple[str, bool]:
        """Return a line for the console, and whether the step breaks the promise.

        >>> StepPromise(layers_ms=808.0, head_ms=160.0, optimizer_ms=12.0).compare(1.341)[1]
        True
        >>> StepPromise(layers_ms=808.0, head_ms=160.0, optimizer_ms=12.0).compare(1.005)
        ('a step takes 1,005 ms, 2.6 % above the 980 ms that its kernels took when they were selected', False)
        """
        over = step_s * 1e3 / self.total_ms - 1.0
        difference = f"{abs(over):.1%}".replace("%", " %") + (" above" if over >= 0 else " below")
        line = f"a step takes {step_s * 1e3:,.0f} ms, {difference} the {self.total_ms:,.0f} ms that its kernels took"
        if over <= PROMISE_SLACK:
            return f"{line} when they were selected", False
        parts = (
            f"layers {self.layers_ms:,.0f}, head and loss {self.head_ms:,.0f}, optimizer {self.optimizer_ms:,.0f} ms"
        )
        return (
            f"{line} when they were selected ({parts}): the step runs other kernels than were measured, the GPU is "
            "shared or throttled, or the data is late; `phalanx report` shows a timeline of a step",
            True,
        )


def choose_kernels(
    optimizer: Optimizer, models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int
) -> StepKernels:
    """Select all kernels before the first step; every rank must call this."""
    folder = kernel_cache_folder(os.environ)
    # Attention first: whole layers are timed with the kernel that they will use.
    attention = choose_attention(models, settings, device, world=world, folder=folder)
    return StepKernels(
        optimizer=choose_optimizer_kernel(optimizer, device, world=world),
        attention=attention,
        layers=choose_layer_kernels(models, settings, device, world=world, folder=folder),
        layer=time_compiled_layer(models, settings, device, world=world, folder=folder),
        float8=choose_float8_layers(models, settings, device, world=world, folder=folder),
        float8_head=choose_float8_head(models, settings, device, world=world, folder=folder),
    )


def time_compiled_layer(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> KernelChoice | None:
    """Time one compiled dense layer in 16 bit, as the basis of the promised step time.

    Returns None on several ranks, where a layer's time includes waiting for other ranks, and where layers are not
    compiled, are recomputed or offloaded, or have experts, whose time depends on the routing.
    """
    decoders = [model for model in models if isinstance(model, Decoder)]
    layout = settings.layout
    is_plain = layout.recompute == "none" and layout.offload == "none" and settings.compute in ("bf16", "fp16")
    if device.type != "cuda" or world > 1 or not settings.compile or not is_plain or not decoders:
        return None
    shape, block = decoders[0].shape, next(iter(decoders[0].layers.values()))
    if shape.is_moe or not isinstance(block, Block):
        return None
    sizes = {
        "batch": layout.micro_batch, "sequence": settings.sequence, "width": shape.hidden, "ffn": shape.ffn,
        "heads": shape.heads, "kv_heads": shape.kv_heads, "lean": int(settings.drops_product(shape, device)),
    }  # fmt: skip

    def measure() -> dict[str, Timing]:
        timings: dict[str, Timing] = {}
        with contextlib.suppress(torch.OutOfMemoryError):
            timings = time_layers({BUILTIN: layer_call(shape, settings, device, core=block.attn.core)}, device)
        return timings or {BUILTIN: Timing(median_ms=math.inf)}

    return choose_measured(
        "layer", choice_key("layer", sizes, settings.compute_dtype, device), [BUILTIN], measure, folder=folder
    )


def choose_optimizer_kernel(optimizer: Optimizer, device: torch.device, *, world: int) -> KernelChoice | None:
    """Set AdamW's faster kernel; every rank must call this, and all use the choice of rank 0.

    Ranks that have copies of a weight must round it alike.
    """
    if device.type != "cuda" or not isinstance(optimizer, AdamW):
        return None
    choice = optimizer.choose_kernel(kernel_cache_folder(os.environ)) if world == 1 or dist.get_rank() == 0 else None
    is_ours = torch.tensor([float(choice is not None and choice.variant != BUILTIN)], device=device)
    if world > 1:
        dist.broadcast(is_ours, 0)
        # A rank may be unable to run it: its shards may be empty, or in another dtype.
        is_supported = torch.tensor([float(optimizer.takes_own_kernel)], device=device)
        dist.all_reduce(is_supported, op=dist.ReduceOp.MIN)
        is_ours *= is_supported
    optimizer.kernel = "triton" if is_ours.item() else BUILTIN
    return choice


def kernel_lines(engine: Engine) -> list[str]:
    """Return lines for the console about this rank's deviations from plain PyTorch; by default none on a CPU."""
    settings, shape, device = engine.settings, engine.shape, engine.device
    layout, size = settings.layout, settings.compute_dtype.itemsize
    tokens = layout.micro_batch * settings.sequence // layout.context
    lines = []
    if settings.chunks_loss(shape, device):
        chunk, each = int(loss_chunk(tokens, shape.vocab)), shape.vocab * size
        if chunk < tokens:
            note = (
                f"logits of {chunk:,} tokens at a time, {format_bytes(chunk * each)} of {format_bytes(tokens * each)}"
            )
        else:
            note = f"logits become their gradient in place, {format_bytes(tokens * each)}"
        lines.append(f"head and loss: {note}")
    elif settings.fp8_head:
        lines.append("head and loss: in 16 bit; fp8 needs a loss in parts (train.lean, no tensor or pipeline ranks)")
    if settings.drops_product(shape, device):
        saved = tokens * shape.ffn * size * len(engine.parts[0].model.layers)
        lines.append(f"MLP: backward makes gate · up again instead of keeping {format_bytes(saved)}")
    return [*lines, *engine.kernels.describe()]
