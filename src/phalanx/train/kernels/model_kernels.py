"""Selection of the kernels of a model's layers by measurement at the job's own shapes, before the first step.

Compiled blocks are left alone: the compiler fuses norms, rotations and activations with neighbouring operations,
which a custom kernel would prevent. Kernels are chosen for the operations that are not compiled: always for the last
norm, and in blocks that are not compiled for every norm, rotation and gated product. The movement of tokens to
experts and back is chosen in all blocks, for compiled ones by timing a compiled layer (`expert_choice.py`). The
chunked loss is used for its memory, which the plan relies on: it is measured and reported, not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.job.model import ModelShape
from phalanx.train.kernels.evolved_norm import evolved_norm, find_winner, winner_name, with_winner
from phalanx.train.kernels.expert_choice import (
    COMBINE,
    GATHER,
    OURS,
    can_choose,
    choose_in_layer,
    expert_shape,
    use_expert_kernels,
)
from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.rms_norm import rms_norm
from phalanx.train.kernels.rope import rotate_heads
from phalanx.train.kernels.selector import BUILTIN, KernelChoice, choose_variant
from phalanx.train.kernels.swiglu import swiglu
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.layers import Mlp, SelectedNorm
from phalanx.train.models.moe import Experts
from phalanx.train.rank_settings import Settings

TYPES = (torch.bfloat16, torch.float32)
NORM, ROPE, SWIGLU, LOSS = "rms-norm", "rope", "swiglu", "linear-cross-entropy"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKernels:
    """The chosen kernels of a model's layers, by operation."""

    choices: Mapping[str, KernelChoice]
    # Blocks are compiled: only the last norm and the movement of tokens to experts were chosen.
    compiled: bool

    def describe(self) -> list[str]:
        """Return lines for the console.

        >>> took = {"builtin": 0.3, "triton": 0.2}
        >>> norm = KernelChoice(op="rms-norm", variant="triton", times_ms=took)
        >>> LayerKernels(choices={"rms-norm": norm}, compiled=True).describe()
        ['last rms-norm: triton, 0.20 ms (builtin 0.30 ms)', 'norms, rope and swiglu of blocks: fused by the compiler']
        """
        lines = []
        for op, choice in self.choices.items():
            line = f"last {choice.describe()}" if op == NORM and self.compiled else choice.describe()
            lines.append(f"{line} in a layer of narrow experts" if op in (GATHER, COMBINE) and self.compiled else line)
        return [*lines, "norms, rope and swiglu of blocks: fused by the compiler"] if self.compiled else lines


def asked_shapes(shape: ModelShape, settings: Settings, device: torch.device) -> dict[str, Shape]:
    """Return the sizes of the operations of a rank's step for which a kernel is measured, by operation."""
    layout = settings.layout
    sequence = settings.sequence // layout.context
    tokens = layout.micro_batch * sequence
    shapes: dict[str, Shape] = {}
    if shape.norm == "rms":
        shapes[NORM] = {"tokens": tokens, "width": shape.hidden}
    if not settings.compile:
        if shape.positions == "rope":
            sizes = {"batch": layout.micro_batch, "sequence": sequence, "heads": shape.heads, "head": shape.head_dim}
            shapes[ROPE] = sizes
        if (
            shape.gated
            and shape.activation == "silu"
            and not shape.is_moe
            and not settings.drops_product(shape, device)
        ):
            shapes[SWIGLU] = {"tokens": tokens, "width": shape.ffn}
    if can_choose(shape, settings.compute_dtype, compiled=settings.compile):
        shapes[GATHER] = shapes[COMBINE] = expert_shape(shape, tokens)
    if settings.chunks_loss(shape, device):
        shapes[LOSS] = {"tokens": tokens, "width": shape.hidden, "vocab": shape.vocab}
    return shapes


def choose_layer_kernels(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> LayerKernels | None:
    """Measure or load the choices and set the layers' kernels; every rank must call this and uses rank 0's choice.

    Returns None on a CPU, with tensor parallelism, for other dtypes than bf16 and fp32, and for a user's own network.
    """
    dtype = settings.compute_dtype
    decoders = [model for model in models if isinstance(model, Decoder)]
    if device.type != "cuda" or settings.layout.tensor > 1 or dtype not in TYPES or not decoders:
        return None
    shape = decoders[0].shape
    op_shapes = asked_shapes(shape, settings, device)
    winner = find_winner(NORM, shape.hidden, dtype, device, folder) if NORM in op_shapes else ""
    if world > 1 and not _all_have(winner, device):
        winner = ""
    ops = {name: op for name, op in load_all().items() if name in op_shapes}
    if winner:
        ops[NORM] = with_winner(ops[NORM], winner)
    choices: dict[str, KernelChoice] = {}
    for name, op in ops.items():
        if world == 1 or dist.get_rank() == 0:
            if settings.compile and name in (GATHER, COMBINE):
                backend = settings.compile_backend
                choices[name] = choose_in_layer(
                    op, shape, op_shapes[name], dtype, device, backend=backend, folder=folder
                )
            else:
                choices[name] = choose_variant(op, op_shapes[name], dtype, device, folder=folder)
        if world > 1:
            choices[name] = _agreed(op, choices.get(name), device)
    torch.cuda.reset_peak_memory_stats(device)  # the measurement is not part of a step
    chosen = LayerKernels(choices=choices, compiled=settings.compile)
    use_kernels(decoders, chosen, winner)
    return chosen


def _all_have(winner: str, device: torch.device) -> bool:
    """Return whether every rank has the same winner in its cache."""
    mark = float(int(winner_name(winner).removeprefix("evolved-"), 16) % 2**20) if winner else -1.0
    extremes = torch.tensor([mark, -mark], dtype=torch.float64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN)
    return bool(extremes[0] == -extremes[1]) and mark >= 0.0


def _agreed(op: KernelOp, choice: KernelChoice | None, device: torch.device) -> KernelChoice:
    """Broadcast rank 0's choice; ranks without a measurement get one without times."""
    names = list(op.variants)
    index = torch.tensor([names.index(choice.variant) if choice is not None else 0], device=device)
    dist.broadcast(index, 0)
    return choice if choice is not None else KernelChoice(op=op.name, variant=names[int(index)], times_ms={})


def use_kernels(models: Sequence[Decoder], chosen: LayerKernels, winner: str = "") -> None:
    """Set the chosen kernels in the layers; the built-in is their default."""
    variant = {op: choice.variant for op, choice in chosen.choices.items()}
    norms: dict[str, Callable[..., Any]] = {"triton": rms_norm}
    if winner:
        norms[winner_name(winner)] = evolved_norm(winner)
    norm = norms.get(variant.get(NORM, BUILTIN))
    for model in models:
        if isinstance(model.norm, SelectedNorm):
            model.norm.kernel = norm
        for module in model.modules():
            if isinstance(module, Experts):
                gather, combine = (variant.get(op) == OURS for op in (GATHER, COMBINE))
                use_expert_kernels(module, gather=gather, combine=combine)
        if chosen.compiled:
            continue
        model.rope_kernel = rotate_heads if variant.get(ROPE) == "triton" else None
        for module in model.modules():
            if isinstance(module, SelectedNorm) and module.normalized_shape == (model.shape.hidden,):
                module.kernel = norm
            elif isinstance(module, Mlp):
                module.kernel = swiglu if variant.get(SWIGLU) == "triton" else None
