"""Rows rounded to e4m3 with a power of two as scale, and their transposed copy, made from the rounded rows.

A weight gradient sums over tokens, and fp8 products read both factors along the dimension they sum over: every factor
of a layer's three products is needed by rows and transposed. Scales that are powers of two allow the second copy to
be made from the first: a rounded row is brought to the scale of the whole matrix by its exponent alone, so that only
values below e4m3's normal numbers are rounded twice. That reads 1 byte per element and writes 1, where otherwise the
matrix in 16 bit would be read again; and the kernels that make the rows (`float8_norm.py`, `float8_swiglu.py`) never
write it in 16 bit.

Words of four bytes are transposed, not bytes: four rows at a time, by byte permutation in registers.

Error: a row's largest number lies between 224 and 448 of its scale. Relative to float64 an element is off by at most
1/16 of itself, or by 2⁻¹⁰ of the scale where it is smaller than 2⁻⁶ of that; in the transposed copy by 2⁻⁹ of the
scale of the whole matrix, twice as much, because values that small had been rounded before.

T tokens, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.train.kernels.float8_rounding import FORMAT, LEAST, MOST
from phalanx.train.kernels.triton_support import INTERPRETED, can_launch, on_device

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

TILE_WORDS, TURN_WARPS = 32, 4  # a tile of 128 tokens × 128 columns
WIDEST_BLOCK = 16384  # elements of a row that one program holds; wider rows are read twice

torch.library.define("phalanx::float8_scaled_rows", "(Tensor rows) -> (Tensor, Tensor)")
torch.library.define("phalanx::float8_turned", "(Tensor rows, Tensor scale, Tensor whole) -> Tensor")


def power_scale(most: Tensor) -> Tensor:
    """Return the smallest power of two by which `most`, float32 and not negative, becomes at most 448; NaN stays.

    >>> power_scale(torch.tensor([448.0, 449.0, 1.0])).tolist()
    [1.0, 2.0, 0.00390625]
    """
    bits = most.clamp(min=LEAST).view(torch.int32)
    # 448 is 1.75 · 2⁸: the exponent less 8, or less 7 where the fraction lies above 1.75.
    scale = (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).view(torch.float32)
    return torch.where(most < torch.inf, scale, torch.nan)


def plain_scaled_rows(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the result of the row kernels in plain operations; `rows_TC` as it was before any rounding."""
    wide = rows_TC.float()
    scale_T1 = power_scale(wide.abs().amax(dim=-1, keepdim=True))
    return (wide / scale_T1).clamp(-MOST, MOST).to(FORMAT).contiguous(), scale_T1


