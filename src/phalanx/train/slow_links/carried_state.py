"""State that rounds leave for later ones, as tensors in checkpoints: losses of codecs, and an update under way.

A resumed run sends the update that was under way again: all peers resume at the same round, and its mean is the same.
The codec's loss is kept as of the last applied update, so that the update is encoded as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from phalanx.peers.facts import Vector
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.slow_links.peer_vector import VectorMap

LOST, LOST_SUMS, SENT = "lost", "lost_sums", "sent"


class CarriedState:
    """Carried state of this rank's shards; all ranks of the peer build it together.

    `fragments` are the places of each fragment's shards.
    """

    def __init__(
        self, shards: Sequence[TensorShard], fragments: Sequence[Sequence[int]], *, has_feedback: bool, has_delay: bool
    ) -> None:
        names = ([LOST, LOST_SUMS] if has_feedback else []) + ([SENT] if has_delay else [])
        self._fragments = [list(places) for places in fragments]
        # At least float32, the precision of the exchange, also for weights of fewer bits.
        self._shards = [
            replace(shard, tensor=torch.zeros_like(shard.tensor, dtype=_wide(shard.tensor))) for shard in shards
        ]
        self._tables = {name: [torch.zeros_like(shard.tensor) for shard in self._shards] for name in names}
        self._maps = [VectorMap([self._shards[at] for at in places]) for places in self._fragments] if names else []

    def state(self) -> list[TensorShard]:
        """Return the state as shards named "parameter#lost", "parameter#lost_sums" and "parameter#sent"."""
        return [
            replace(shard, name=f"{shard.name}#{name}", tensor=tensor)
            for name, tensors in self._tables.items()
            for shard, tensor in zip(self._shards, tensors, strict=True)
        ]

    def keep_lost(self, fragment: int, lost: Mapping[str, Vector] | None) -> None:
        """Store the codec's losses of a fragment, from `Sender.state` on rank 0; every rank calls this."""
        for name in (LOST, LOST_SUMS):
            if name in self._tables:
                vector = (lost or {}).get(name)
                if vector is None and dist.get_rank() == 0:
                    vector = np.zeros(self._maps[fragment].length)
                self._fill(name, fragment, self._maps[fragment].spread(vector))

    def lost(self, fragment: int) -> dict[str, Vector] | None:
        """Return the stored losses for `Sender.load_state` on rank 0; None elsewhere, or if codecs carry nothing."""
        losses = {name: self._gather(name, fragment) for name in (LOST, LOST_SUMS) if name in self._tables}
        return {name: vector for name, vector in losses.items() if vector is not None} or None

    def keep_sent(self, fragment: int, parts: Sequence[torch.Tensor]) -> None:
        """Store an update that was sent while training continues."""
        if SENT in self._tables:
            self._fill(SENT, fragment, parts)

    def sent(self, fragment: int) -> list[torch.Tensor]:
        """Return the stored update of a fragment, to send it again in a resumed run."""
        return [self._tables[SENT][at].clone() for at in self._fragments[fragment]]

    @torch.no_grad()
    def forget(self) -> None:
        """Clear everything, as this peer continues from the state of another."""
        for tensors in self._tables.values():
            for tensor in tensors:
                tensor.zero_()

    @torch.no_grad()
    def _fill(self, name: str, fragment: int, parts: Sequence[torch.Tensor]) -> None:
        for at, source in zip(self._fragments[fragment], parts, strict=True):
            self._tables[name][at].copy_(source)

    def _gather(self, name: str, fragment: int) -> Vector | None:
        return self._maps[fragment].gather([self._tables[name][at] for at in self._fragments[fragment]])


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
