"""Muon (Jordan et al. 2024): momentum of a weight matrix, orthogonalised by Newton-Schulz iterations.

Only full matrices can be orthogonalised. Ranks that hold parts of some matrices exchange them so that each rank gets
its share of full ones, works, and sends the parts back: the work is split, not repeated, over the shard group.
Embeddings, the head and everything that is not a matrix are updated by AdamW.
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
# Jordan et al.: steepest at 0, so small singular values rise in few iterations
QUINTIC = (3.4445, -4.7750, 2.0315)
# Updates with the root mean square that AdamW's usually have, so that lr and weight decay carry over: section 2.2
# of Liu et al. 2025, "Muon is scalable for LLM training" (arXiv:2502.16982).
ADAM_RMS = 0.2
# Their rows are looked up or scored separately, which has no matrix geometry
NOT_BY_MUON = ("embed.", "head.")
OWN = "network."  # prefix of the names of a user's own network


def takes_muon(shard: TensorShard, tables: Collection[str] = ()) -> bool:
    """Return whether Muon updates this parameter.

    A three-dimensional one of the decoder is a batch of matrices (experts). In a user's own network, `tables` are its
    embeddings and head, and three dimensions may be a convolution's.
    """
    if shard.name.startswith(OWN):
        return len(shard.shape) == 2 and shard.name not in tables
    return len(shard.shape) in (2, 3) and not shard.name.startswith(NOT_BY_MUON)


class Muon:
    """Muon with one momentum per matrix; `rest` is the optimizer of all other parameters, built over their shards."""

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
        """Update every shard; matrices of one shape and split share messages."""
        self.steps += 1
        for members in self._alike:
            updates = spread_work(
                [self._momentum_ahead(i) for i in members], _matrix_cuts(self._shards[members[0]]), orthogonal_matrix
            )
            for i, update in zip(members, updates, strict=True):
                scale = ADAM_RMS * max(self._shards[i].shape[-2:]) ** 0.5
                scaled_update = update.to(working_dtype(self._shards[i].tensor.dtype)) * scale
                rate = lr * self._scales[i].lr
                apply_update(self._shards[i], scaled_update, lr=rate, weight_decay=self._decay[i], step=self.steps)
        self._rest.step(lr)

    def _momentum_ahead(self, i: int) -> torch.Tensor:
        """Add the gradient to the momentum and return the Nesterov look-ahead."""
        shard = self._shards[i]
        grad = shard_gradient(shard).to(working_dtype(shard.tensor.dtype))
        momentum = self._form.decode(self._momentum[i], grad.dtype).view(grad.shape) * self._keep + grad
        if grad.numel():
            copy_kept(
                self._momentum[i], self._form.encode(momentum.reshape(-1), high_bits(rounding_bits(shard, self.steps)))
            )
        # bf16 on a GPU is enough for the iterations (Jordan et al.); elsewhere it would be slower.
        iteration_dtype = torch.bfloat16 if grad.is_cuda and grad.dtype == torch.float32 else grad.dtype
        return grad.add(momentum, alpha=self._keep).to(iteration_dtype)

    def state(self) -> list[TensorShard]:
        """Return the momentum of every matrix, then the state of the other parameters' optimizer."""
        momenta = [
            state_shard(shard, "momentum", readable_moment(self._form, momentum, shard.tensor))
            for shard, momentum in zip(self._shards, self._momentum, strict=True)
        ]
        return momenta + self._rest.state()

    def stored(self) -> list[TensorShard]:
        """Return the momentum as stored, then the stored state of the other parameters' optimizer."""
        pairs = zip(self._shards, self._momentum, strict=True)
        return [
            momentum_shard for shard, momentum in pairs for momentum_shard in kept_shards(shard, "momentum", momentum)
        ] + self._rest.stored()

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Load the momentum, and the state of the other parameters' optimizer."""
        for shard, momentum in zip(self._shards, self._momentum, strict=True):
            load_kept(momentum, self._form, state[f"{shard.name}#momentum"], shard, steps)
        self._rest.load(state, steps)
        self.steps = steps

    def state_bytes(self) -> int:
        """Return the bytes of the momentum, 4 per matrix parameter in fp32, plus those of the other optimizer."""
        return total_bytes([tensor for momentum in self._momentum for tensor in momentum]) + self._rest.state_bytes()


def orthogonal_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Return roughly U Vᵀ of the singular value decomposition: singular values end between about 0.7 and 1.2."""
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    # The Gram matrix of the shorter side is smaller.
    tall = stack.shape[-2] > stack.shape[-1]
    x: torch.Tensor = stack.mT if tall else stack
    # The Frobenius norm bounds the largest singular value, which the iteration needs below 1.
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)


def _matrix_cuts(shard: TensorShard) -> list[GroupSplit]:
    """Return the splits inside the matrices; a split of the batch dimension leaves matrices complete."""
    return [cut for cut in group_splits(shard) if cut.dim >= len(shard.shape) - 2]


def _similar_shards(shards: Sequence[TensorShard]) -> list[list[int]]:
    """Group the indices of shards that can be processed together."""
    groups: dict[object, list[int]] = {}
    for i, shard in enumerate(shards):
        key = (shard.shape, shard.tensor.dtype, tuple(sorted(shard.groups.items(), key=lambda item: item[0])))
        groups.setdefault(key, []).append(i)
    return list(groups.values())