def scaled_rows(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows rounded to e4m3, [T, C], and the power of two that each is multiplied by, [T, 1]."""
    rounded_and_scale: tuple[Tensor, Tensor] = torch.ops.phalanx.float8_scaled_rows(rows_TC)
    return rounded_and_scale


def turned_rows(rows_TC: Tensor, scale_T1: Tensor, whole: Tensor) -> Tensor:
    """Return the transposed copy of rounded rows, [C, T], under the scale `whole`: the largest of the rows' scales."""
    transposed: Tensor = torch.ops.phalanx.float8_turned(rows_TC, scale_T1, whole)
    return transposed


def scaled_matrices(matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Round matrices of equal width by rows and stack them vertically: the factors of products with the same input."""
    if len(matrices) == 1 or not can_launch(*matrices):
        return scaled_rows(matrices[0] if len(matrices) == 1 else torch.cat(matrices))
    rows, columns = sum(len(matrix) for matrix in matrices), matrices[0].shape[1]
    rounded = torch.empty((rows, columns), dtype=FORMAT, device=matrices[0].device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=matrices[0].device)
    first = 0
    for matrix in matrices:
        _launch_rows(matrix, rounded[first : first + len(matrix)], scale[first : first + len(matrix)])
        first += len(matrix)
    return rounded, scale


@torch.library.impl("phalanx::float8_scaled_rows", ("cpu", "cuda"))
def _scale_rows(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    if not can_launch(rows_TC):
        return plain_scaled_rows(rows_TC)
    rounded, scale = empty_rows(rows_TC, rows_TC.shape[1])
    _launch_rows(rows_TC, rounded, scale)
    return rounded, scale


def empty_rows(like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Allocate rounded rows and their scales."""
    rounded = torch.empty((like.shape[0], columns), dtype=FORMAT, device=like.device)
    return rounded, torch.empty((like.shape[0], 1), dtype=torch.float32, device=like.device)


def _launch_rows(rows_TC: Tensor, rounded_TC: Tensor, scale_T1: Tensor) -> None:
    rows_TC = rows_TC if rows_TC.stride(1) == 1 else rows_TC.contiguous()
    tokens, columns = rows_TC.shape
    block, parts = row_blocks(columns)
    with on_device(rows_TC):
        _scaled_row[(tokens,)](
            rows_TC, rounded_TC, scale_T1, columns, rows_TC.stride(0),
            BLOCK=block, PARTS=parts, FLOOR=LEAST, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip


def row_blocks(columns: int) -> tuple[int, int]:
    """Return the elements of a row that a program processes at once, and the number of such blocks per row.

    >>> row_blocks(14336), row_blocks(53248)
    ((16384, 1), (16384, 4))
    """
    block = min(1 << max(columns - 1, 0).bit_length(), WIDEST_BLOCK)
    return block, -(-columns // block)


@torch.library.register_fake("phalanx::float8_scaled_rows")  # type: ignore[untyped-decorator]
def _row_shapes(rows_TC: Tensor) -> tuple[Tensor, Tensor]:
    return row_shapes(rows_TC, rows_TC.shape[1])


def row_shapes(like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """`empty_rows` for tensors without values, while tracing."""
    tokens = like.shape[0]
    return like.new_empty((tokens, columns), dtype=FORMAT), like.new_empty((tokens, 1), dtype=torch.float32)


@torch.library.impl("phalanx::float8_turned", ("cpu", "cuda"))
def _turn_rows(rows_TC: Tensor, scale_T1: Tensor, whole: Tensor) -> Tensor:
    tokens, columns = rows_TC.shape
    # Triton's interpreter cannot run inline assembly; the kernel moves words of 4 bytes.
    if not can_launch(rows_TC) or INTERPRETED or tokens % 4 or columns % 4:
        return (rows_TC.float() * (scale_T1 / whole)).to(FORMAT).t().contiguous()
    turned_CT = torch.empty((columns, tokens), dtype=FORMAT, device=rows_TC.device)
    with on_device(rows_TC):
        grid = (triton.cdiv(tokens, 4 * TILE_WORDS), triton.cdiv(columns, 4 * TILE_WORDS))
        _turn_words[grid](
            rows_TC.contiguous().view(torch.int32), scale_T1, whole, turned_CT.view(torch.int32), tokens // 4,
            columns // 4, TOKENS=TILE_WORDS, COLUMNS=TILE_WORDS, num_warps=TURN_WARPS,
        )  # fmt: skip
    return turned_CT


@torch.library.register_fake("phalanx::float8_turned")  # type: ignore[untyped-decorator]
def _turned_shape(rows_TC: Tensor, scale_T1: Tensor, whole: Tensor) -> Tensor:
    del scale_T1, whole
    return rows_TC.new_empty((rows_TC.shape[1], rows_TC.shape[0]))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def largest_bits(values):  # type: ignore[no-untyped-def]
        """Return the largest magnitude as an integer: the bits of floats keep their order, and NaN lies above all."""
        return tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=0)

    @triton.jit  # type: ignore[untyped-decorator]
    def scale_of_bits(bits, FLOOR: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return `power_scale` of a magnitude given by its bits, and its inverse."""
        magnitude = tl.maximum(bits, tl.full((), FLOOR, tl.float32).to(tl.int32, bitcast=True))
        power = ((magnitude + 0x1FFFFF) & 0x7F800000) - (8 << 23)
        scale = power.to(tl.float32, bitcast=True)
        undone = ((254 << 23) - power).to(tl.float32, bitcast=True)
        return tl.where(bits < 0x7F800000, scale, float("nan")), tl.where(bits < 0x7F800000, undone, float("nan"))

    @triton.jit  # type: ignore[untyped-decorator]
    def _scaled_row(rows, out, scales, columns, stride,  # type: ignore[no-untyped-def]
                    BLOCK: tl.constexpr, PARTS: tl.constexpr, FLOOR: tl.constexpr):  # fmt: skip
        token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        row = tl.load(rows + token * stride + column, mask=column < columns, other=0).to(tl.float32)
        bits = largest_bits(row)
        if PARTS > 1:
            for block in range(1, PARTS):
                place = column + block * BLOCK
                more = tl.load(rows + token * stride + place, mask=place < columns, other=0).to(tl.float32)
                bits = tl.maximum(bits, largest_bits(more))
        scale, undone = scale_of_bits(bits, FLOOR)
        tl.store(scales + token, scale)
        tl.store(out + token * columns + column, (row * undone).to(tl.float8e4nv), mask=column < columns)
        if PARTS > 1:
            for block in range(1, PARTS):
                place = column + block * BLOCK
                more = tl.load(rows + token * stride + place, mask=place < columns, other=0).to(tl.float32)
                tl.store(out + token * columns + place, (more * undone).to(tl.float8e4nv), mask=place < columns)

    @triton.jit  # type: ignore[untyped-decorator]
    def _row_factor(scales, token, tokens, whole):  # type: ignore[no-untyped-def]
        """Return the factor from a row's scale to the matrix's, twice in 16 bit: a power of two, zero below 2⁻²⁴."""
        scale = tl.load(scales + token, mask=token < tokens, other=0.0)
        undone = ((254 << 23) - whole.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        factor = tl.where(whole == whole, scale * undone, whole)
        half = factor.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (half | (half << 16))[:, None]

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn_words(rows, scales, whole, out, tokens, columns,  # type: ignore[no-untyped-def]
                    TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
        """Rescale and transpose; `tokens` and `columns` count words of four, TOKENS × COLUMNS of them per program."""
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None] & (column < columns)[None, :]
        place = (token * 4)[:, None].to(tl.int64) * columns + column[None, :]
        word0 = tl.load(rows + place, mask=inside, other=0)
        word1 = tl.load(rows + place + columns, mask=inside, other=0)
        word2 = tl.load(rows + place + columns * 2, mask=inside, other=0)
        word3 = tl.load(rows + place + columns * 3, mask=inside, other=0)
        top = tl.load(whole)
        factor0 = _row_factor(scales, token * 4, tokens * 4, top)
        factor1 = _row_factor(scales, token * 4 + 1, tokens * 4, top)
        factor2 = _row_factor(scales, token * 4 + 2, tokens * 4, top)
        factor3 = _row_factor(scales, token * 4 + 3, tokens * 4, top)
        # Every word times its row's factor, then the bytes of four rows become words of four columns.
        turned0, turned1, turned2, turned3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 left, right, row0, row1, row2, row3, front0, front1, back0, back1;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 left, low;
            cvt.rn.f16x2.e4m3x2 right, high;
            mul.f16x2 left, left, $8;
            mul.f16x2 right, right, $8;
            cvt.rn.satfinite.e4m3x2.f16x2 low, left;
            cvt.rn.satfinite.e4m3x2.f16x2 high, right;
            mov.b32 row0, {low, high};
            mov.b32 {low, high}, $5;
            cvt.rn.f16x2.e4m3x2 left, low;
            cvt.rn.f16x2.e4m3x2 right, high;
            mul.f16x2 left, left, $9;
            mul.f16x2 right, right, $9;
            cvt.rn.satfinite.e4m3x2.f16x2 low, left;
            cvt.rn.satfinite.e4m3x2.f16x2 high, right;
            mov.b32 row1, {low, high};
            mov.b32 {low, high}, $6;
            cvt.rn.f16x2.e4m3x2 left, low;
            cvt.rn.f16x2.e4m3x2 right, high;
            mul.f16x2 left, left, $10;
            mul.f16x2 right, right, $10;
            cvt.rn.satfinite.e4m3x2.f16x2 low, left;
            cvt.rn.satfinite.e4m3x2.f16x2 high, right;
            mov.b32 row2, {low, high};
            mov.b32 {low, high}, $7;
            cvt.rn.f16x2.e4m3x2 left, low;
            cvt.rn.f16x2.e4m3x2 right, high;
            mul.f16x2 left, left, $11;
            mul.f16x2 right, right, $11;
            cvt.rn.satfinite.e4m3x2.f16x2 low, left;
            cvt.rn.satfinite.e4m3x2.f16x2 high, right;
            mov.b32 row3, {low, high};
            prmt.b32 front0, row0, row1, 0x5140;
            prmt.b32 front1, row2, row3, 0x5140;
            prmt.b32 back0, row0, row1, 0x7362;
            prmt.b32 back1, row2, row3, 0x7362;
            prmt.b32 $0, front0, front1, 0x5410;
            prmt.b32 $1, front0, front1, 0x7632;
            prmt.b32 $2, back0, back1, 0x5410;
            prmt.b32 $3, back0, back1, 0x7632;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
            [word0, word1, word2, word3, factor0, factor1, factor2, factor3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        inside = (column < columns)[:, None] & (token < tokens)[None, :]
        place = (column * 4)[:, None].to(tl.int64) * tokens + token[None, :]
        tl.store(out + place, tl.trans(turned0), mask=inside)
        tl.store(out + place + tokens, tl.trans(turned1), mask=inside)
        tl.store(out + place + tokens * 2, tl.trans(turned2), mask=inside)
        tl.store(out + place + tokens * 3, tl.trans(turned3), mask=inside)
