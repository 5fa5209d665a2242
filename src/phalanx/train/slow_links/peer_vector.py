"""All trained weights of a peer as one vector, the same for any layout inside the peer: what is exchanged.

A peer may be a mesh. Rank 0 speaks for it: it gathers the boxes of all ranks into the vector, and spreads the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from phalanx.peers.facts import Vector
from phalanx.train.parallel.tensor_shard import TensorShard


class VectorMap:
    """Where every tensor lies in the vector, in order of the names. Every rank of the peer builds one, together."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = list(shards)
        wide = any(shard.tensor.dtype == torch.float64 for shard in shards)
        self.dtype = torch.float64 if wide else torch.float32
        mine = [
            {"name": one.name, "shape": one.shape, "start": one.start, "size": list(one.tensor.shape)}
            for one in shards
            if one.owner
        ]
        self._boxes: list[list[dict[str, Any]]] = gather_objects(mine)
        shapes = {box["name"]: tuple(box["shape"]) for boxes in self._boxes for box in boxes}
        self.sizes = {name: prod(shape) for name, shape in shapes.items()}
        self._shapes, place = shapes, 0
        self._places: dict[str, int] = {}
        for name in sorted(shapes):
            self._places[name] = place
            place += self.sizes[name]
        self.length = place

    @property
    def description(self) -> dict[str, list[int]]:
        """Names and shapes, in order of the vector: what two peers must agree on."""
        return {name: list(shape) for name, shape in sorted(self._shapes.items())}

    @torch.no_grad()
    def gather(self, tensors: Sequence[torch.Tensor]) -> Vector | None:
        """The vector on rank 0, None elsewhere; `tensors` are shaped as the shards of this rank are."""
        owned = [
            tensor.detach().to(self.dtype).reshape(-1).cpu()
            for shard, tensor in zip(self._shards, tensors, strict=True)
            if shard.owner
        ]
        flat = torch.cat(owned) if owned else torch.empty(0, dtype=self.dtype)
        pieces = self._gather_flat(flat)
        if pieces is None:
            return None
        vector = torch.zeros(self.length, dtype=self.dtype)
        for boxes, piece in zip(self._boxes, pieces, strict=True):
            for box, part in zip(boxes, piece.split([prod(box["size"]) for box in boxes]), strict=True):
                self._box(vector, box["name"], box["start"], box["size"]).copy_(part.view(box["size"]))
        found: Vector = vector.numpy()
        return found

    def _gather_flat(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        if len(self._boxes) == 1:
            return [flat]
        lengths = [sum(prod(box["size"]) for box in boxes) for boxes in self._boxes]
        padded = torch.zeros(max(lengths), dtype=self.dtype)
        padded[: len(flat)] = flat
        if dist.get_rank():
            dist.gather(padded, None, dst=0)
            return None
        everyone = [torch.empty_like(padded) for _ in lengths]
        dist.gather(padded, everyone, dst=0)
        return [one[:length] for one, length in zip(everyone, lengths, strict=True)]

    @torch.no_grad()
    def spread(self, vector: Vector | None) -> list[torch.Tensor]:
        """This rank's boxes of the vector that rank 0 has, in host memory."""
        whole = torch.empty(self.length, dtype=self.dtype)
        if vector is not None:
            whole.numpy()[:] = vector  # which may be read-only, as bytes of a message are
        if len(self._boxes) > 1:
            dist.broadcast(whole, src=0)
        return [
            self._box(whole, one.name, one.start, one.tensor.shape).to(one.tensor.dtype).contiguous()
            for one in self._shards
        ]

    def _box(self, whole: torch.Tensor, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        place = self._places[name]
        found = whole[place : place + self.sizes[name]].view(self._shapes[name])
        for dim, (first, length) in enumerate(zip(start, size, strict=True)):
            found = found.narrow(dim, first, length)
        return found


# ---- small values between the ranks of a peer ------------------------------------------------------------------------


def gather_objects(mine: Any) -> list[Any]:
    """JSON values of every rank of the peer, on every rank."""
    if dist.get_world_size() == 1:
        return [json.loads(json.dumps(mine))]
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    most = max(int(one.item()) for one in lengths)
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(text)] = text
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded)
    pairs = zip(everyone, lengths, strict=True)
    return [json.loads(one[: int(length.item())].numpy().tobytes()) for one, length in pairs]


def spread_object(value: Any) -> Any:
    """JSON values of rank 0, on every rank of the peer."""
    if dist.get_world_size() == 1:
        return value
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=0)
    sent = text if dist.get_rank() == 0 else torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(sent, src=0)
    return json.loads(sent.numpy().tobytes())
