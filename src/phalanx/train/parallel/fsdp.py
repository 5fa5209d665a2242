"""ZeRO 1 to 3 and HSDP with FSDP2: one mechanism, three settings."""

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
    """What one ZeRO stage means to FSDP2.

    Stage 1 gathers the weights once a step and reduces gradients once; stage 2 reduces after every micro-batch, so that
    only a shard of the gradients is kept; stage 3 also frees each block's weights after its forward.
    """

    free_after_forward: bool
    reduce_every_micro_batch: bool


ZERO = {
    1: ZeroStage(free_after_forward=False, reduce_every_micro_batch=False),
    2: ZeroStage(free_after_forward=False, reduce_every_micro_batch=True),
    3: ZeroStage(free_after_forward=True, reduce_every_micro_batch=True),
}


# The head, and what the root is left with (a tied table), is used last in forward and first in backward: freeing it in
# between buys nothing.
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
    """Shard every block, then what is left; `mesh` has the axes copies and shard (HSDP when both are above one)."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    pinned = mesh.device_type == "cuda"  # there is nothing to pin for on a CPU
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
        # Our loss is already divided by the tokens of the whole batch, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _only_looks_up(module: torch.nn.Module) -> bool:
    """Whether backward needs the shape of every weight and the value of none, so that gathering again is for nothing.

    For Llama 3 8B on 8 ranks that gather was 0.92 GB a micro-batch of ZeRO-3 (docs/trace.md).
    """
    return all(
        isinstance(one, torch.nn.Embedding)
        for one in module.modules()
        if next(one.parameters(recurse=False), None) is not None
    )


def _expert_placement(param: torch.nn.Parameter, sharers: int) -> Shard | None:
    """By expert where there are enough of them, else by width: one expert is not to lie on one rank of several."""
    by_width = param.shape[0] % sharers and param.shape[1] % sharers == 0
    return Shard(1) if by_width else None


def cast_inputs(blocks: Iterable[torch.nn.Module], dtype: torch.dtype) -> None:
    """Let every block have its floating-point inputs in `dtype`, as FSDP2 does for the modules it shards.

    A network of the user's own may add a float32 table to its stream: the next block's weights are in fewer bits.
    """

    def cast(one: Any) -> Any:
        return one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    for block in blocks:
        block.register_forward_pre_hook(before, with_kwargs=True)


def sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """Every module with parameters of its own to gather."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(model: FSDPModule, *, zero: int, last: bool) -> None:
    """Say before each backward whether it is the last of the step."""
    stage = ZERO[zero]
    model.set_requires_gradient_sync(last or stage.reduce_every_micro_batch)
    model.set_requires_all_reduce(last)  # HSDP: the copies of a shard need to agree once a step
    # Stages 1 and 2 keep the gathered weights until the step's last backward.
    model.set_reshard_after_backward(last or stage.free_after_forward)
    # For FSDP2 every backward is the last: told otherwise it keeps the order of earlier forwards, and the embedding's
    # backward prefetches the head again, 1 GB a step of Llama 3 8B that nobody uses (docs/trace.md).
    model.set_is_last_backward(True)


def _flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP2 reads a 1-D mesh as sharding and a 2-D one as HSDP: drop the copies axis when there is one copy."""
    return mesh["shard"] if mesh["copies"].size() == 1 else mesh
