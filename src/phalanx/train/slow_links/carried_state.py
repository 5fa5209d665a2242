"""What rounds leave for later ones, as tensors that checkpoints keep: what codecs lost, and an update under way.

A run that is resumed sends the update that was under way again: all peers resume at the same round, and its mean is the
same. What the codec lost is kept as of the last update that was applied, so the update is encoded as before.
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
    """Of this rank's shards. `fragments` are the places of each fragment's shards; every rank builds one, together."""

    def __init__(
        self, shards: Sequence[TensorShard], fragments: Sequence[Sequence[int]], *, has_feedback: bool, has_delay: bool
    ) -> None:
        names = ([LOST, LOST_SUMS] if has_feedback else []) + ([SENT] if has_delay else [])
        self._fragments = [list(places) for places in fragments]
        # As precise as what is exchanged, whatever the weights are.
        self._shards = [replace(one, tensor=torch.zeros_like(one.tensor, dtype=_wide(one.tensor))) for one in shards]
        self._tables = {name: [torch.zeros_like(one.tensor) for one in self._shards] for name in names}
        self._maps = [VectorMap([self._shards[at] for at in places]) for places in self._fragments] if names else []

    def state(self) -> list[TensorShard]:
        """As shards named "parameter#lost", "parameter#lost_sums" and "parameter#sent"."""
        return [
            replace(shard, name=f"{shard.name}#{name}", tensor=tensor)
            for name, tensors in self._tables.items()
            for shard, tensor in zip(self._shards, tensors, strict=True)
        ]

    def keep_lost(self, fragment: int, lost: Mapping[str, Vector] | None) -> None:
        """What a codec has lost so far of a fragment, as `Sender.state` says on rank 0; every rank calls this."""
        for name in (LOST, LOST_SUMS):
            if name in self._tables:
                vector = (lost or {}).get(name)
                if vector is None and dist.get_rank() == 0:
                    vector = np.zeros(self._maps[fragment].length)
                self._fill(name, fragment, self._maps[fragment].spread(vector))

    def lost(self, fragment: int) -> dict[str, Vector] | None:
        """The same on rank 0, for `Sender.load_state`; None elsewhere, and where codecs carry nothing."""
        found = {name: self._gather(name, fragment) for name in (LOST, LOST_SUMS) if name in self._tables}
        return {name: vector for name, vector in found.items() if vector is not None} or None

    def keep_sent(self, fragment: int, parts: Sequence[torch.Tensor]) -> None:
        """An update that training does not wait for."""
        if SENT in self._tables:
            self._fill(SENT, fragment, parts)

    def sent(self, fragment: int) -> list[torch.Tensor]:
        """The same, of a run that is resumed."""
        return [self._tables[SENT][at].clone() for at in self._fragments[fragment]]

    @torch.no_grad()
    def forget(self) -> None:
        """This peer goes on from the state of another, and its rounds begin anew."""
        for tensors in self._tables.values():
            for tensor in tensors:
                tensor.zero_()

    @torch.no_grad()
    def _fill(self, name: str, fragment: int, parts: Sequence[torch.Tensor]) -> None:
        for at, part in zip(self._fragments[fragment], parts, strict=True):
            self._tables[name][at].copy_(part)

    def _gather(self, name: str, fragment: int) -> Vector | None:
        return self._maps[fragment].gather([self._tables[name][at] for at in self._fragments[fragment]])


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
