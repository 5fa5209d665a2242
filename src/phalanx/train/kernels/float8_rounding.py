"""Rounding of matrices to fp8 factors: with one scale per row, or transposed with one scale for the whole matrix.

An fp8 product reads both factors along the dimension it sums over. A weight gradient sums over tokens, but
activations and gradients are stored with tokens as rows: they are rounded into a transposed copy, for which plain
operations pass through memory twice. Here one kernel rounds and transposes tile by tile, with one scale for the
matrix: 3 bytes per element. The rows' scales are known by then, and the largest of them is that scale; one scale per
column would take another pass over the matrix.

In compiled code rows are rounded by plain operations, which the compiler fuses with the code that produced them.
Elsewhere, such as in blocks that are recomputed in backward, one kernel replaces seven.

Error: e4m3 keeps 4 significant bits, so an element is off by at most 1/16 of itself, or by 2⁻¹⁰ / 448 of the largest
element under its scale where it is smaller than 2⁻⁶ / 448 of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

FORMAT = torch.float8_e4m3fn
MOST = 448.0  # largest e4m3 number
LEAST = 1e-12  # lower bound of the maximum, so that the scale of zeros is not zero
TILE_TOKENS, TILE_COLUMNS = 128, 64  # the fastest of six on an H200, at widths from 2,048 to 14,336
WIDEST_ROW = 65536  # elements that one program holds


def plain_float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel of rows computes, in plain operations."""
    scale = rows.abs().amax(dim=-1, keepdim=True).float().clamp(min=LEAST) / MOST
    return (rows.float() / scale).clamp(-MOST, MOST).to(FORMAT).contiguous(), scale


def plain_float8_transposed(rows_TC: Tensor, scale: Tensor) -> Tensor:
    """What the kernel of the transposed copy computes, in plain operations."""
    return (rows_TC.t().float() / scale).clamp(-MOST, MOST).to(FORMAT).contiguous()


def round_rows(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows rounded to e4m3, [T, C], and the scale that each is multiplied by, [T, 1]."""
    if torch.compiler.is_compiling() or triton is None or not rows_TC.is_cuda or rows_TC.shape[1] > WIDEST_ROW:
        return plain_float8_rows(rows_TC)
    rounded: tuple[Tensor, Tensor] = float8_rows(rows_TC)
    return rounded


@torch.library.custom_op("phalanx::float8_rows", mutates_args=())
def float8_rows(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Run `plain_float8_rows` as one kernel."""
    if triton is None or not rows_TC.is_cuda:
        return plain_float8_rows(rows_TC)
    rows_TC = rows_TC.contiguous()
    tokens, columns = rows_TC.shape
    rounded_TC = torch.empty((tokens, columns), dtype=FORMAT, device=rows_TC.device)
    scale_T1 = torch.empty((tokens, 1), dtype=torch.float32, device=rows_TC.device)
    with torch.cuda.device(rows_TC.device):
        width = triton.next_power_of_2(columns)
        _round_row[(tokens,)](
            rows_TC, rounded_TC, scale_T1, columns, COLUMNS=width, FLOOR=LEAST, num_warps=min(16, max(1, width // 512))
        )
    return rounded_TC, scale_T1


@float8_rows.register_fake
def _row_shapes(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    tokens, columns = rows_TC.shape
    return rows_TC.new_empty((tokens, columns), dtype=FORMAT), rows_TC.new_empty((tokens, 1), dtype=torch.float32)


# Defined with library.define and impl: `custom_op` would wrap each call in Python twice more, for gradients and to
# check that results share no memory with inputs. That took the host 150 µs per call, and a step of twelve small
# layers makes 216 calls.
torch.library.define("phalanx::float8_transposed", "(Tensor rows, Tensor scale) -> Tensor")


def float8_transposed(rows_TC: Tensor, scale: Tensor) -> Tensor:
    """Return rowsᵀ rounded to e4m3, [C, T], all with the scale `scale`: the largest of the rows' scales."""
    transposed: Tensor = torch.ops.phalanx.float8_transposed(rows_TC, scale)
    return transposed


@torch.library.impl("phalanx::float8_transposed", ("cpu", "cuda"))
def _round_transposed(rows_TC: Tensor, scale: Tensor) -> Tensor:
    if triton is None or not rows_TC.is_cuda:
        return plain_float8_transposed(rows_TC, scale)
    rows_TC = rows_TC.contiguous()
    tokens, columns = rows_TC.shape
    columns_CT = torch.empty((columns, tokens), dtype=FORMAT, device=rows_TC.device)
    with torch.cuda.device(rows_TC.device):
        _round_and_transpose[(triton.cdiv(tokens, TILE_TOKENS), triton.cdiv(columns, TILE_COLUMNS))](
            rows_TC, scale, columns_CT, tokens, columns, TOKENS=TILE_TOKENS, COLUMNS=TILE_COLUMNS, num_warps=4
        )
    return columns_CT


@torch.library.register_fake("phalanx::float8_transposed")  # type: ignore[untyped-decorator]
def _transposed_shape(rows_TC: Tensor, scale: Tensor) -> Tensor:
    del scale
    tokens, columns = rows_TC.shape
    return rows_TC.new_empty((columns, tokens), dtype=FORMAT)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _round_row(rows, out, scales, columns,  # type: ignore[no-untyped-def]
                   COLUMNS: tl.constexpr, FLOOR: tl.constexpr):  # fmt: skip
        token, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
        row = tl.load(rows + token * columns + column, mask=column < columns, other=0).to(tl.float32)
        # The bits of non-negative floats compare as integers in the same order, and NaN lies above all of them.
        largest = tl.max(tl.abs(row).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
        scale = tl.maximum(largest, FLOOR, propagate_nan=tl.PropagateNan.ALL) / 448.0
        tl.store(out + token * columns + column, (row / scale).to(tl.float8e4nv), mask=column < columns)
        tl.store(scales + token, scale)

    @triton.jit  # type: ignore[untyped-decorator]
    def _round_and_transpose(rows, scale, out, tokens, columns,  # type: ignore[no-untyped-def]
                             TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None] & (column < columns)[None, :]
        tile = tl.load(rows + token[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0)
        rounded = (tile.to(tl.float32) / tl.load(scale)).to(tl.float8e4nv)
        places = column[:, None].to(tl.int64) * tokens + token[None, :]
        tl.store(out + places, tl.trans(rounded), mask=(column < columns)[:, None] & (token < tokens)[None, :])
