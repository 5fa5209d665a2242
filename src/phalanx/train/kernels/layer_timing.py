"""Timing of one layer of a job, compiled as the job compiles it: forward and backward, including time on the host.

Small layers are limited by how fast the host issues work. The compiled code is already in torch's cache when the
model's own layers are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from phalanx.job.model import ModelShape
from phalanx.train.kernels.attention import fastest_attention
from phalanx.train.kernels.selector import Timing, time_in_turn
from phalanx.train.models.decoder import Block
from phalanx.train.models.layers import Core, Mlp, rope_tables
from phalanx.train.parallel.float8 import use_float8
from phalanx.train.parallel.float8_layer import fused_layer
from phalanx.train.rank_settings import Settings

ROUNDS = 8
LAYERS_A_CALL = 2  # so that the host can issue work ahead of the device, as it does in a step


def layer_call(
    shape: ModelShape, settings: Settings, device: torch.device, *, core: Core, fused: bool = False
) -> Callable[[], object]:
    """Return a call that runs a new layer forward and backward, with the attention kernel of the job's layers."""
    layout, dtype = settings.layout, settings.compute_dtype
    sequence = settings.sequence // layout.context
    # A run that measures must draw the same random numbers afterwards as a run that uses the cache.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        block = Block(shape, 0).to(dtype)
        block.attn.core = core
        if settings.compute == "fp8":
            use_float8([block])
            block.fused = fused_layer if fused else None
        elif settings.drops_product(shape, device):
            assert isinstance(block.mlp, Mlp)
            block.mlp.drops_product = True
        rope = rope_tables(shape, torch.arange(sequence), dtype) if shape.positions == "rope" else None
        x_BSD = torch.randn(layout.micro_batch, sequence, shape.hidden, dtype=dtype, requires_grad=True)
        grad_BSD = torch.randn_like(x_BSD)
    if settings.compile:
        block.compile(backend=settings.compile_backend)

    def call() -> None:
        block.zero_grad()
        x_BSD.grad = None
        with fastest_attention(device):
            for _ in range(LAYERS_A_CALL):
                block(x_BSD, rope).backward(grad_BSD)

    return call


def time_layers(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, Timing]:
    """Time the calls of `layer_call` in turn and return the time of one layer each."""
    timings = time_in_turn(calls, device, rounds=ROUNDS, limit_s=10.0, with_host=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the measurement is not part of a step
    return {
        name: Timing(median_ms=timing.median_ms / LAYERS_A_CALL, spread_ms=timing.spread_ms / LAYERS_A_CALL)
        for name, timing in timings.items()
    }
