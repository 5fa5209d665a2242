"""A peer's trained weights as one vector, the form in which peers exchange them, independent of the peer's layout.

A peer may be a mesh of ranks. Rank 0 represents it: it gathers the shards of all ranks into the vector, and
distributes the result.
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
    """The place of every tensor in the vector, in order of the names; all ranks of the peer build it together."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = list(shards)
        wide = any(shard.tensor.dtype == torch.float64 for shard in shards)
        self.dtype = torch.float64 if wide else torch.float32
        own_boxes = [
            {"name": shard.name, "shape": shard.shape, "start": shard.start, "size": list(shard.tensor.shape)}
            for shard in shards
            if shard.owner
        ]
        self._boxes: list[list[dict[str, Any]]] = gather_objects(own_boxes)
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
        """Names and shapes in the order of the vector, which must agree between two peers."""
        return {name: list(shape) for name, shape in sorted(self._shapes.items())}

    @torch.no_grad()
    def gather(self, tensors: Sequence[torch.Tensor]) -> Vector | None:
        """Return the vector on rank 0, None on other ranks; `tensors` have the shapes of this rank's shards."""
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
            for box, values in zip(boxes, piece.split([prod(box["size"]) for box in boxes]), strict=True):
                self._box(vector, box["name"], box["start"], box["size"]).copy_(values.view(box["size"]))
        array: Vector = vector.numpy()
        return array

    def _gather_flat(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Gather the owned values of all ranks on rank 0, padded to equal length; None on other ranks."""
        if len(self._boxes) == 1:
            return [flat]
        lengths = [sum(prod(box["size"]) for box in boxes) for boxes in self._boxes]
        padded = torch.zeros(max(lengths), dtype=self.dtype)
        padded[: len(flat)] = flat
        if dist.get_rank():
            dist.gather(padded, None, dst=0)
            return None
        received = [torch.empty_like(padded) for _ in lengths]
        dist.gather(padded, received, dst=0)
        return [piece[:length] for piece, length in zip(received, lengths, strict=True)]

    @torch.no_grad()
    def spread(self, vector: Vector | None) -> list[torch.Tensor]:
        """Return this rank's shards of the vector that rank 0 passes, in host memory."""
        shared = torch.empty(self.length, dtype=self.dtype)
        if vector is not None:
            shared.numpy()[:] = vector  # copied, as it may be read-only bytes of a message
        if len(self._boxes) > 1:
            dist.broadcast(shared, src=0)
        return [
            self._box(shared, shard.name, shard.start, shard.tensor.shape).to(shard.tensor.dtype).contiguous()
            for shard in self._shards
        ]

    def _box(self, whole: torch.Tensor, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Return the view of a shard in the vector."""
        place = self._places[name]
        box = whole[place : place + self.sizes[name]].view(self._shapes[name])
        for dim, (first, length) in enumerate(zip(start, size, strict=True)):
            box = box.narrow(dim, first, length)
        return box


# ---- small values between the ranks of a peer ------------------------------------------------------------------------


def gather_objects(mine: Any) -> list[Any]:
    """Gather the JSON values of all ranks of the peer, on every rank."""
    if dist.get_world_size() == 1:
        return [json.loads(json.dumps(mine))]
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    most = max(int(length.item()) for length in lengths)
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(text)] = text
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    pairs = zip(received, lengths, strict=True)
    return [json.loads(text_bytes[: int(length.item())].numpy().tobytes()) for text_bytes, length in pairs]


def spread_object(value: Any) -> Any:
    """Broadcast the JSON values of rank 0 to every rank of the peer."""
    if dist.get_world_size() == 1:
        return value
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=0)
    sent = text if dist.get_rank() == 0 else torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(sent, src=0)
    return json.loads(sent.numpy().tobytes())
