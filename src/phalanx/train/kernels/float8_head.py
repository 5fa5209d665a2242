"""The three matrix products of the output head in fp8, with the loss between them, for a chunk of the tokens at a
time.

Hidden states and weight are rounded to e4m3 with a power of two per row for the logits, and read transposed under one
scale for the gradients, as in a layer (`float8_rows.py`). The gradient of a logit is its probability, minus one at
the target, so it always lies between -1 and 1 and has a constant scale: no maximum needs to be computed. It is
rounded to e5m2, whose values reach from 1 down to 5e-10 under that scale. In e4m3 every probability below 2e-6 would
become zero, which with 128,256 words is most of them, and these words would never be pushed down. The kernel of the
loss writes fp8 itself: 1 byte instead of writing and rereading 16 bits.

The gradient of the weight sums over the tokens of several chunks at once (`group_tokens`), because fp8 products
cannot add to their output. All sums are kept in fp32 (`parallel/float8.py` gives the reason): with fast sums, logits
of 512 products each came out 0.2 % too small on an H200.

Error: e5m2 keeps 3 significant bits, so a logit's gradient is off by at most 1/8 of itself; logits are off by the
rounding of both factors to e4m3, at most 1/8 of the sum of |hidden · weight|.

T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.plan.lean_step import group_tokens, loss_chunk
from phalanx.train.data.batches import IGNORED
from phalanx.train.kernels.float8_product import UNIT, multiply_fp8
from phalanx.train.kernels.float8_rows import scaled_rows, turned_rows
from phalanx.train.kernels.softmax_rows import plain_row_gradients, row_blocks_and_warps
from phalanx.train.kernels.triton_support import INTERPRETED, can_launch, on_device

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

GRADIENT_FORMAT = torch.float8_e5m2
GRADIENT_SCALE = 2.0**-15  # the largest e5m2 number is 57,344: 1 becomes 32,768
TILE_WORDS, TURN_WARPS = 32, 4  # a tile of 128 × 128 bytes

torch.library.define("phalanx::cross_entropy_float8", "(Tensor logits, Tensor targets) -> (Tensor, Tensor)")


def fits_float8_head(tokens: int, width: int, vocab: int) -> bool:
    """Return whether fp8 products support these sizes."""
    return not (tokens % UNIT or width % UNIT or vocab % UNIT)


def float8_loss_and_gradients(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss, and the gradients of `scale` times the loss with respect to hidden states and weight."""
    tokens, vocab, dtype = hidden_TD.shape[0], weight_VD.shape[0], hidden_TD.dtype
    chunk = chunk or int(loss_chunk(tokens, vocab))
    grad_hidden, grad_weight = torch.empty_like(hidden_TD), None
    by_row = scaled_rows(weight_VD)
    weight_scale = by_row[1].amax()
    by_column = turned_rows(*by_row, weight_scale), weight_scale
    gradient_scale = torch.full((), GRADIENT_SCALE * scale, dtype=torch.float32, device=hidden_TD.device)
    group = max(chunk, int(group_tokens(chunk, vocab)))
    losses = []
    for first in range(0, tokens, group):
        last = min(first + group, tokens)
        turned_VT = torch.empty((vocab, last - first), dtype=GRADIENT_FORMAT, device=hidden_TD.device)
        inputs = scaled_rows(hidden_TD[first:last])
        for start in range(first, last, chunk):
            stop = min(start + chunk, last)
            chunk_tokens = slice(start - first, stop - first)
            logits_TV = multiply_fp8((inputs[0][chunk_tokens], inputs[1][chunk_tokens]), by_row, dtype, fast_sums=False)
            gradient_TV, chunk_losses = torch.ops.phalanx.cross_entropy_float8(logits_TV, targets_T[start:stop])
            del logits_TV
            losses.append(chunk_losses)
            grad_hidden[start:stop] = multiply_fp8((gradient_TV, gradient_scale), by_column, dtype, fast_sums=False)
            turn_bytes(gradient_TV, turned_VT[:, chunk_tokens])
            del gradient_TV
        input_scale = inputs[1].amax()
        turned_inputs = turned_rows(*inputs, input_scale), input_scale
        product = multiply_fp8((turned_VT, gradient_scale), turned_inputs, dtype, fast_sums=False)
        del turned_VT
        grad_weight = product if grad_weight is None else grad_weight.add_(product)
    assert grad_weight is not None
    return torch.cat(losses).sum(), grad_hidden, grad_weight


# Logits to fp8 gradients. -------------------------------------------------------------------------------------------


