"""Adafactor (Shazeer & Stern 2018): keeps only row and column means of a matrix's second moment.

Without momentum (beta1 = 0) and without relative steps: the learning rate is the job's. Means are over the full
tensor, summed over the ranks that hold its parts, so the update does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed import ProcessGroup

from phalanx.plan.parametrization import ParameterScales, standard_scales
from phalanx.train.optim.base import shard_gradient, total_bytes
from phalanx.train.optim.compact import apply_update
from phalanx.train.optim.gathered_tensors import sum_over
from phalanx.train.optim.moments import working_dtype
from phalanx.train.parallel.tensor_shard import TensorShard

# beta2 of step t is 1 - t^-0.8, at most the job's: section 7.2 of the paper
GROWTH = 0.8
TINY = 1e-30  # added to squared gradients: epsilon 1 of the paper
# Updates are scaled down to this root mean square: d of the paper's section 6
LARGEST_RMS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """The second moment of a shard: `row` and `column` means of a matrix, or all of a vector's in `row`."""

    row: torch.Tensor
    column: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors held in memory."""
        return [self.row] if self.column is None else [self.row, self.column]


class Adafactor:
    """Adafactor over shards; the last two dimensions are a matrix, those before them a batch of matrices (experts)."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        *,
        beta2: float,
        weight_decay: float,
        decays: Callable[[str], bool],
        scales: ParameterScales = standard_scales,
    ) -> None:
        self.steps = 0
        self._shards = list(shards)
        self._beta2 = beta2
        self._scales = [scales(shard.name, len(shard.shape)) for shard in shards]
        self._decay = [
            weight_decay * scale.weight_decay if decays(shard.name) else 0.0
            for shard, scale in zip(shards, self._scales, strict=True)
        ]
        self._factors = [_empty_factors(shard) for shard in shards]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update means, compute the clipping factor, then update weights: three passes, one message per group each."""
        self.steps += 1
        decay = min(1.0 - self.steps**-GROWTH, self._beta2)
        self._take_means(decay)
        scales = self._row_scales()
        squares = [
            self._shard_update(shard, shard_factors, scale).square().sum()
            for shard, shard_factors, scale in self._shards_with_scales(scales)
        ]
        groups = [tuple(group for dim in sorted(shard.groups) for group in shard.groups[dim]) for shard in self._shards]
        totals = _sum_each(squares, groups)
        for i, (shard, factors, scale) in enumerate(self._shards_with_scales(scales)):
            rms = (totals[i] / max(1, shard.numel)).sqrt()
            update = self._shard_update(shard, factors, scale) / torch.clamp(rms / LARGEST_RMS, min=1.0)
            rate = lr * self._scales[i].lr
            apply_update(shard, update, lr=rate, weight_decay=self._decay[i], step=self.steps)

    def _take_means(self, keep: float) -> None:
        """Move the means towards this step's squared gradients."""
        means = [
            (shard, shard_factors, shard_factors.column)
            for shard, shard_factors in zip(self._shards, self._factors, strict=True)
        ]
        rows = [
            _squared_gradient(shard) if column is None else _squared_gradient(shard).sum(-1)
            for shard, _, column in means
        ]
        rows = _sum_each(rows, [() if column is None else _groups_along(shard, -1) for shard, _, column in means])
        matrices = [(shard, column) for shard, _, column in means if column is not None]
        columns = _sum_each(
            [_squared_gradient(shard).sum(-2) for shard, _ in matrices],
            [_groups_along(shard, -2) for shard, _ in matrices],
        )
        for (shard, factors, column), row in zip(means, rows, strict=True):
            factors.row.lerp_(row if column is None else row / shard.shape[-1], 1.0 - keep)
        for (shard, column), total in zip(matrices, columns, strict=True):
            column.lerp_(total / shard.shape[-2], 1.0 - keep)

    def _row_scales(self) -> list[torch.Tensor]:
        """Return the mean of each matrix's row means, over all its rows; ones for a vector."""
        sums = [
            factors.row.sum(-1, keepdim=True) if factors.column is not None else torch.ones_like(factors.row)
            for factors in self._factors
        ]
        groups = [
            _groups_along(shard, -2) if factors.column is not None else ()
            for shard, factors in self._shards_with_factors()
        ]
        totals = _sum_each(sums, groups)
        return [
            total / shard.shape[-2] if factors.column is not None else total
            for total, (shard, factors) in zip(totals, self._shards_with_factors(), strict=True)
        ]

    def _shard_update(self, shard: TensorShard, factors: Factors, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient over the root of the second moment, which is row × column / mean of the rows."""
        grad = shard_gradient(shard).to(factors.row.dtype)
        if factors.column is None:
            return grad * factors.row.rsqrt()
        return grad * (factors.row / scale).rsqrt().unsqueeze(-1) * factors.column.rsqrt().unsqueeze(-2)

    def _shards_with_factors(self) -> list[tuple[TensorShard, Factors]]:
        return list(zip(self._shards, self._factors, strict=True))

    def _shards_with_scales(self, scales: Sequence[torch.Tensor]) -> list[tuple[TensorShard, Factors, torch.Tensor]]:
        return list(zip(self._shards, self._factors, scales, strict=True))

    def state(self) -> list[TensorShard]:
        """Return the live means. A row mean is equal on all ranks that split the columns: more replicas, one owner."""
        state_shards = []
        for shard, factors in self._shards_with_factors():
            if factors.column is None:
                state_shards.append(replace(shard, name=f"{shard.name}#exp_avg_sq", tensor=factors.row))
            else:
                state_shards.append(_without_dim(shard, -1, "row", factors.row))
                state_shards.append(_without_dim(shard, -2, "column", factors.column))
        return state_shards

    def stored(self) -> list[TensorShard]:
        """Return `state()`: the means are stored as they are."""
        return self.state()

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Copy the means from `state`."""
        for shard in self.state():
            shard.tensor.copy_(state[shard.name])
        self.steps = steps

    def state_bytes(self) -> int:
        """Return the bytes of the means: 4 · (rows + columns) per matrix."""
        return total_bytes([tensor for factors in self._factors for tensor in factors.tensors()])


def _empty_factors(shard: TensorShard) -> Factors:
    shape, dtype = shard.tensor.shape, working_dtype(shard.tensor.dtype)
    if len(shape) < 2:
        return Factors(row=torch.zeros(shape, dtype=dtype, device=shard.tensor.device), column=None)
    row = torch.zeros(shape[:-1], dtype=dtype, device=shard.tensor.device)
    return Factors(row=row, column=row.new_zeros(*shape[:-2], shape[-1]))


def _squared_gradient(shard: TensorShard) -> torch.Tensor:
    return shard_gradient(shard).to(working_dtype(shard.tensor.dtype)).square().add_(TINY)


def _groups_along(shard: TensorShard, dim: int) -> tuple[ProcessGroup, ...]:
    return shard.groups.get(dim % len(shard.shape), ())


def _sum_each(tensors: Sequence[torch.Tensor], groups: Sequence[tuple[ProcessGroup, ...]]) -> list[torch.Tensor]:
    """Sum each tensor over its own groups; tensors with the same groups share a message."""
    members: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for i, chain in enumerate(groups):
        members.setdefault(chain, []).append(i)
    sums = list(tensors)
    for chain, indices in members.items():
        for i, total in zip(indices, sum_over(chain, [tensors[i] for i in indices]), strict=True):
            sums[i] = total
    return sums


def _without_dim(shard: TensorShard, dim: int, name: str, tensor: torch.Tensor) -> TensorShard:
    """Return the shard of a state tensor that lacks dimension `dim` of its parameter."""
    dim %= len(shard.shape)
    removed_groups = shard.groups.get(dim, ())
    replicas = shard.replicas
    for group in removed_groups:
        replicas *= group.size()
    return TensorShard(
        name=f"{shard.name}#{name}",
        tensor=tensor,
        shape=(*shard.shape[:dim], *shard.shape[dim + 1 :]),
        start=(*shard.start[:dim], *shard.start[dim + 1 :]),
        replicas=replicas,
        owner=shard.owner and all(group.rank() == 0 for group in removed_groups),
        groups={
            other_dim - (other_dim > dim): groups for other_dim, groups in shard.groups.items() if other_dim != dim
        },
    )
