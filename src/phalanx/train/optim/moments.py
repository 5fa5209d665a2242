"""Storage formats of optimizer moments: the working format, bf16, or 8 bits per element; with stochastic rounding.

A format converts a flat tensor for computing into what is stored, and back. The compact formats round stochastically,
or a moment would stop changing: with beta2 = 0.95 a second moment whose gradients vanish falls by 5 % per step, less
than the distance of two 8-bit values.
"""

from __future__ import annotations

import zlib
from math import log, prod
from typing import Protocol

import torch

from phalanx.train.parallel.tensor_shard import TensorShard

# Elements that share a scale: 4 bytes of scale per 256 of codes is 1.6 % (Dettmers et al. 2022 use 2048)
BLOCK = 256
# A value closer to a code than this share of a step becomes that code: fp32 is off by 4e-5, and a reload must be
# exact.
SNAP = 1e-4

Kept = tuple[torch.Tensor, ...]


class MomentFormat(Protocol):
    """Storage format of a flat tensor of non-negative or signed values."""

    def zeros(self, count: int, like: torch.Tensor) -> Kept:
        """Return the encoding of `count` zeros."""

    def decode(self, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """Return the values to compute with; may be the stored tensor itself."""

    def encode(self, value: torch.Tensor, die: torch.Tensor) -> Kept:
        """Return the encoding of the values; `die` has a random number from 0 to 65535 for each."""

    def part(self, kept: Kept, start: int, stop: int) -> Kept:
        """Return views of the encoding of some of the values; `start` is a multiple of BLOCK."""


class FullMoment:
    """The working format: exact."""

    def zeros(self, count: int, like: torch.Tensor) -> Kept:
        """Return one tensor of zeros."""
        return (torch.zeros(count, dtype=working_dtype(like.dtype), device=like.device),)

    def decode(self, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """Return the values as stored, in `dtype`."""
        return kept[0].to(dtype)

    def encode(self, value: torch.Tensor, die: torch.Tensor) -> Kept:
        """Return the values unchanged."""
        return (value,)

    def part(self, kept: Kept, start: int, stop: int) -> Kept:
        """Return a slice."""
        return (kept[0][start:stop],)


class Bf16Moment:
    """Two bytes, 8 bits of precision: each rounding is off by at most 2^-7 of the value, and unbiased."""

    def zeros(self, count: int, like: torch.Tensor) -> Kept:
        """Return one tensor of zeros."""
        return (torch.zeros(count, dtype=torch.bfloat16, device=like.device),)

    def decode(self, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy in `dtype`."""
        return kept[0].to(dtype)

    def encode(self, value: torch.Tensor, die: torch.Tensor) -> Kept:
        """Round stochastically."""
        return (to_bf16(value, die),)

    def part(self, kept: Kept, start: int, stop: int) -> Kept:
        """Return a slice."""
        return (kept[0][start:stop],)


class Block8Moment:
    """One byte per element and an fp32 scale, the largest magnitude, per block of 256 consecutive elements.

    Codes are logarithmic: neighbours differ by a factor of 2^(octaves / (levels - 1)) = 1.092. So a value is off by
    at most 9.2 %, and unbiased; one below the smallest code (2^-octaves of its block's largest) is off by at most
    that code. There a signed value may become 0, but a second moment never does, because the update divides by its
    root.
    """

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self.levels = 127 if signed else 255
        # 32 octaves of a second moment are 16 of gradients
        self.octaves = 16.0 if signed else 32.0
        self._step = self.octaves / (self.levels - 1)

    def zeros(self, count: int, like: torch.Tensor) -> Kept:
        """Return codes and scales of zeros."""
        codes = torch.zeros(count, dtype=torch.int8 if self.signed else torch.uint8, device=like.device)
        return codes, torch.zeros(-(-count // BLOCK), dtype=torch.float32, device=like.device)

    def decode(self, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """Return scale times 2^(distance from the largest code), with the code's sign."""
        code = kept[0].to(torch.float32)
        share = torch.exp2((code.abs() - self.levels) * self._step) * code.sign()
        return (share * self._spread_scales(kept[1], code.numel())).to(dtype)

    def encode(self, value: torch.Tensor, die: torch.Tensor) -> Kept:
        """Round to one of the two neighbouring codes, the upper one with the probability that keeps the mean."""
        values = value.to(torch.float32)
        padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
        scales = padded.view(-1, BLOCK).abs().amax(dim=1)
        share = values.abs() / self._spread_scales(scales, values.numel()).clamp_min(torch.finfo(torch.float32).tiny)
        exact = torch.log2(share) / self._step + self.levels
        lower_code = exact.floor()
        upper_share = ((exact - lower_code - SNAP) / (1.0 - 2.0 * SNAP)).clamp(0.0, 1.0)
        # (2^(step·part) - 1) / (2^step - 1) to second order: within 2e-4 of it for steps of 0.13 octaves.
        upper_share = upper_share * (1.0 + 0.5 * log(2.0) * self._step * (upper_share - 1.0))
        noise = die * (1.0 / SIDES)
        code = (lower_code + (noise < upper_share)).clamp(max=self.levels)
        smallest_code = noise * 2.0**-self.octaves < share if self.signed else share > 0
        code = torch.where(exact < 1.0, smallest_code.to(code.dtype), code) * values.sign()
        return code.to(torch.int8 if self.signed else torch.uint8), scales

    def part(self, kept: Kept, start: int, stop: int) -> Kept:
        """Return a slice of the codes and one of the scales."""
        return kept[0][start:stop], kept[1][start // BLOCK : -(-stop // BLOCK)]

    def _spread_scales(self, scales: torch.Tensor, count: int) -> torch.Tensor:
        return scales.unsqueeze(1).expand(-1, BLOCK).reshape(-1)[:count]


def moment_format(kind: str, *, signed: bool) -> MomentFormat:
    """Return the format for the job's precision.optimizer_state: fp32 (the working format), bf16 or int8."""
    if kind == "int8":
        return Block8Moment(signed=signed)
    return Bf16Moment() if kind == "bf16" else FullMoment()


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format of the arithmetic: fp32, or fp64 for fp64 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable_moment(form: MomentFormat, kept: Kept, like: torch.Tensor) -> torch.Tensor:
    """Return a moment as a float tensor of its parameter's shape: the stored tensor itself if that is float."""
    flat = form.decode(kept, working_dtype(like.dtype)) if len(kept) > 1 else kept[0]
    return flat.view(like.shape)


# Stochastic rounding with random numbers that depend only on the step and the element's position in the full tensor.
#
# A moment that changes by a few percent per step would never change if it were rounded to the nearest of values that
# are further apart; rounded up with the right probability, it is right on average. The noise is a hash, not a
# generator: there is no state to save, and every layout gets the same numbers for the same element.


# Values of a 16-bit random number: bf16 drops 16 bits of an fp32 value
SIDES = 65536
# 2^32 / golden ratio: neighbours land far apart (Knuth, TAOCP 3, 6.4); as int32
_GOLDEN = 0x9E3779B1 - 2**32
_MIX = 0x85EBCA6B - 2**32  # from the finaliser of MurmurHash3


def element_positions(shard: TensorShard) -> torch.Tensor:
    """Return each element's flat position in the full tensor, as int32; it wraps at 2^32, which is fine for a hash.

    If the shard is one contiguous run of the full tensor, return a scalar: the position of its first element.
    """
    device = shard.tensor.device
    if tuple(shard.tensor.shape[1:]) == shard.shape[1:]:
        first = shard.start[0] * prod(shard.shape[1:]) if shard.shape else 0
        return torch.full((), _wrapped_int32(first), dtype=torch.int32, device=device)
    positions = torch.zeros((1,) * len(shard.shape), dtype=torch.int32, device=device)
    stride = 1
    for dim in reversed(range(len(shard.shape))):
        along = torch.arange(shard.tensor.shape[dim], dtype=torch.int64, device=device) + shard.start[dim]
        along = ((along * stride + 2**31) % 2**32 - 2**31).to(torch.int32)
        positions = positions + along.view(-1, *(1,) * (len(shard.shape) - 1 - dim))
        stride *= shard.shape[dim]
    return positions.reshape(-1)


def rounding_bits(shard: TensorShard, step: int) -> torch.Tensor:
    """Return 32 random bits for each element of a shard in one step."""
    positions = element_positions(shard)
    if not positions.dim():
        positions = positions + torch.arange(shard.tensor.numel(), dtype=torch.int32, device=positions.device)
    return mix_bits(positions, dice_key(shard.name, step))


def dice_key(name: str, step: int) -> int:
    """Return an int32 hash of tensor name and step, which makes their random numbers differ."""
    return _wrapped_int32(zlib.crc32(f"{name}#{step}".encode()))


def _wrapped_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def mix_bits(where: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """Return 32 random bits for each position.

    `low_bits` and `high_bits` take two independent 16-bit numbers from them.
    """
    bits = (where ^ by) * _GOLDEN
    # >> of a signed integer copies the sign; the mask makes it an unsigned shift.
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MIX
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    return bits * _GOLDEN


def low_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return a number from 0 to 65535 from the middle bits: the lowest bits of a product are poorly mixed."""
    return (bits >> 8) & (SIDES - 1)


def high_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return another number from 0 to 65535, from the same bits mixed once more."""
    return (((bits ^ ((bits >> 16) & 0xFFFF)) * _MIX) >> 12) & (SIDES - 1)


def to_bf16(value: torch.Tensor, die: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, away from zero with the probability that keeps the mean."""
    values = value.to(torch.float32)
    # bf16 is the upper half of fp32: add noise to the lower half and truncate.
    rounded = ((values.view(torch.int32) + die) & -SIDES).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)