@torch.library.impl("phalanx::cross_entropy_float8", ("cpu", "cuda"))
def _round_gradient(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed loss by the logits, in e5m2 under `GRADIENT_SCALE`, and losses_T."""
    if not can_launch(logits_TV):
        return plain_float8_gradient(logits_TV, targets_T)
    tokens, vocab = logits_TV.shape
    rounded_TV = torch.empty((tokens, vocab), dtype=GRADIENT_FORMAT, device=logits_TV.device)
    losses_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    block, warps = row_blocks_and_warps(vocab)
    with on_device(logits_TV):
        _row_float8_gradient[(tokens,)](
            logits_TV, targets_T.contiguous(), rounded_TV, losses_T, vocab, logits_TV.stride(0), 1.0 / GRADIENT_SCALE,
            IGNORED_TARGET=IGNORED, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return rounded_TV, losses_T


def plain_float8_gradient(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the kernel's result in plain operations."""
    grad_TV, losses_T = plain_row_gradients(logits_TV, targets_T)
    return (grad_TV / GRADIENT_SCALE).to(GRADIENT_FORMAT), losses_T


@torch.library.register_fake("phalanx::cross_entropy_float8")  # type: ignore[untyped-decorator]
def _gradient_shapes(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    del targets_T
    rounded = logits_TV.new_empty(logits_TV.shape, dtype=GRADIENT_FORMAT)
    return rounded, logits_TV.new_empty(logits_TV.shape[:1], dtype=torch.float32)


def turn_bytes(rows_TV: Tensor, out_VT: Tensor) -> None:
    """Write the transposed matrix into `out_VT`, whose rows may be slices of longer rows."""
    tokens, columns = rows_TV.shape
    step = out_VT.stride(0)
    # Triton's interpreter cannot run inline assembly; the kernel moves words of 4 bytes.
    if not can_launch(rows_TV) or INTERPRETED or tokens % 4 or columns % 4 or step % 4 or out_VT.storage_offset() % 4:
        out_VT.copy_(rows_TV.t())
        return
    grid = (triton.cdiv(tokens, 4 * TILE_WORDS), triton.cdiv(columns, 4 * TILE_WORDS))
    with on_device(rows_TV):
        _turn_plain_words[grid](
            rows_TV.view(torch.int32), out_VT.view(torch.uint8), tokens // 4, columns // 4, step // 4,
            TOKENS=TILE_WORDS, COLUMNS=TILE_WORDS, num_warps=TURN_WARPS,
        )  # fmt: skip


if triton is not None:
    from phalanx.train.kernels.softmax_rows import row_log2_sum

    @triton.jit  # type: ignore[untyped-decorator]
    def _row_float8_gradient(logits, targets, out, losses, vocab, stride, factor,  # type: ignore[no-untyped-def]
                             IGNORED_TARGET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """`_row_gradient` of linear_cross_entropy.py, written to a separate matrix with one byte per element."""
        LOG2E: tl.constexpr = 1.4426950408889634
        row = tl.program_id(0).to(tl.int64)
        start_of_row, start_of_out = logits + row * stride, out + row * vocab
        target = tl.load(targets + row)
        columns = tl.arange(0, BLOCK)
        if target == IGNORED_TARGET:
            for start in range(0, vocab, BLOCK):
                column = start + columns
                tl.store(start_of_out + column, tl.zeros((BLOCK,), tl.float32).to(tl.float8e5), mask=column < vocab)
            tl.store(losses + row, 0.0)
        else:
            is_word = (target >= 0) & (target < vocab)
            target_logit = tl.load(start_of_row + target, mask=is_word, other=float("nan")).to(tl.float32)
            logsum = row_log2_sum(start_of_row, vocab, BLOCK)
            for start in range(0, vocab, BLOCK):
                column = start + columns
                x = tl.load(start_of_row + column, mask=column < vocab, other=0.0).to(tl.float32)
                gradient = tl.exp2(x * LOG2E - logsum) - tl.where(column == target, 1.0, 0.0)
                tl.store(start_of_out + column, (gradient * factor).to(tl.float8e5), mask=column < vocab)
            tl.store(losses + row, logsum / LOG2E - target_logit)

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn_plain_words(rows, out, tokens, columns, step,  # type: ignore[no-untyped-def]
                          TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
        """Transpose words of 4 bytes, TOKENS × COLUMNS of them per program; `_turn_words` without scales."""
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (token < tokens)[:, None] & (column < columns)[None, :]
        place = (token * 4)[:, None].to(tl.int64) * columns + column[None, :]
        word0 = tl.load(rows + place, mask=inside, other=0)
        word1 = tl.load(rows + place + columns, mask=inside, other=0)
        word2 = tl.load(rows + place + columns * 2, mask=inside, other=0)
        word3 = tl.load(rows + place + columns * 3, mask=inside, other=0)
        turned0, turned1, turned2, turned3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 front0, front1, back0, back1;
            prmt.b32 front0, $4, $5, 0x5140;
            prmt.b32 front1, $6, $7, 0x5140;
            prmt.b32 back0, $4, $5, 0x7362;
            prmt.b32 back1, $6, $7, 0x7362;
            prmt.b32 $0, front0, front1, 0x5410;
            prmt.b32 $1, front0, front1, 0x7632;
            prmt.b32 $2, back0, back1, 0x5410;
            prmt.b32 $3, back0, back1, 0x7632;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r",
            [word0, word1, word2, word3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        words = out.to(tl.pointer_type(tl.int32), bitcast=True)
        inside = (column < columns)[:, None] & (token < tokens)[None, :]
        place = (column * 4)[:, None].to(tl.int64) * step + token[None, :]
        tl.store(words + place, tl.trans(turned0), mask=inside)
        tl.store(words + place + step, tl.trans(turned1), mask=inside)
        tl.store(words + place + step * 2, tl.trans(turned2), mask=inside)
        tl.store(words + place + step * 3, tl.trans(turned3), mask=inside)
