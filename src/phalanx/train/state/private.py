"""Tensors that belong to one rank of one layout and not to the model: what gradient compression carries over, say."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.reader import StateSource


def is_private_tensor(name: str) -> bool:
    """Whether a tensor of a checkpoint is one rank's own.

    >>> is_private("#rank-00003/exchange/0/parts"), is_private("norm.weight#exp_avg")
    (True, False)
    """
    return name.startswith("#")


def private_shards(rank: int, tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """The tensors as pieces to save, under names that no other rank and no parameter has."""
    return [
        TensorShard(
            name=_start(rank) + name,
            tensor=tensor,
            shape=tuple(tensor.shape),
            start=(0,) * tensor.dim(),
            replicas=1,
            owner=True,
            groups={},
        )
        for name, tensor in tensors.items()
    ]


def read_private_tensors(source: StateSource, rank: int) -> dict[str, torch.Tensor]:
    """What a rank saved that way, on the CPU; only for the layout that wrote it. Raises Damaged."""
    mine = [entry for entry in source.index(rank).entries if entry.name.startswith(_start(rank))]
    if not mine:
        return {}
    with source.open(rank) as tensors:
        tensors.check(mine)
        return {entry.name.removeprefix(_start(rank)): tensors.read(entry, entry.box).clone() for entry in mine}


def _start(rank: int) -> str:
    return f"#rank-{rank:05d}/"
