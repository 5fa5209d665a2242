"""Bit-identical gradient sums on 1, 2, 4 or 8 data ranks, by summing micro-batches in one fixed binary tree.

A sum of floats depends on its order. Here the leaves are the micro-batches of the global batch, in order; each rank
has a whole subtree, and ranks are joined by recursive doubling, in which both sides add the same two numbers (a + b
is b + a, bit for bit). Costs: a copy of the gradients per level of the rank's own tree, and no overlap with backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from phalanx.errors import mistake
from phalanx.train.parallel.replicate import LocalGradientWatcher, local_gradient, local_tensor


class TreeReplicas:
    """Sums gradients over micro-batches and ranks in an order that does not depend on the number of ranks."""

    def __init__(self, params: Sequence[torch.Tensor], group: ProcessGroup, *, reduce: torch.dtype) -> None:
        self._params, self._group = list(params), group
        sizes = [local_tensor(param).numel() for param in params]
        self._flat = torch.zeros(sum(sizes), dtype=reduce, device=local_tensor(params[0]).device)
        flat_parts = self._flat.split(sizes)
        self._views = {
            id(param): flat_part.view(local_tensor(param).shape)
            for param, flat_part in zip(params, flat_parts, strict=True)
        }
        self._levels: list[tuple[int, torch.Tensor]] = []
        self._ear: LocalGradientWatcher | None = None

    def listen(self, ear: LocalGradientWatcher, *, each: bool) -> bool:
        """Pass every micro-batch's gradients to `ear`, for results that do not depend on the number of ranks."""
        self._ear = ear
        return True

    def begin(self, micro_batches: int) -> None:
        """Prepare a step, before its first backward; raise UserError unless the micro-batches are a power of two."""
        # True unless the number is a power of two.
        if micro_batches & (micro_batches - 1):
            raise mistake(
                "numerics.reproducible",
                f"{micro_batches} micro-batches per data rank are no power of two",
                why="every rank must hold a whole subtree of the sum",
                fix="choose batch.global_sequences, batch.micro and data ranks so that it is 1, 2, 4, 8, …",
            )
        self._levels = []

    def micro_batch_done(self) -> None:
        """Add the micro-batch's gradients to the tree, with carries as in a binary counter."""
        leaf = torch.empty_like(self._flat)
        leaf_parts = leaf.split([view.numel() for view in self._views.values()])
        for leaf_part, param in zip(leaf_parts, self._params, strict=True):
            grad = local_gradient(param)
            leaf_part.zero_() if grad is None else leaf_part.copy_(grad.flatten())
            param.grad = None
        if self._ear is not None:
            ear = self._ear
            ear.hear(
                id(self),
                [leaf_part for leaf_part, param in zip(leaf_parts, self._params, strict=True) if ear.counts(param)],
            )
        level = 0
        while self._levels and self._levels[-1][0] == level:
            leaf = self._levels.pop()[1].add_(leaf)
            level += 1
        self._levels.append((level, leaf))

    def finish(self) -> None:
        """Join the ranks' subtrees."""
        assert len(self._levels) == 1
        total = self._levels.pop()[1]
        rank, ranks = self._group.rank(), self._group.size()
        peer_total = torch.empty_like(total) if ranks > 1 else total
        distance = 1
        while distance < ranks:
            peer = dist.get_global_rank(self._group, rank ^ distance)
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, total, peer, self._group),
                    dist.P2POp(dist.irecv, peer_total, peer, self._group),
                ]
            ):
                work.wait()
            total = total + peer_total
            distance *= 2
        self._flat.copy_(total)

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return the summed gradient of a parameter."""
        return self._views[id(param)]
