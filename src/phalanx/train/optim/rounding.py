"""Stochastic rounding whose dice depend only on the step and the element's place in the whole tensor.

A moment that changes by a few percent per step would stand still if it were rounded to the nearest of values that lie
further apart; rounded up with the right probability, it is right on average. The noise is a hash, not a generator: no
state to save, and every layout throws the same dice for the same element.
"""

from __future__ import annotations

import zlib

import torch

from phalanx.train.parallel.pieces import Piece

_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: neighbours land far apart (Knuth, TAOCP 3, 6.4)
_MIX = (0x85EBCA6B, 0xC2B2AE35)  # the finaliser of MurmurHash3: every input bit moves every output bit


def dice(piece: Piece, *, step: int, salt: str) -> torch.Tensor:
    """For each element of the piece, a number in [0, 1) with 24 random bits, as fp32."""
    hashed = _places(piece)
    hashed = _scramble(hashed ^ _signed(zlib.crc32(f"{piece.name}#{salt}#{step}".encode())))
    return ((hashed >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def to_bf16(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, up in magnitude with the probability that keeps the mean."""
    bits = value.to(torch.float32).view(torch.int32)
    up = (noise * 65536.0).to(torch.int32)  # bf16 is the upper half of fp32: add noise below it, then cut
    rounded = ((bits + up) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value.to(torch.float32)).to(torch.bfloat16)


def _places(piece: Piece) -> torch.Tensor:
    """A hash of each element's flat position in the whole tensor; wraps at 2^32, which a hash may."""
    places = torch.zeros((), dtype=torch.int32, device=piece.tensor.device)
    stride = 1
    for dim in reversed(range(len(piece.shape))):
        size = piece.tensor.shape[dim]
        along = torch.arange(size, dtype=torch.int64, device=piece.tensor.device) + piece.start[dim]
        along = _wrap(along * stride).view(-1, *(1,) * (len(piece.shape) - 1 - dim))
        places = places + along
        stride *= piece.shape[dim]
    return _scramble(places.expand(piece.tensor.shape) * _signed(_GOLDEN))


def _scramble(hashed: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, _MIX[0]), (13, _MIX[1])):
        # >> of a signed integer drags the sign along; the mask makes it the unsigned shift.
        hashed = (hashed ^ ((hashed >> shift) & (2 ** (32 - shift) - 1))) * _signed(factor)
    return hashed ^ ((hashed >> 16) & 0xFFFF)


def _wrap(value: torch.Tensor) -> torch.Tensor:
    return ((value + 2**31) % 2**32 - 2**31).to(torch.int32)


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
