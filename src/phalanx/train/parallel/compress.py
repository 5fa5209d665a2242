"""Compressed gradient sums with error feedback: the rounding error of one step is added to the next.

Every rank sends each other rank its rounded part (all-to-all), sums in fp32 in the order of the ranks, rounds the sum
and sends it to all (all-gather). Reducing in the wire's own format, as a bf16 or int8 all-reduce would, rounds at
every hop or overflows. All collectives are blocking and in the caller's order, so any number of buckets is safe on
gloo. docs/decisions/0013-gradient-compression.md gives the reasons.

W ranks of the group, m values of one rank's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.errors import mistake, nearest
from phalanx.train.parallel import exchanges
from phalanx.train.parallel.compress_powersgd import PowerSgd


class Codec(Protocol):
    """Sums gradient buckets over a group with fewer bytes on the wire; `key` numbers the bucket."""

    bytes_sent: int  # bytes that this rank has sent in all calls so far
    bytes_raw: int  # bytes that uncompressed ring all-reduces of the same buckets would have sent
    is_off: bool  # sum exactly, without compression and without error feedback

    def prepare(self, key: int, shapes: Sequence[torch.Size]) -> None:
        """Declare, once and before the first sum of a bucket, the shapes of its tensors in order."""

    def all_reduce(self, bucket: Tensor, group: ProcessGroup, key: int) -> None:
        """Sum the bucket in place; blocking, and called in the same order on every rank."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors carried from step to step; they are valid only for this rank and this layout."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors returned by `state`; an empty mapping starts without carried errors."""

    def rescale(self, factor: float) -> None:
        """Multiply the carried errors by `factor`, by which the loss scale has changed."""


def build_codec(kind: str, *, rank: int = 4, where: str = "parallel.compression") -> Codec:
    """Build the codec for `parallel.compression`; `rank` is the rank of PowerSGD's factors.

    Raises UserError for an unknown `kind`, with `where` as the location of the setting.
    """
    if kind in FORMATS:
        return Quantised(FORMATS[kind])
    if kind == "powersgd":
        return PowerSgd(rank)
    near = nearest(kind, KINDS)
    raise mistake(
        where,
        f'the trainer has no gradient compression "{kind}"',
        fix=f"use {', '.join(KINDS)} or none" + (f'; did you mean "{near}"?' if near else ""),
    )


class Quantised:
    """Codec that rounds every value to a format of fewer bytes."""

    def __init__(self, form: Format) -> None:
        self._format = form
        self._errors: dict[str, Tensor] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}
        self.bytes_sent = 0
        self.bytes_raw = 0
        self.is_off = False

    def prepare(self, key: int, shapes: Sequence[torch.Size]) -> None:
        """Declare the tensors of a bucket, or of each rank's part of it for `reduce_scatter`; default is one tensor."""
        self._sizes[key] = tuple(shape.numel() for shape in shapes)

    @torch.no_grad()
    def all_reduce(self, bucket: Tensor, group: ProcessGroup, key: int) -> None:
        """Sum the bucket in place; all ranks end with the same bits."""
        ranks, size = group.size(), bucket.numel()
        if ranks == 1:
            return
        if self.is_off:
            dist.all_reduce(bucket, group=group)
            return
        sizes, block = self._sizes.get(key, (size,)), self._format.block
        x_1n = pad_blocks(bucket.reshape(1, -1), sizes, block)
        # Every rank's part is a whole number of blocks, so that no block spans two ranks.
        x_Wm = F.pad(x_1n, (0, -x_1n.shape[1] % (ranks * block))).view(ranks, -1)
        row_sizes = (x_Wm.shape[1],)
        sum_m = self._sum_compressed(x_Wm, row_sizes, group, f"{key}/parts")
        message_1A = self._round_with_error(sum_m[None], row_sizes, f"{key}/sum")
        decoded_Wm = self._format.decode(exchanges.all_gather(message_1A[0], group), row_sizes, sum_m.dtype)
        bucket.copy_(gather_up(decoded_Wm.reshape(1, -1), sizes, block).view_as(bucket))
        self.bytes_sent += (ranks - 1) * message_1A.shape[1]
        self.bytes_raw += 2 * (ranks - 1) * size * bucket.element_size() // ranks

    @torch.no_grad()
    def reduce_scatter(self, output: Tensor, bucket: Tensor, group: ProcessGroup, key: int) -> None:
        """Write this rank's part of the sum of all ranks' buckets into `output`."""
        if self.is_off:
            dist.reduce_scatter_tensor(output, bucket, group=group)
            return
        sizes = self._sizes.get(key, (output.numel(),))
        output.copy_(
            self._sum_compressed(bucket.reshape(group.size(), -1), sizes, group, f"{key}/parts").view_as(output)
        )
        self.bytes_raw += (group.size() - 1) * output.numel() * bucket.element_size()

    def state(self) -> dict[str, Tensor]:
        """Return the errors of every bucket."""
        return dict(self._errors)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the errors of every bucket."""
        self._errors = {name: tensor.clone() for name, tensor in state.items()}

    def rescale(self, factor: float) -> None:
        """Multiply the errors by the change of the loss scale."""
        for error in self._errors.values():
            error.mul_(factor)

    def _sum_compressed(self, x_Wm: Tensor, sizes: Sequence[int], group: ProcessGroup, key: str) -> Tensor:
        message_WA = self._round_with_error(x_Wm, sizes, key)
        self.bytes_sent += (group.size() - 1) * message_WA.shape[1]
        received_WA = exchanges.all_to_all(message_WA, group)
        return self._format.decode(received_WA, sizes, wide_dtype(x_Wm)).sum(0)

    def _round_with_error(self, x_Rm: Tensor, sizes: Sequence[int], key: str) -> Tensor:
        """Encode x plus the carried error; the rounding error of the message becomes the new carried error."""
        error = self._errors.get(key)
        if error is None:
            error = self._errors[key] = torch.zeros_like(x_Rm, dtype=wide_dtype(x_Rm))
        error += x_Rm
        message_RA = self._format.encode(error, sizes)
        error -= self._format.decode(message_RA, sizes, error.dtype)
        # A step that is not finite is skipped and must not leave an error
        error.nan_to_num_(0.0, 0.0, 0.0)
        return message_RA


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for sums and errors of x: fp32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


# Formats of gradients on the wire: bf16, or one byte per value with a scale per block.
#
# R rows (one per receiver), n values of a row, A bytes of a row's message, b values of a block.


# Values that share a scale: its 4 bytes add 1.6 %, and an outlier coarsens at most 255 neighbours.
BLOCK = 256


class Format(Protocol):
    """Conversion of rows of numbers to rows of bytes and back.

    `sizes` are the lengths of the tensors in a row; two tensors never share a block, because a weight that several
    tensor ranks hold must be rounded alike on all of them, whatever its neighbours in the bucket. A value that is not
    finite must decode to one that is not finite.
    """

    @property
    def block(self) -> int:
        """Number of values that are rounded together."""

    def encode(self, x_Rn: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the message of every row, uint8 [R, A]."""

    def decode(self, message_RA: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the rows, converted to `dtype`."""


@dataclass(frozen=True, slots=True)
class Bf16:
    """Format of two bytes per value: 8 bits of precision, the range of fp32."""

    block: int = 1

    def encode(self, x_Rn: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the values as bf16 bytes."""
        return x_Rn.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message_RA: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the rounded values."""
        return message_RA.view(torch.bfloat16).to(dtype)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Format of one byte per value and one fp32 scale per block, which maps its largest magnitude to `top`."""

    dtype: torch.dtype  # torch.int8 or torch.float8_e4m3fn
    top: float
    block: int = BLOCK

    def encode(self, x_Rn: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return scales, then values; the padding of blocks is not sent."""
        x_Rkb = _in_blocks(pad_blocks(x_Rn, sizes, self.block), self.block)
        # Smallest normal fp32: a block of zeros stays zero. A block with inf or nan gets such a scale, and all its
        # values come back as nan, which is what makes every rank skip the step.
        scale_Rk1 = (x_Rkb.abs().amax(-1, keepdim=True).float() / self.top).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (x_Rkb / scale_Rk1).clamp(-self.top, self.top)
        values = (scaled if self.dtype.is_floating_point else scaled.round()).to(self.dtype).view(torch.uint8)
        values_Rn = gather_up(values.flatten(1), sizes, self.block)
        return torch.cat([scale_Rk1.flatten(1).view(torch.uint8), values_Rn], dim=1)

    def decode(self, message_RA: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Multiply every value by its block's scale."""
        rows, blocks = len(message_RA), sum(-(-size // self.block) for size in sizes)
        # Flat first: a single row keeps its odd length as stride, which does not pass as rows of fp32.
        scale_Rk = message_RA[:, : 4 * blocks].reshape(-1).view(torch.float32).view(rows, blocks)
        values_Rn = message_RA[:, 4 * blocks :].view(self.dtype).to(dtype)
        values_Rkb = _in_blocks(pad_blocks(values_Rn, sizes, self.block), self.block)
        return gather_up((values_Rkb * scale_Rk[..., None].to(dtype)).flatten(1), sizes, self.block)


def _in_blocks(x_Rn: Tensor, block: int) -> Tensor:
    return x_Rn.view(len(x_Rn), -1, block)


def pad_blocks(x_Rn: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """Pad every tensor of a row with zeros to a multiple of `block`."""
    if not any(size % block for size in sizes[:-1]):
        return F.pad(x_Rn, (0, -x_Rn.shape[1] % block))
    tensors = x_Rn.split_with_sizes(list(sizes), dim=1)
    return torch.cat([F.pad(tensor, (0, -tensor.shape[1] % block)) for tensor in tensors], dim=1)


def gather_up(x_Rn: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """Undo `pad_blocks`, and drop any padding after the last tensor."""
    if not any(size % block for size in sizes[:-1]):
        return x_Rn[:, : sum(sizes)]
    starts = list(accumulate((size + -size % block for size in sizes), initial=0))
    return torch.cat([x_Rn.narrow(1, start, size) for start, size in zip(starts, sizes, strict=False)], dim=1)


FORMATS: dict[str, Format] = {
    "bf16": Bf16(),
    "int8": Blocks(torch.int8, 127.0),
    "fp8": Blocks(torch.float8_e4m3fn, 448.0),
}
KINDS = (*FORMATS, "powersgd")
