"""Between model replicas: the one group that a lost replica breaks, and that is made anew without it or with it again.

Each replica is a torch world of its own, so that its groups know nothing of other replicas and outlive them. The ranks
that hold the same shard in each replica sum their gradients here, after backward. The group is no torch.distributed
group: it is made, lost and made again while those of the replica stay.

A loss may reach one rank of a replica and not another, and their own collectives must stay in step. So nothing here
raises in the middle of a step: a sum that failed says so, all ranks of the replica hear of it with the step's numbers,
and none of them learns from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from phalanx.plan.model_replicas import ModelReplicas

BUCKET_BYTES = 25 * 2**20


class ReplicaLost(Exception):
    """The step came to nothing, because a replica was lost in it: every rank of this replica gets this alike."""


class AcrossReplicas:
    """This rank's place among the replicas, and the group of those that are present."""

    def __init__(self, replicas: ModelReplicas, rank: int) -> None:
        self.replicas, self.rank = replicas, rank
        self.replica, self.position = replicas.place(rank)
        self.present: tuple[int, ...] = tuple(range(replicas.count))
        self._group: Any = None  # a ProcessGroupGloo, whose collectives torch's types leave out
        self._is_broken = True  # before the first group is made

    @property
    def is_lead(self) -> bool:
        """Whether this replica does what one must do for all: write checkpoints, tidy up."""
        return self.replica == self.present[0]

    def join(self, store: Store, *, number: int, present: Sequence[int], timeout_s: float) -> None:
        """Make the group of the replicas that are present, for the `number`th time; all of their ranks call this.

        Raises RuntimeError where one of them is lost meanwhile.
        """
        self._group, self._is_broken = None, True
        self.present = tuple(sorted(present))
        if len(self.present) > 1:
            self._group = dist.ProcessGroupGloo(  # type: ignore[attr-defined, unused-ignore]
                PrefixStore(f"across/{number}/{self.position}", store),
                self.present.index(self.replica),
                len(self.present),
                timedelta(seconds=timeout_s),
            )
        self._is_broken = False

    def leave(self) -> None:
        """Forget the group: what follows fails until another is made."""
        self._group, self._is_broken = None, True

    @torch.no_grad()
    def sum(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Add each tensor up over the replicas, in place; False where that failed, and the values are worth nothing."""
        if self._is_broken:
            return False
        if self._group is None:  # the only replica left
            return True
        for bucket in _fill_buckets(tensors):
            flat = torch.cat([one.detach().reshape(-1) for one in bucket]).cpu()
            try:
                self._group.allreduce([flat]).wait()
            except RuntimeError:
                self.leave()
                return False
            parts = flat.split([one.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                one.copy_(part.view(one.shape))
        return True

    def gather(self, mine: torch.Tensor) -> dict[int, torch.Tensor] | None:
        """A small tensor of host memory, of every replica that is present; None where that failed."""
        if self._is_broken:
            return None
        if self._group is None:
            return {self.replica: mine}
        everyone = [torch.empty_like(mine) for _ in self.present]
        try:
            self._group.allgather([everyone], [mine]).wait()
        except RuntimeError:
            self.leave()
            return None
        return dict(zip(self.present, everyone, strict=True))

    @torch.no_grad()
    def copy_from(self, source: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Give everybody the tensors of one replica; False where that failed."""
        if self._is_broken:
            return False
        if self._group is None:
            return True
        options = dist.BroadcastOptions()  # type: ignore[attr-defined, unused-ignore]
        options.rootRank = self.present.index(source)
        for one in tensors:
            sent = one.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            try:
                if sent.numel():
                    self._group.broadcast([sent], options).wait()
            except RuntimeError:
                self.leave()
                return False
            if self.replica != source:
                one.copy_(sent.view(one.dtype).view(one.shape))
        return True


def _fill_buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """In their order, of one format each, and none much larger than `BUCKET_BYTES`."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for one in tensors:
        if not one.numel():
            continue
        size = one.numel() * one.element_size()
        if not found or size > room or found[-1][0].dtype != one.dtype:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(one)
        room -= size
    return found
