"""How gradients are written on the wire: bf16, or one byte a value with a scale per block.

R rows (one per receiver), n values of a row, A bytes of a row's message, b values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # values that share a scale: 4 bytes of it add 1.6 %, and an outlier coarsens no more than 255 neighbours


class Format(Protocol):
    """Rows of numbers to rows of bytes and back. A value that is not finite must come back as one that is not."""

    def encode(self, x_Rn: Tensor) -> Tensor:
        """The message of every row, uint8 [R, A]."""

    def decode(self, message_RA: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The rows of `length` values, in `dtype`."""


@dataclass(frozen=True, slots=True)
class Bf16:
    """Two bytes a value: 8 bits of precision, the range of fp32."""

    def encode(self, x_Rn: Tensor) -> Tensor:
        """The upper halves of the numbers."""
        return x_Rn.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message_RA: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The numbers as they were rounded."""
        return message_RA.view(torch.bfloat16)[:, :length].to(dtype)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One byte a value, and an fp32 scale for every block: its largest magnitude becomes `top`."""

    dtype: torch.dtype  # torch.int8 or torch.float8_e4m3fn
    top: float
    block: int = BLOCK

    def encode(self, x_Rn: Tensor) -> Tensor:
        """Scales first, then the values."""
        rows, length = x_Rn.shape
        x_Rkb = F.pad(x_Rn, (0, -length % self.block)).view(rows, -1, self.block)
        # Smallest normal fp32: a block of zeros stays zero. A block with inf or nan gets such a scale, and all its
        # values come back as nan, which is what makes every rank skip the step.
        scale_Rk1 = (x_Rkb.abs().amax(-1, keepdim=True).float() / self.top).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (x_Rkb / scale_Rk1).clamp(-self.top, self.top)
        values = (scaled if self.dtype.is_floating_point else scaled.round()).to(self.dtype)
        bytes_Rn = values.view(torch.uint8).view(rows, -1)[:, :length]
        return torch.cat([scale_Rk1.view(rows, -1).view(torch.uint8), bytes_Rn], dim=1)

    def decode(self, message_RA: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Every value times its block's scale."""
        rows, blocks = len(message_RA), -(-length // self.block)
        # Flat first: a single row keeps its odd length as stride, which does not pass as rows of fp32.
        scale_Rk = message_RA[:, : 4 * blocks].reshape(-1).view(torch.float32).view(rows, blocks)
        values_Rn = message_RA[:, 4 * blocks :].view(self.dtype).to(dtype)
        values_Rkb = F.pad(values_Rn, (0, -length % self.block)).view(rows, blocks, self.block)
        return (values_Rkb * scale_Rk[..., None].to(dtype)).view(rows, -1)[:, :length]


FORMATS: dict[str, Format] = {
    "bf16": Bf16(),
    "int8": Blocks(torch.int8, 127.0),
    "fp8": Blocks(torch.float8_e4m3fn, 448.0),
}
