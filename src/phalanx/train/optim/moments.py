"""How a moment is kept between steps: in the working format, in bf16, or in 8 bits per element.

A store hands out the moment as a tensor to compute with and takes the new value back. The compact ones round
stochastically (see `rounding`), or a moment would stop moving: with beta2 = 0.95 a second moment whose gradients
vanish falls by 5 % per step, less than half the distance of two 8-bit values.
"""

from __future__ import annotations

from typing import Protocol

import torch

from phalanx.train.optim.rounding import dice, to_bf16
from phalanx.train.parallel.pieces import Piece

BLOCK = 256  # elements that share a scale: 4 bytes of scale per 256 of codes is 1.6 % (Dettmers et al. 2022 use 2048)
# Values are kept as a share of the largest of their block on a logarithmic code: neighbouring codes differ by a factor
# of 2^(octaves / (levels - 1)) = 1.092, over this many octaves. What is smaller still becomes the smallest code.
SIGNED_LEVELS, SIGNED_OCTAVES = 127, 16.0  # the first moment: a sign bit and 7 bits, and 0
UNSIGNED_LEVELS, UNSIGNED_OCTAVES = 255, 32.0  # the second moment: 8 bits; 16 octaves of gradient
SNAP = 1e-3  # nearer to a code than this share of a step is that code: fp32 log2 is off by 2e-5, and a reload is exact
CODE_RATIO = 2.0 ** (SIGNED_OCTAVES / (SIGNED_LEVELS - 1))  # 1.0920; the unsigned code's is 1.0913


class Store(Protocol):
    """One state tensor of one piece."""

    def read(self) -> torch.Tensor:
        """The moment in the working format; may be the live tensor."""

    def write(self, value: torch.Tensor, step: int) -> None:
        """Keep a new value; `step` seeds the rounding."""

    def tensors(self) -> list[torch.Tensor]:
        """What is held in memory."""


class Full:
    """The working format: exact."""

    def __init__(self, piece: Piece) -> None:
        self._value = torch.zeros_like(piece.tensor, dtype=working(piece.tensor.dtype), requires_grad=False)

    def read(self) -> torch.Tensor:
        """The live tensor."""
        return self._value

    def write(self, value: torch.Tensor, step: int) -> None:
        """Copy, unless it was changed in place."""
        if value is not self._value:
            self._value.copy_(value)

    def tensors(self) -> list[torch.Tensor]:
        """One tensor."""
        return [self._value]


class Bf16:
    """Two bytes, 8 bits of precision: each write is off by at most 2^-7 of the value, by nothing on average."""

    def __init__(self, piece: Piece, salt: str) -> None:
        self._piece, self._salt = piece, salt
        self._value = torch.zeros_like(piece.tensor, dtype=torch.bfloat16, requires_grad=False)

    def read(self) -> torch.Tensor:
        """A wide copy."""
        return self._value.to(working(self._piece.tensor.dtype))

    def write(self, value: torch.Tensor, step: int) -> None:
        """Round stochastically."""
        self._value.copy_(to_bf16(value, dice(self._piece, step=step, salt=self._salt)))

    def tensors(self) -> list[torch.Tensor]:
        """One tensor."""
        return [self._value]


class Block8:
    """One byte per element and a fp32 scale per block: |error| <= 9.2 % of the value or 2^-16 of the block's largest.

    Blocks are runs of this rank's own elements, so two layouts round a little differently.
    """

    def __init__(self, piece: Piece, salt: str, *, signed: bool) -> None:
        self._piece, self._salt, self._signed = piece, salt, signed
        self._levels = SIGNED_LEVELS if signed else UNSIGNED_LEVELS
        self._octaves = SIGNED_OCTAVES if signed else UNSIGNED_OCTAVES
        count, device = piece.tensor.numel(), piece.tensor.device
        blocks = -(-count // BLOCK)
        self._codes = torch.zeros(count, dtype=torch.int8 if signed else torch.uint8, device=device)
        self._scales = torch.zeros(blocks, dtype=torch.float32, device=device)

    def read(self) -> torch.Tensor:
        """Decode all of it."""
        codes = self._codes.to(torch.float32)
        shares = self._decode(codes.abs()) * codes.sign()
        value = shares * self._scales.repeat_interleave(BLOCK)[: codes.numel()]
        return value.view(self._piece.tensor.shape).to(working(self._piece.tensor.dtype))

    def write(self, value: torch.Tensor, step: int) -> None:
        """Scale each block by its largest magnitude and round stochastically between neighbouring codes."""
        if not value.numel():
            return
        flat = value.reshape(-1).to(torch.float32)
        self._scales.copy_(_block_max(flat))
        scales = self._scales.repeat_interleave(BLOCK)[: flat.numel()]
        share = torch.where(scales > 0, flat.abs() / scales, 0.0)
        noise = dice(self._piece, step=step, salt=self._salt).reshape(-1)
        self._codes.copy_(self._encode(share, noise) * flat.sign())

    def tensors(self) -> list[torch.Tensor]:
        """Codes and scales."""
        return [self._codes, self._scales]

    def _decode(self, code: torch.Tensor) -> torch.Tensor:
        share = torch.exp2((code - self._levels) * (self._octaves / (self._levels - 1)))
        return torch.where(code > 0, share, 0.0)

    def _encode(self, share: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The code below or above, so that the mean of what they stand for is the share."""
        exact = self._levels + torch.log2(share) * ((self._levels - 1) / self._octaves)
        low = exact.floor().clamp(0 if self._signed else 1, self._levels - 1)
        below, above = self._decode(low), self._decode(low + 1)
        code = low + (noise * (above - below) < share - below)
        near = exact.round().clamp(1, self._levels)
        code = torch.where((exact - near).abs() < SNAP, near, code)
        # A second moment is never rounded to 0 where it is not 0: its root divides.
        return torch.where(share > 0, code, 0.0)


def store(piece: Piece, salt: str, *, kind: str, signed: bool) -> Store:
    """A store that is zero. `kind` is the job's precision.optimizer_state: fp32 (the working format), bf16 or int8."""
    if kind == "int8":
        return Block8(piece, salt, signed=signed)
    return Bf16(piece, salt) if kind == "bf16" else Full(piece)


def working(dtype: torch.dtype) -> torch.dtype:
    """The format of the arithmetic: fp32, or fp64 for fp64 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block_max(flat: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK))
    return padded.view(-1, BLOCK).abs().amax(dim=1)
