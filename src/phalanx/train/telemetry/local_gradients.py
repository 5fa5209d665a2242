"""Access to a rank's own gradients before they are summed with those of other ranks, for the noise scale.

Unsharded weights: in the buckets, once a step; with one data rank, micro-batch by micro-batch as gradients arrive.
Sharded weights: in FSDP2's reduce-scatter, which ZeRO 1 calls once a step and ZeRO 2 and 3 once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from phalanx.train.models.decoder import TIED
from phalanx.train.parallel.dims import Meshes
from phalanx.train.parallel.gradients import GradientExchange, squared_norm
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.telemetry.noise import EVERY, NUMBERS, LocalNorms

if TYPE_CHECKING:
    from phalanx.train.model_stages import StageTensor


class NoiseListener:
    """The local gradient norms of a rank, and the parameters they cover."""

    def __init__(self, norms: LocalNorms, heard: Sequence[bool]) -> None:
        self.norms = norms
        # For each trained parameter, whether its gradient comes from this rank's own samples only
        self.heard = heard
        self.hears_all = all(heard)

    def own_numbers(
        self,
        shards: Sequence[TensorShard],
        grads: Sequence[torch.Tensor],
        squared: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        micro: int,
        ignored: int,
        speaks: bool,
    ) -> list[torch.Tensor]:
        """Return this rank's addends of `noise_of_step`.

        `squared` is the rank's part of the gradient's squared norm. Returns nothing if no estimate is made, zeros in
        a step that is not measured. Of the ranks with the same sequences, only the one with the flag set counts them.
        """
        if not self.norms.enabled:
            return []
        if not self.norms.on:
            return [torch.zeros_like(squared)] * NUMBERS
        local, chunks, sequences = self.norms.numbers(targets_BS, micro=micro, ignored=ignored, speaks=speaks)
        if not self.hears_all:
            own_pairs = [(shard, grad) for shard, grad, is_own in zip(shards, grads, self.heard, strict=True) if is_own]
            squared = squared_norm([shard for shard, _ in own_pairs], [grad for _, grad in own_pairs]).to(
                squared.device
            )
        return [local, squared, chunks, sequences]


def listen_for_noise(
    trained: Sequence[StageTensor], meshes: Meshes, exchange: GradientExchange | None, models: Iterable[torch.nn.Module]
) -> NoiseListener | None:
    """Install the measurement of local gradients; None if no chunk of the batch has a separate gradient.

    Context ranks hold parts of the same sequences, so their differences are not the noise of a sequence. Excluded are
    experts that other ranks send tokens to, and the two copies of a tied table at the ends of a pipeline: their
    gradients are mixed before they can be measured. The noise scale is then that of all other weights.
    """
    if meshes.dims.context > 1:
        return None
    is_own_gradient = [_is_own(stage_tensor, meshes) for stage_tensor in trained]
    tensor_groups = {id(mesh.get_group("tensor")) for mesh in (meshes.dense, meshes.work)}
    first = meshes.index("tensor") == 0
    counted_tensors = [
        stage_tensor.tensor
        for stage_tensor, is_own in zip(trained, is_own_gradient, strict=True)
        if is_own and (first or tensor_groups & {id(cut.group) for cut in stage_tensor.box.cuts})
    ]
    norms = LocalNorms(frozenset(id(param) for param in counted_tensors))
    if exchange is not None and exchange.listen(norms, each=meshes.dims.data == 1):
        norms.every = EVERY
    if meshes.dims.zero > 1 and meshes.dims.pipeline == 1:
        norms.every = EVERY
    for group, module in _sharded_groups(models):
        inner = getattr(group, "_reduce_scatter_comm", None) or DefaultReduceScatter()
        module.set_custom_reduce_scatter(MeasuredReduceScatter(inner, module, norms))  # type: ignore[arg-type]
    return NoiseListener(norms, is_own_gradient)


def _is_own(held: StageTensor, meshes: Meshes) -> bool:
    if held.name == TIED[0] and held.replicas > meshes.dims.stage // held.box.parts:
        return False
    experts = meshes.experts
    return experts is None or all(cut.group is not experts.get_group("expert") for cut in held.box.cuts)


class MeasuredReduceScatter:
    """FSDP2's reduce-scatter of one module, with a measurement of its input."""

    def __init__(self, inner: Any, module: FSDPModule, norms: LocalNorms) -> None:
        self._inner, self._module, self._norms = inner, module, norms

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate as the wrapped reduce-scatter does."""
        buffer: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Measure the input, and run the wrapped reduce-scatter unchanged."""
        self._norms.hear(self, self._counted_parts(input_tensor, group.size()))
        return self._inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )

    def _counted_parts(self, flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Return the columns of counted parameters.

        The buffer has a row per rank, with a zero-padded part of each parameter.
        """
        fsdp_params = (param for group in _groups_of(self._module) for param in group.fsdp_params)
        # Frozen ones are not reduced
        params = [param for param in fsdp_params if param.sharded_param.requires_grad]
        counts = [self._norms.counts(param.sharded_param) for param in params]
        if all(counts):
            return [flat]
        columns = flat.view(ranks, -1).split([param.padded_sharded_param_size.numel() for param in params], dim=1)
        return [column for column, is_counted in zip(columns, counts, strict=True) if is_counted]


def fsdp_groups(models: Iterable[torch.nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups: what it gathers and reduces together."""
    return [group for group, _ in _sharded_groups(models)]


def _sharded_groups(models: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, FSDPModule]]:
    """Yield each parameter group once, with a module it belongs to: several modules may share one."""
    seen_ids: set[int] = set()
    for model in models:
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in _groups_of(module):
                if id(group) not in seen_ids:
                    seen_ids.add(id(group))
                    yield group, module


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11
    return list(groups)
