"""How gradients are written on the wire: bf16, or one byte a value with a scale per block.

R rows (one per receiver), n values of a row, A bytes of a row's message, b values of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # values that share a scale: 4 bytes of it add 1.6 %, and an outlier coarsens no more than 255 neighbours


class Format(Protocol):
    """Rows of numbers to rows of bytes and back. `sizes` are the tensors a row is made of: no two share a block.

    A weight that tensor ranks hold in common must be rounded alike on all of them, whatever lies beside it. A value
    that is not finite must come back as one that is not.
    """

    @property
    def block(self) -> int:
        """Values that are rounded together."""

    def encode(self, x_Rn: Tensor, sizes: Sequence[int]) -> Tensor:
        """The message of every row, uint8 [R, A]."""

    def decode(self, message_RA: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The rows, in `dtype`."""


@dataclass(frozen=True, slots=True)
class Bf16:
    """Two bytes a value: 8 bits of precision, the range of fp32."""

    block: int = 1

    def encode(self, x_Rn: Tensor, sizes: Sequence[int]) -> Tensor:
        """The upper halves of the numbers."""
        return x_Rn.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message_RA: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The numbers as they were rounded."""
        return message_RA.view(torch.bfloat16).to(dtype)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One byte a value, and an fp32 scale for every block: its largest magnitude becomes `top`."""

    dtype: torch.dtype  # torch.int8 or torch.float8_e4m3fn
    top: float
    block: int = BLOCK

    def encode(self, x_Rn: Tensor, sizes: Sequence[int]) -> Tensor:
        """Scales first, then the values; what fills up the blocks is not sent."""
        x_Rkb = _in_blocks(spread(x_Rn, sizes, self.block), self.block)
        # Smallest normal fp32: a block of zeros stays zero. A block with inf or nan gets such a scale, and all its
        # values come back as nan, which is what makes every rank skip the step.
        scale_Rk1 = (x_Rkb.abs().amax(-1, keepdim=True).float() / self.top).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (x_Rkb / scale_Rk1).clamp(-self.top, self.top)
        values = (scaled if self.dtype.is_floating_point else scaled.round()).to(self.dtype).view(torch.uint8)
        values_Rn = gather_up(values.flatten(1), sizes, self.block)
        return torch.cat([scale_Rk1.flatten(1).view(torch.uint8), values_Rn], dim=1)

    def decode(self, message_RA: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Every value times its block's scale."""
        rows, blocks = len(message_RA), sum(-(-size // self.block) for size in sizes)
        # Flat first: a single row keeps its odd length as stride, which does not pass as rows of fp32.
        scale_Rk = message_RA[:, : 4 * blocks].reshape(-1).view(torch.float32).view(rows, blocks)
        values_Rn = message_RA[:, 4 * blocks :].view(self.dtype).to(dtype)
        values_Rkb = _in_blocks(spread(values_Rn, sizes, self.block), self.block)
        return gather_up((values_Rkb * scale_Rk[..., None].to(dtype)).flatten(1), sizes, self.block)


def _in_blocks(x_Rn: Tensor, block: int) -> Tensor:
    return x_Rn.view(len(x_Rn), -1, block)


def spread(x_Rn: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """Fill every tensor of a row up to whole blocks."""
    if not any(size % block for size in sizes[:-1]):
        return F.pad(x_Rn, (0, -x_Rn.shape[1] % block))
    parts = x_Rn.split_with_sizes(list(sizes), dim=1)
    return torch.cat([F.pad(part, (0, -part.shape[1] % block)) for part in parts], dim=1)


def gather_up(x_Rn: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """Undo `spread`, and drop whatever follows the last tensor."""
    if not any(size % block for size in sizes[:-1]):
        return x_Rn[:, : sum(sizes)]
    starts = list(accumulate((size + -size % block for size in sizes), initial=0))
    return torch.cat([x_Rn.narrow(1, start, size) for start, size in zip(starts, sizes, strict=False)], dim=1)


FORMATS: dict[str, Format] = {
    "bf16": Bf16(),
    "int8": Blocks(torch.int8, 127.0),
    "fp8": Blocks(torch.float8_e4m3fn, 448.0),
}
