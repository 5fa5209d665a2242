"""The order in which a stage is split: experts, tensors, context, recompute, compile, parameters."""

from __future__ import annotations

import torch

from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.models.layers import Mlp
from phalanx.train.parallel.context import context_core, local_positions
from phalanx.train.parallel.dims import Meshes
from phalanx.train.parallel.expert import split_experts
from phalanx.train.parallel.float8 import refuse_without_float8, use_float8
from phalanx.train.parallel.fsdp import cast_inputs, shard_params
from phalanx.train.parallel.recompute import offload_activations, recompute_blocks
from phalanx.train.parallel.tensor import split_tensors
from phalanx.train.rank_settings import Settings


def parallelize(model: Decoder, meshes: Meshes, settings: Settings, device: torch.device) -> None:
    """Split one stage, which has no storage yet, over the ranks of its stage."""
    layout, dims = settings.layout, meshes.dims
    model.positions = local_positions(settings.sequence, meshes.index("context"), dims.context)
    split_experts(model, meshes, sequence_parallel=layout.sequence_parallel and dims.tensor > 1)
    if dims.tensor > 1:
        split_tensors(
            model, meshes.dense["tensor"], sequence=layout.sequence_parallel, loss_parallel=settings.loss_parallel
        )
    if dims.context > 1:
        core = context_core(settings.context_kind, meshes.group("context"))
        for block in model.layers.values():
            assert isinstance(block, Block)
            block.attn.core = core
    blocks = list(model.layers.values())
    recomputed = blocks[: settings.recompute_layers] if layout.recompute != "none" else []
    if settings.compute == "fp8":
        refuse_without_float8(device)
        use_float8(blocks, recomputed=len(recomputed))
    if settings.drops_product(model.shape, device):
        for block in blocks:
            assert isinstance(block, Block)
            assert isinstance(block.mlp, Mlp)
            block.mlp.drops_product = True
    recompute_blocks(recomputed, layout.recompute)
    if layout.offload == "activations":
        offload_activations(blocks)
    if settings.compile:
        for block in blocks:
            block.compile(backend=settings.compile_backend)
    if dims.zero:
        shard_params(
            model,
            meshes.dense["copies", "shard"],
            meshes.experts["copies", "shard"] if meshes.experts is not None else None,
            # In a pipeline ZeRO 3 would gather each block twice per micro-batch: it keeps gathered weights for the
            # step instead, as the planner assumes (and torchtitan does).
            zero=min(dims.zero, 2) if dims.pipeline > 1 else dims.zero,
            compute=settings.compute_dtype,
            reduce=settings.reduce_dtype,
            offload=layout.offload == "parameters",
        )
    elif model.shape.module and settings.compute_dtype not in (torch.float32, torch.float64):
        cast_inputs(model.layers.values(), settings.compute_dtype)
