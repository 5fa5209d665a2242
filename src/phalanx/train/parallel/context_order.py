"""Which part of a sequence each context rank holds: head and tail, so that causal attention costs every rank the same.

Rank c of C holds slices c and 2C-1-c of 2C equal ones: its queries see c + 1 and 2C - c slices, 2C + 1 for every c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import mistake


def slice_length(sequence: int, ranks: int) -> int:
    """Tokens of one of the 2·ranks slices; raises UserError where the sequence does not divide.

    >>> slice_length(4096, 4)
    512
    """
    if sequence % (2 * ranks):
        fit = sequence - sequence % (2 * ranks) or 2 * ranks
        raise mistake(
            "job: data.sequence",
            f"{sequence} tokens do not divide into {2 * ranks} slices for {ranks} context ranks",
            why="each context rank holds one slice from the head and one from the tail of every sequence",
            fix=f"use {fit} or another multiple of {2 * ranks}, or fewer context ranks",
        )
    return sequence // (2 * ranks)


def local_positions(sequence: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of the tokens `rank` holds, ascending: int64 [sequence / ranks].

    >>> [local_positions(8, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if ranks == 1:
        return torch.arange(sequence, device=device)
    length = slice_length(sequence, ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts])


def split_sequence(x_BS: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """The part of a whole sequence that `rank` holds, cut along `dim`."""
    if ranks == 1:
        return x_BS
    length = slice_length(x_BS.shape[dim], ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([x_BS.narrow(dim, start, length) for start in starts], dim=dim)


def split_all(x: Tensor, ranks: int, dim: int) -> Tensor:
    """What every rank holds of a whole sequence, stacked along a new first dimension."""
    return torch.stack([split_sequence(x, rank, ranks, dim) for rank in range(ranks)])


def join_all(parts_C: Tensor, dim: int) -> Tensor:
    """The whole sequence, in order, from what every rank holds (stacked first); `dim` counts without the stacking."""
    parts = parts_C.unbind(0)
    length = parts[0].shape[dim] // 2
    heads = [part.narrow(dim, 0, length) for part in parts]
    tails = [part.narrow(dim, length, length) for part in reversed(parts)]
    return torch.cat([*heads, *tails], dim=dim)
