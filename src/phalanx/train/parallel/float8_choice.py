"""Measured choice of a layer's fp8 form (separate matrices, or fused with norms and activation), and of the head's.

One layer of the job's shape is compiled and timed both ways, in turn and with the same attention kernel. The faster
form is stored in the user's kernel cache, and its compiled code in torch's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from phalanx.job.model import ModelShape
from phalanx.plan.trainable import splits_backward
from phalanx.train.kernels.float8_head import fits_float8_head
from phalanx.train.kernels.layer_timing import ROUNDS, layer_call, time_layers
from phalanx.train.kernels.linear_cross_entropy import linear_cross_entropy
from phalanx.train.kernels.selector import BUILTIN, KernelChoice, Timing, choice_key, choose_measured, time_in_turn
from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.models.layers import Core
from phalanx.train.parallel.float8_layer import can_fuse, fused_layer
from phalanx.train.rank_settings import Settings

OP, FUSED = "fp8-layer", "fused"
HEAD_OP, FLOAT8 = "fp8-head", "fp8"


def choose_float8_layers(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> KernelChoice | None:
    """Choose the layers' fp8 form by cache or measurement, and apply it to the blocks.

    Every rank calls this, and all use what rank 0 chose. Returns None if there is nothing to choose: no fp8, no GPU,
    or a layer that the fused operators do not compute.
    """
    layout = settings.layout
    if settings.compute != "fp8" or device.type != "cuda" or splits_backward(layout) or layout.offload == "activations":
        return None
    decoders = [model for model in models if isinstance(model, Decoder)]
    tokens = layout.micro_batch * settings.sequence // layout.context
    layers = [block for decoder in decoders for block in decoder.layers.values()]
    blocks = [block for block in layers if isinstance(block, Block) and can_fuse(block, tokens)]
    can_choose = torch.tensor([float(bool(blocks))], device=device)
    if world > 1:
        dist.all_reduce(can_choose, op=dist.ReduceOp.MIN)
    if not can_choose.item():
        return None
    shape, choice = decoders[0].shape, None
    if world == 1 or dist.get_rank() == 0:
        sizes = {
            "batch": layout.micro_batch, "sequence": settings.sequence // layout.context, "width": shape.hidden,
            "ffn": shape.ffn, "heads": shape.heads, "kv_heads": shape.kv_heads, "compiled": int(settings.compile),
        }  # fmt: skip
        choice = choose_measured(
            OP,
            choice_key(OP, sizes, settings.compute_dtype, device),
            [BUILTIN, FUSED],
            lambda: measure_layer(shape, settings, device, blocks[0].attn.core),
            folder=folder,
        )
    use_fused = torch.tensor([float(choice is not None and choice.variant == FUSED)], device=device)
    if world > 1:
        dist.broadcast(use_fused, 0)
    fuse_layers(blocks, fused=bool(use_fused.item()))
    return choice


def fuse_layers(blocks: Sequence[nn.Module], *, fused: bool) -> None:
    """Set blocks to run by the fused operators, or by separate ones."""
    for block in blocks:
        assert isinstance(block, Block)
        block.fused = fused_layer if fused else None


def measure_layer(shape: ModelShape, settings: Settings, device: torch.device, core: Core) -> dict[str, Timing]:
    """Time a layer's forward and backward in both forms, in turn.

    The time is infinite for a form that runs out of memory.
    """
    calls = {}
    for name in (BUILTIN, FUSED):
        with contextlib.suppress(torch.OutOfMemoryError):
            calls[name] = layer_call(shape, settings, device, core=core, fused=name == FUSED)
    return {BUILTIN: Timing(median_ms=math.inf)} | time_layers(calls, device)


def choose_float8_head(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> KernelChoice | None:
    """Let the head compute in fp8 if the job allows it and it is faster; every rank calls this, and rank 0 chooses.

    Returns None if there is nothing to choose: not allowed, no GPU, all logits held, or sizes that fp8 products do
    not take.
    """
    decoders = [model for model in models if isinstance(model, Decoder)]
    if not settings.fp8_head or device.type != "cuda" or not decoders:
        return None
    shape = decoders[0].shape
    tokens = settings.layout.micro_batch * settings.sequence // settings.layout.context
    if not settings.chunks_loss(shape, device) or not fits_float8_head(tokens, shape.hidden, shape.vocab):
        return None
    choice = None
    if world == 1 or dist.get_rank() == 0:
        sizes = {"tokens": tokens, "width": shape.hidden, "vocab": shape.vocab}
        choice = choose_measured(
            HEAD_OP,
            choice_key(HEAD_OP, sizes, settings.compute_dtype, device),
            [BUILTIN, FLOAT8],
            lambda: measure_head(tokens, shape, settings.compute_dtype, device),
            folder=folder,
        )
    use_float8 = torch.tensor([float(choice is not None and choice.variant == FLOAT8)], device=device)
    if world > 1:
        dist.broadcast(use_float8, 0)
    for model in decoders:
        if model.head is not None:
            model.head.float8 = bool(use_float8.item())
    return choice


def measure_head(tokens: int, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> dict[str, Timing]:
    """Time head and loss with their gradients, in 16 bit and in fp8, in turn.

    Infinite for a form that runs out of memory.
    """
    timings: dict[str, Timing] = {}
    with torch.random.fork_rng(devices=[device]), contextlib.suppress(torch.OutOfMemoryError):
        hidden = torch.randn(tokens, shape.hidden, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(shape.vocab, shape.hidden, dtype=dtype, device=device) * shape.hidden**-0.5
        weight.requires_grad_()
        targets = torch.randint(0, shape.vocab, (tokens,), device=device)
        calls = {
            name: partial(linear_cross_entropy, hidden, weight, targets, float8=name == FLOAT8)
            for name in (BUILTIN, FLOAT8)
        }
        timings = time_in_turn(calls, device, rounds=ROUNDS, with_host=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return dict.fromkeys((BUILTIN, FLOAT8), Timing(median_ms=math.inf)) | timings
