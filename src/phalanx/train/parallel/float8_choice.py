"""Which way a layer runs in fp8, by measurement: each matrix apart, or norms and activation fused with them.

And whether the output head does too, where the job allows it.

One layer of the job's shape is compiled and timed both ways, forward and backward, host included: small layers are
limited by how fast work is issued. The faster is remembered in the user's cache, and its compiled code in torch's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from phalanx.job.model import ModelShape
from phalanx.plan.trainable import splits_backward
from phalanx.train.kernels.float8_head import fits_float8_head
from phalanx.train.kernels.linear_cross_entropy import linear_cross_entropy
from phalanx.train.kernels.selector import BUILTIN, KernelChoice, choice_key, choose_measured
from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.models.layers import rope_tables
from phalanx.train.parallel.float8 import use_float8
from phalanx.train.parallel.float8_layer import can_fuse, fused_layer
from phalanx.train.rank_settings import Settings

OP, FUSED = "fp8-layer", "fused"
HEAD_OP, FLOAT8 = "fp8-head", "fp8"
ROUNDS = 8


def choose_float8_layers(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> KernelChoice | None:
    """Measure, or remember, and let the blocks take it; every rank calls this, and all take what rank 0 chose.

    None where there is nothing to choose: no fp8, no GPU, or a layer that the fused operators do not compute.
    """
    layout = settings.layout
    if settings.compute != "fp8" or device.type != "cuda" or splits_backward(layout) or layout.offload == "activations":
        return None
    decoders = [one for one in models if isinstance(one, Decoder)]
    tokens = layout.micro_batch * settings.sequence // layout.context
    blocks = [block for one in decoders for block in one.layers.values() if can_fuse(block, tokens)]
    able = torch.tensor([float(bool(blocks))], device=device)
    if world > 1:
        dist.all_reduce(able, op=dist.ReduceOp.MIN)
    if not able.item():
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
            lambda: measure_layer(shape, settings, device),
            folder=folder,
        )
    takes = torch.tensor([float(choice is not None and choice.variant == FUSED)], device=device)
    if world > 1:
        dist.broadcast(takes, 0)
    fuse_layers(blocks, fused=bool(takes.item()))
    return choice


def fuse_layers(blocks: Sequence[nn.Module], *, fused: bool) -> None:
    """Let blocks run by the fused operators, or apart."""
    for block in blocks:
        assert isinstance(block, Block)
        block.fused = fused_layer if fused else None


def measure_layer(shape: ModelShape, settings: Settings, device: torch.device) -> dict[str, float]:
    """Milliseconds of a layer's forward and backward each way; none that does not fit beside what is there."""
    times: dict[str, float] = {BUILTIN: math.inf}
    for name in (BUILTIN, FUSED):
        # A run that measured draws the same numbers afterwards as one that remembered.
        with torch.random.fork_rng(devices=[device]), contextlib.suppress(torch.OutOfMemoryError):
            times[name] = _time_layer(shape, settings, device, fused=name == FUSED)
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # what was measured is no part of a step
    return times


def _time_layer(shape: ModelShape, settings: Settings, device: torch.device, *, fused: bool) -> float:
    layout, dtype = settings.layout, settings.compute_dtype
    sequence = settings.sequence // layout.context
    with device:
        block = Block(shape, 0).to(dtype)
        use_float8([block])
        fuse_layers([block], fused=fused)
        rope = rope_tables(shape, torch.arange(sequence), dtype) if shape.positions == "rope" else None
        x_BSD = torch.randn(layout.micro_batch, sequence, shape.hidden, dtype=dtype, requires_grad=True)
        grad_BSD = torch.randn_like(x_BSD)
    if settings.compile:
        block.compile(backend=settings.compile_backend)
    found = []
    for _ in range(3 + ROUNDS):
        block.zero_grad()
        x_BSD.grad = None
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        # Two layers' worth: the host may run ahead, as it does in a step.
        for _ in range(2):
            block(x_BSD, rope).backward(grad_BSD)
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - began_s) / 2 * 1e3)
    return sorted(found[3:])[ROUNDS // 2]


def choose_float8_head(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> KernelChoice | None:
    """Let the head compute in fp8 if the job allows it and it is faster; every rank calls this, and rank 0 chooses.

    None where there is nothing to choose: not allowed, no GPU, all logits held, or sizes that fp8 products do not take.
    """
    decoders = [one for one in models if isinstance(one, Decoder)]
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
    takes = torch.tensor([float(choice is not None and choice.variant == FLOAT8)], device=device)
    if world > 1:
        dist.broadcast(takes, 0)
    for model in decoders:
        if model.head is not None:
            model.head.float8 = bool(takes.item())
    return choice


def measure_head(tokens: int, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Milliseconds of head and loss with their gradients, in 16 bit and in fp8; inf where it does not fit."""
    times = {BUILTIN: math.inf, FLOAT8: math.inf}
    with torch.random.fork_rng(devices=[device]), contextlib.suppress(torch.OutOfMemoryError):
        hidden = torch.randn(tokens, shape.hidden, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(shape.vocab, shape.hidden, dtype=dtype, device=device) * shape.hidden**-0.5
        weight.requires_grad_()
        targets = torch.randint(0, shape.vocab, (tokens,), device=device)
        for name in times:
            found = []
            for _ in range(2 + ROUNDS):
                torch.cuda.synchronize(device)
                began_s = time.perf_counter()
                linear_cross_entropy(hidden, weight, targets, float8=name == FLOAT8)
                torch.cuda.synchronize(device)
                found.append((time.perf_counter() - began_s) * 1e3)
            times[name] = sorted(found[2:])[ROUNDS // 2]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return times
