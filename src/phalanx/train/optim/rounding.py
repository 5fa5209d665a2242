"""Stochastic rounding whose dice depend only on the step and the element's place in the whole tensor.

A moment that changes by a few percent per step would stand still if it were rounded to the nearest of values that lie
further apart; rounded up with the right probability, it is right on average. The noise is a hash, not a generator: no
state to save, and every layout throws the same dice for the same element.
"""

from __future__ import annotations

import zlib
from math import prod

import torch

from phalanx.train.parallel.tensor_shard import TensorShard

SIDES = 65536  # of a die: what bf16 cuts off an fp32 value is 16 bits
_GOLDEN = 0x9E3779B1 - 2**32  # 2^32 / golden ratio: neighbours land far apart (Knuth, TAOCP 3, 6.4); as int32
_MIX = 0x85EBCA6B - 2**32  # of the finaliser of MurmurHash3


def places(piece: TensorShard) -> torch.Tensor:
    """Each element's flat position in the whole tensor, as int32; it wraps at 2^32, which a hash may.

    Where a piece is one run of the whole, a scalar: the position of its first element.
    """
    place = piece.tensor.device
    if tuple(piece.tensor.shape[1:]) == piece.shape[1:]:
        first = piece.start[0] * prod(piece.shape[1:]) if piece.shape else 0
        return torch.full((), _wrapped(first), dtype=torch.int32, device=place)
    found = torch.zeros((1,) * len(piece.shape), dtype=torch.int32, device=place)
    stride = 1
    for dim in reversed(range(len(piece.shape))):
        along = torch.arange(piece.tensor.shape[dim], dtype=torch.int64, device=place) + piece.start[dim]
        along = ((along * stride + 2**31) % 2**32 - 2**31).to(torch.int32)
        found = found + along.view(-1, *(1,) * (len(piece.shape) - 1 - dim))
        stride *= piece.shape[dim]
    return found.reshape(-1)


def dice(piece: TensorShard, step: int) -> torch.Tensor:
    """32 random bits for each element of a piece in one step."""
    where = places(piece)
    if not where.dim():
        where = where + torch.arange(piece.tensor.numel(), dtype=torch.int32, device=where.device)
    return throw(where, key(piece.name, step))


def key(name: str, step: int) -> int:
    """What tells the dice of one tensor and step from those of another: an int32."""
    return _wrapped(zlib.crc32(f"{name}#{step}".encode()))


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def throw(where: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """32 random bits for each place; `low` and `high` are two independent dice of 16 bits each."""
    bits = (where ^ by) * _GOLDEN
    # >> of a signed integer drags the sign along; the mask makes it the unsigned shift.
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MIX
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    return bits * _GOLDEN


def low(bits: torch.Tensor) -> torch.Tensor:
    """A die from 0 to 65535 out of the middle bits: the lowest ones of a product know little of the rest."""
    return (bits >> 8) & (SIDES - 1)


def high(bits: torch.Tensor) -> torch.Tensor:
    """Another die, from the same bits mixed once more."""
    return (((bits ^ ((bits >> 16) & 0xFFFF)) * _MIX) >> 12) & (SIDES - 1)


def to_bf16(value: torch.Tensor, die: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, away from zero with the probability that keeps the mean."""
    wide = value.to(torch.float32)
    # bf16 is the upper half of fp32: add noise to the lower half and cut it off.
    rounded = ((wide.view(torch.int32) + die) & -SIDES).view(torch.float32)
    return torch.where(torch.isfinite(wide), rounded, wide).to(torch.bfloat16)
