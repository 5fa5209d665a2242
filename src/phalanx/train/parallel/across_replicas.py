"""The process group across model replicas, which is rebuilt whenever a replica is lost or returns.

Each model replica is a torch.distributed world with its own groups, so that the loss of another replica does not
break them. The ranks that hold the same shard in each replica sum their gradients here after backward. The group that
connects them is a bare `ProcessGroupGloo`, not a torch.distributed group: it can be dropped and built again while the
groups inside the replica stay.

One rank of a replica may notice a loss that another does not, and the replica's own collectives must stay in step. So
nothing here raises in the middle of a step: a failed operation returns False or None, the failure is shared with all
ranks of the replica together with the step's numbers, and none of them applies the update.
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
    """A replica was lost during the step, which is discarded; every rank of this replica raises it."""


class AcrossReplicas:
    """This rank's position among the model replicas, and the group of the replicas that are present."""

    def __init__(self, replicas: ModelReplicas, rank: int) -> None:
        self.replicas, self.rank = replicas, rank
        self.replica, self.position = replicas.place(rank)
        self.present: tuple[int, ...] = tuple(range(replicas.count))
        # a ProcessGroupGloo, whose collectives torch's types leave out
        self._group: Any = None
        self._is_broken = True  # before the first group is made

    @property
    def is_lead(self) -> bool:
        """True for the replica that does the work done once for all replicas: writing and deleting checkpoints."""
        return self.replica == self.present[0]

    def join(self, store: Store, *, number: int, present: Sequence[int], timeout_s: float) -> None:
        """Build the group of the present replicas; all ranks of all present replicas call this.

        Args:
            store: Rendezvous store that all replicas reach.
            number: Count of groups built so far; makes the keys in the store unique.
            present: Replicas that take part.
            timeout_s: Seconds after which a collective of the group fails.

        Raises RuntimeError if one of the replicas is lost meanwhile.
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
        """Drop the group: collectives fail until `join` builds another."""
        self._group, self._is_broken = None, True

    @torch.no_grad()
    def sum(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Sum each tensor over the replicas, in place.

        Returns False if that failed, and the values are then undefined.
        """
        if self._is_broken:
            return False
        # No other replica is left
        if self._group is None:
            return True
        for bucket in _fill_buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket]).cpu()
            try:
                self._group.allreduce([flat]).wait()
            except RuntimeError:
                self.leave()
                return False
            flat_parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, flat_part in zip(bucket, flat_parts, strict=True):
                tensor.copy_(flat_part.view(tensor.shape))
        return True

    def gather(self, mine: torch.Tensor) -> dict[int, torch.Tensor] | None:
        """Return a small CPU tensor of every present replica, by replica number; None if the exchange failed."""
        if self._is_broken:
            return None
        if self._group is None:
            return {self.replica: mine}
        gathered = [torch.empty_like(mine) for _ in self.present]
        try:
            self._group.allgather([gathered], [mine]).wait()
        except RuntimeError:
            self.leave()
            return None
        return dict(zip(self.present, gathered, strict=True))

    @torch.no_grad()
    def copy_from(self, source: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Overwrite the tensors of all replicas with those of replica `source`; return False if that failed."""
        if self._is_broken:
            return False
        if self._group is None:
            return True
        options = dist.BroadcastOptions()  # type: ignore[attr-defined, unused-ignore]
        options.rootRank = self.present.index(source)
        for tensor in tensors:
            flat_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            try:
                if flat_bytes.numel():
                    self._group.broadcast([flat_bytes], options).wait()
            except RuntimeError:
                self.leave()
                return False
            if self.replica != source:
                tensor.copy_(flat_bytes.view(tensor.dtype).view(tensor.shape))
        return True


def _fill_buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors into buckets in order: one dtype per bucket, at most about `BUCKET_BYTES` each."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    return buckets
