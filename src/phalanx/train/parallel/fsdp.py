"""ZeRO stages 1 to 3 and HSDP, all by FSDP2's `fully_shard` with different settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

from phalanx.train.models.decoder import Decoder
from phalanx.train.models.moe import Moe


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroStage:
    """The FSDP2 settings of one ZeRO stage.

    Stage 1 gathers the weights once a step and reduces gradients once; stage 2 reduces after every micro-batch, so
    that only a shard of the gradients is held; stage 3 also frees each block's weights after its forward.
    """

    free_after_forward: bool
    reduce_every_micro_batch: bool


ZERO = {
    1: ZeroStage(free_after_forward=False, reduce_every_micro_batch=False),
    2: ZeroStage(free_after_forward=False, reduce_every_micro_batch=True),
    3: ZeroStage(free_after_forward=True, reduce_every_micro_batch=True),
}


# The head, and the parameters that remain in the root (a tied table), are used last in forward and first in
# backward: freeing them in between saves nothing.
KEPT = {"reshard_after_forward": False}


def shard_params(
    model: Decoder,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    *,
    zero: int,
    compute: torch.dtype,
    reduce: torch.dtype,
    offload: bool,
) -> None:
    """Shard every block, then the other parameters; `mesh` has the axes copies and shard (HSDP when both exceed 1)."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    # Pinned memory serves transfers to a GPU only
    pinned = mesh.device_type == "cuda"
    host: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    settings: dict[str, Any] = {
        "mp_policy": policy,
        "reshard_after_forward": ZERO[zero].free_after_forward,
        "offload_policy": host,
    }
    for block in model.layers.values():
        if expert_mesh is not None and isinstance(block.mlp, Moe):
            sharers = expert_mesh["shard"].size()
            fully_shard(
                block.mlp.experts,
                mesh=_flat_mesh(expert_mesh),
                shard_placement_fn=partial(_expert_placement, sharers=sharers),
                **settings,
            )
        fully_shard(block, mesh=_flat_mesh(mesh), **settings)
    tied = model.embed is not None and model.head is not None and model.head.weight is model.embed.tokens.weight
    if not tied:
        if model.embed is not None:
            embed = fully_shard(model.embed, mesh=_flat_mesh(mesh), **settings)
            if _only_looks_up(model.embed):
                embed.set_unshard_in_backward(False)
        if model.head is not None:
            assert model.norm is not None
            fully_shard([model.norm, model.head], mesh=_flat_mesh(mesh), **(settings | KEPT))
    fully_shard(model, mesh=_flat_mesh(mesh), **(settings | KEPT))
    for module in sharded_modules(model):
        # The loss is already divided by the tokens of the whole batch, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _only_looks_up(module: torch.nn.Module) -> bool:
    """Return whether the module has only embeddings, whose values backward does not need.

    Gathering such weights again would be useless: for Llama 3 8B on 8 ranks it moved 0.92 GB per micro-batch of
    ZeRO-3 (docs/trace.md).
    """
    return all(
        isinstance(submodule, torch.nn.Embedding)
        for submodule in module.modules()
        if next(submodule.parameters(recurse=False), None) is not None
    )


def _expert_placement(param: torch.nn.Parameter, sharers: int) -> Shard | None:
    """Shard by expert; or by width if the ranks do not divide the experts but divide the width."""
    by_width = param.shape[0] % sharers and param.shape[1] % sharers == 0
    return Shard(1) if by_width else None


def cast_inputs(blocks: Iterable[torch.nn.Module], dtype: torch.dtype) -> None:
    """Cast the floating-point inputs of every block to `dtype`, as FSDP2 does for the modules it shards.

    A user's own network may add a float32 table to its activations, while the next block's weights have fewer bits.
    """

    def cast(one: Any) -> Any:
        return one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    for block in blocks:
        block.register_forward_pre_hook(before, with_kwargs=True)


def sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """Return every module that FSDP2 gathers as one unit."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(model: FSDPModule, *, zero: int, last: bool) -> None:
    """Configure FSDP2 before each backward; `last` marks the last one of the step."""
    stage = ZERO[zero]
    model.set_requires_gradient_sync(last or stage.reduce_every_micro_batch)
    # HSDP: the copies of a shard are summed once a step
    model.set_requires_all_reduce(last)
    # Stages 1 and 2 keep the gathered weights until the step's last backward.
    model.set_reshard_after_backward(last or stage.free_after_forward)
    # Every backward counts as the last for FSDP2: otherwise it keeps the order of earlier forwards, and the
    # embedding's backward prefetches the head again, 1 GB per step of Llama 3 8B that is never used
    # (docs/trace.md).
    model.set_is_last_backward(True)


def _flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Drop the copies axis if there is one copy: FSDP2 reads a 1-D mesh as sharding and a 2-D mesh as HSDP."""
    return mesh["shard"] if mesh["copies"].size() == 1 else mesh
