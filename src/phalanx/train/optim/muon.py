"""Muon (Jordan et al. 2024): momentum of a weight matrix, made orthogonal by Newton-Schulz iterations.

Only whole matrices can be made orthogonal. Ranks that hold parts of some matrices exchange them so that each rank gets
its share of whole ones, works, and sends the parts back: the work is split, not repeated, over the shard group.
Embeddings, the head and everything that is not a matrix go to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from phalanx.plan.parametrization import ParameterScales, standard_scales
from phalanx.train.optim.base import Optimizer, shard_gradient, state_shard, total_bytes
from phalanx.train.optim.compact import apply_update, copy_kept, kept_shards, load_kept
from phalanx.train.optim.gathered_tensors import GroupSplit, group_splits, spread_work
from phalanx.train.optim.moments import high_bits, moment_format, readable_moment, rounding_bits, working_dtype
from phalanx.train.parallel.tensor_shard import TensorShard

ITERATIONS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al.: steepest at 0, so small singular values rise in few iterations
# Updates of the same root mean square as AdamW's usually have, so that lr and weight decay carry over: section 2.2 of
# Liu et al. 2025, "Muon is scalable for LLM training" (arXiv:2502.16982).
ADAM_RMS = 0.2
NOT_BY_MUON = ("embed.", "head.")  # their rows are looked up or scored one by one: no matrix geometry
OWN = "network."  # names of a network of the user's own begin so


def takes_muon(shard: TensorShard, tables: Collection[str] = ()) -> bool:
    """Whether Muon updates this parameter; a three-dimensional one of ours is a batch of matrices (experts).

    In a network of the user's own, `tables` are its embeddings and head, and three dimensions may be a convolution's.
    """
    if shard.name.startswith(OWN):
        return len(shard.shape) == 2 and shard.name not in tables
    return len(shard.shape) in (2, 3) and not shard.name.startswith(NOT_BY_MUON)


class Muon:
    """One momentum per matrix; `rest` is the optimizer of all other parameters, built over those shards."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        *,
        momentum: float,
        weight_decay: float,
        decays: Callable[[str], bool],
        kind: str,
        rest: Optimizer,
        scales: ParameterScales = standard_scales,
    ) -> None:
        self.steps = 0
        self._shards = list(shards)
        self._rest = rest
        self._keep = momentum
        self._scales = [scales(shard.name, len(shard.shape)) for shard in shards]
        self._decay = [
            weight_decay * scale.weight_decay if decays(shard.name) else 0.0
            for shard, scale in zip(shards, self._scales, strict=True)
        ]
        self._form = moment_format(kind, signed=True)
        self._momentum = [self._form.zeros(shard.tensor.numel(), shard.tensor) for shard in shards]
        self._alike = _similar_shards(self._shards)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every shard; matrices of one shape and split travel together."""
        self.steps += 1
        for members in self._alike:
            updates = spread_work(
                [self._momentum_ahead(i) for i in members], _matrix_cuts(self._shards[members[0]]), orthogonal_matrix
            )
            for i, update in zip(members, updates, strict=True):
                scale = ADAM_RMS * max(self._shards[i].shape[-2:]) ** 0.5
                wide = update.to(working_dtype(self._shards[i].tensor.dtype)) * scale
                rate = lr * self._scales[i].lr
                apply_update(self._shards[i], wide, lr=rate, weight_decay=self._decay[i], step=self.steps)
        self._rest.step(lr)

    def _momentum_ahead(self, i: int) -> torch.Tensor:
        """Take the gradient into the momentum and look one step ahead (Nesterov)."""
        shard = self._shards[i]
        grad = shard_gradient(shard).to(working_dtype(shard.tensor.dtype))
        momentum = self._form.decode(self._momentum[i], grad.dtype).view(grad.shape) * self._keep + grad
        if grad.numel():
            copy_kept(
                self._momentum[i], self._form.encode(momentum.reshape(-1), high_bits(rounding_bits(shard, self.steps)))
            )
        # bf16 on a GPU is enough for the iterations (Jordan et al.); elsewhere it would be slower.
        cheap = torch.bfloat16 if grad.is_cuda and grad.dtype == torch.float32 else grad.dtype
        return grad.add(momentum, alpha=self._keep).to(cheap)

    def state(self) -> list[TensorShard]:
        """The momentum of every matrix, then the state of the rest."""
        own = [
            state_shard(shard, "momentum", readable_moment(self._form, kept, shard.tensor))
            for shard, kept in zip(self._shards, self._momentum, strict=True)
        ]
        return own + self._rest.state()

    def stored(self) -> list[TensorShard]:
        """The momentum as it is kept, then the rest's."""
        pairs = zip(self._shards, self._momentum, strict=True)
        return [one for shard, kept in pairs for one in kept_shards(shard, "momentum", kept)] + self._rest.stored()

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Copy the momentum in, and load the rest."""
        for shard, kept in zip(self._shards, self._momentum, strict=True):
            load_kept(kept, self._form, state[f"{shard.name}#momentum"], shard, steps)
        self._rest.load(state, steps)
        self.steps = steps

    def state_bytes(self) -> int:
        """4 bytes per parameter of a matrix in fp32, and what the rest keeps."""
        return total_bytes([tensor for kept in self._momentum for tensor in kept]) + self._rest.state_bytes()


def orthogonal_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly U Vᵀ of the singular value decomposition: singular values land between about 0.7 and 1.2."""
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    tall = stack.shape[-2] > stack.shape[-1]
    x: torch.Tensor = stack.mT if tall else stack
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)


def _matrix_cuts(shard: TensorShard) -> list[GroupSplit]:
    """Cuts through the matrices; a cut through the batch of matrices leaves them whole."""
    return [cut for cut in group_splits(shard) if cut.dim >= len(shard.shape) - 2]


def _similar_shards(shards: Sequence[TensorShard]) -> list[list[int]]:
    """Positions of shards that can be worked on together."""
    found: dict[object, list[int]] = {}
    for i, shard in enumerate(shards):
        key = (shard.shape, shard.tensor.dtype, tuple(sorted(shard.groups.items(), key=lambda one: one[0])))
        found.setdefault(key, []).append(i)
    return list(found.values())
