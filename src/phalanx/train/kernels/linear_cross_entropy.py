"""Output head and cross-entropy that never keep all logits: the tokens are processed in chunks.

The logits of a chunk are computed, turned in place into their own gradient, multiplied into the gradients of hidden
states and weight, and overwritten by those of the next chunk. Both gradients are complete when forward ends, so
backward only scales them: three matrix products in total, as with all logits kept, and none of them repeated.
Products are cuBLAS's; softmax, loss and gradient of a row are one Triton kernel, which reads the row from memory once
(the second read hits the L2 cache).

The caller passes the factor that the loss will be multiplied by (`scale`), so that gradients are rounded once, at the
scale at which they are used. With another factor backward is still correct: it multiplies by the ratio.

Error: that of a product in the dtype of the inputs. The weight's gradient is a sum over chunks that is rounded after
each of them: at most as many roundings of the largest value in its row as there are chunks instead of one, 5 for
16,384 tokens of 128,256 words.

T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.plan.lean_step import loss_chunk
from phalanx.train.data.batches import IGNORED
from phalanx.train.kernels.float8_head import fits_float8_head, float8_loss_and_gradients
from phalanx.train.kernels.kernel_op import Inputs, KernelOp, KernelWork, Outputs, Shape, register_kernel
from phalanx.train.kernels.softmax_rows import plain_row_gradients, row_blocks_and_warps
from phalanx.train.kernels.triton_support import can_launch, on_device

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None


def linear_cross_entropy(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, scale: float = 1.0, chunk: int = 0, float8: bool = False
) -> Tensor:
    """Return the cross-entropy of hidden · weightᵀ, summed over the valid targets, in float32 or wider.

    Gradients are computed in forward, for a loss that is multiplied by `scale`. `chunk` is the number of tokens at a
    time; 0 uses `loss_chunk`. With `float8`, the three products run in fp8 while training, where the sizes allow it
    (`float8_head.py`).
    """
    if torch.compiler.is_compiling():
        loss: Tensor = linear_cross_entropy_op(hidden_TD, weight_VD, targets_T, scale, chunk, float8)[0]
        return loss
    if not torch.is_grad_enabled():
        return _loss_and_gradients(
            hidden_TD, weight_VD, targets_T, scale, chunk, wants_hidden=False, wants_weight=False
        )[0]
    out: Tensor = _LinearCrossEntropy.apply(hidden_TD, weight_VD, targets_T, scale, chunk, float8)
    return out


class _LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy_op` as an autograd.Function, so that a trace shows every matrix product."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: float, chunk: int, float8: bool
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        loss, grad_hidden, grad_weight = _loss_and_gradients(
            hidden_TD, weight_VD, targets_T, scale, chunk, wants_hidden=wants_hidden,
            wants_weight=wants_weight, float8=float8,
        )  # fmt: skip
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.scale = scale
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if ctx.scale is None:
            raise RuntimeError("this loss went backward before: its gradients are made once, in forward")
        grad_hidden, grad_weight = ctx.saved_tensors
        # Exactly 1 where the caller passed the right scale.
        factor = grads[0] / torch.full_like(grads[0], ctx.scale)
        ctx.scale = None
        for grad in (grad_hidden, grad_weight):
            if grad is not None:
                torch.ops.phalanx.scale_unless_one_(grad, factor)
        return grad_hidden, grad_weight, None, None, None, None


def _loss_and_gradients(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    scale: float,
    chunk: int,
    *,
    wants_hidden: bool = True,
    wants_weight: bool = True,
    float8: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the summed loss, and the gradients of `scale` times it with respect to hidden states and weight."""
    tokens, vocab = hidden_TD.shape[0], weight_VD.shape[0]
    if float8 and tokens and fits_float8_head(tokens, hidden_TD.shape[1], vocab):
        return float8_loss_and_gradients(hidden_TD, weight_VD, targets_T, scale, chunk)
    grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
    grad_weight = torch.empty_like(weight_VD) if wants_weight else None
    if not tokens:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        return hidden_TD.new_zeros((), dtype=wide), grad_hidden, torch.zeros_like(weight_VD) if wants_weight else None
    chunk = chunk or int(loss_chunk(tokens, vocab))
    chunk_logits = hidden_TD.new_empty(min(chunk, tokens), vocab)
    losses = []
    for start, stop in _parts(tokens, chunk):
        chunk_hidden, logits = hidden_TD[start:stop], chunk_logits[: stop - start]
        torch.mm(chunk_hidden, weight_VD.t(), out=logits)
        losses.append(torch.ops.phalanx.cross_entropy_gradient_(logits, targets_T[start:stop], scale))
        if grad_hidden is not None:
            torch.mm(logits, weight_VD, out=grad_hidden[start:stop])
        if grad_weight is not None:
            if start:
                torch.addmm(grad_weight, logits.t(), chunk_hidden, out=grad_weight)
            else:
                torch.mm(logits.t(), chunk_hidden, out=grad_weight)
    return torch.cat(losses).sum(), grad_hidden, grad_weight


def _parts(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the first token and the end of each chunk."""
    for start in range(0, tokens, chunk):
        yield start, min(start + chunk, tokens)


# As one operator, for compiled code and exports. --------------------------------------------------------------------


@torch.library.custom_op("phalanx::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: float, chunk: int, float8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and the gradients of `scale` times it with respect to hidden states and weight."""
    loss, grad_hidden, grad_weight = _loss_and_gradients(hidden_TD, weight_VD, targets_T, scale, chunk, float8=float8)
    assert grad_hidden is not None
    assert grad_weight is not None
    return loss, grad_hidden, grad_weight


@linear_cross_entropy_op.register_fake
def _loss_shapes(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale: float, chunk: int, float8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del targets_T, scale, chunk, float8
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    return hidden_TD.new_empty((), dtype=wide), torch.empty_like(hidden_TD), torch.empty_like(weight_VD)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.scale = inputs[3]
    ctx.save_for_backward(output[1], output[2])


def _scale_gradients(
    ctx: Any, grad_loss: Tensor, _: Tensor | None, __: Tensor | None
) -> tuple[Tensor, Tensor, None, None, None, None]:
    """Scale the gradients that forward computed; second derivatives are not supported."""
    grad_hidden, grad_weight = ctx.saved_tensors
    factor = grad_loss / torch.full_like(grad_loss, ctx.scale)
    return (
        (grad_hidden * factor).to(grad_hidden.dtype),
        (grad_weight * factor).to(grad_weight.dtype),
        None,
        None,
        None,
        None,
    )


linear_cross_entropy_op.register_autograd(_scale_gradients, setup_context=_keep_gradients)


# Logits to their gradient, in place. --------------------------------------------------------------------------------

torch.library.define("phalanx::cross_entropy_gradient_", "(Tensor(a!) logits, Tensor targets, float scale) -> Tensor")
torch.library.define("phalanx::scale_unless_one_", "(Tensor(a!) values, Tensor factor) -> ()")


@torch.library.impl("phalanx::cross_entropy_gradient_", ("cpu", "cuda"))
def _turn_into_gradient(logits_TV: Tensor, targets_T: Tensor, scale: float) -> Tensor:
    """Return losses_T and overwrite the logits with `scale` times the gradient of the losses' sum."""
    if not can_launch(logits_TV):
        return plain_gradient_(logits_TV, targets_T, scale)
    tokens, vocab = logits_TV.shape
    losses_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    block, warps = row_blocks_and_warps(vocab)
    with on_device(logits_TV):
        _row_gradient[(tokens,)](
            logits_TV, targets_T.contiguous(), losses_T, vocab, logits_TV.stride(0), scale,
            IGNORED_TARGET=IGNORED, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return losses_T


def plain_gradient_(logits_TV: Tensor, targets_T: Tensor, scale: float) -> Tensor:
    """Compute the kernel's result in plain operations."""
    grad_TV, losses_T = plain_row_gradients(logits_TV, targets_T)
    logits_TV.copy_(grad_TV * scale)
    return losses_T


@torch.library.register_fake("phalanx::cross_entropy_gradient_")  # type: ignore[untyped-decorator]
def _losses_shape(logits_TV: Tensor, targets_T: Tensor, scale: float) -> Tensor:
    del targets_T, scale
    return logits_TV.new_empty(logits_TV.shape[:1], dtype=torch.promote_types(logits_TV.dtype, torch.float32))


@torch.library.impl("phalanx::scale_unless_one_", ("cpu", "cuda"))
def _scale_in_place(values: Tensor, factor: Tensor) -> None:
    """Multiply by a number that only the device knows; if it is 1, the values are neither read nor written."""
    if not can_launch(values):
        values.mul_(factor)
        return
    assert values.is_contiguous()
    with on_device(values):
        tile = 8192
        _scale_tiles[(triton.cdiv(values.numel(), 8 * tile),)](
            values, factor.float(), values.numel(), TILE=tile, num_warps=8
        )


@torch.library.register_fake("phalanx::scale_unless_one_")  # type: ignore[untyped-decorator]
def _scaled_shape(values: Tensor, factor: Tensor) -> None:
    del values, factor


if triton is not None:
    from phalanx.train.kernels.softmax_rows import row_log2_sum

    @triton.jit  # type: ignore[untyped-decorator]
    def _row_gradient(logits, targets, losses, vocab, stride, scale,  # type: ignore[no-untyped-def]
                      IGNORED_TARGET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        LOG2E: tl.constexpr = 1.4426950408889634
        row = tl.program_id(0).to(tl.int64)
        start_of_row = logits + row * stride
        target = tl.load(targets + row)
        columns = tl.arange(0, BLOCK)
        if target == IGNORED_TARGET:
            for start in range(0, vocab, BLOCK):
                column = start + columns
                tl.store(start_of_row + column, tl.zeros((BLOCK,), tl.float32), mask=column < vocab)
            tl.store(losses + row, 0.0)
        else:
            is_word = (target >= 0) & (target < vocab)
            target_logit = tl.load(start_of_row + target, mask=is_word, other=float("nan")).to(tl.float32)
            logsum = row_log2_sum(start_of_row, vocab, BLOCK)
            for start in range(0, vocab, BLOCK):
                column = start + columns
                x = tl.load(start_of_row + column, mask=column < vocab, other=0.0).to(tl.float32)
                tl.store(start_of_row + column, tl.exp2(x * LOG2E - logsum) * scale, mask=column < vocab)
            # Another thread wrote this element without the -1 of the target: wait for it before overwriting.
            tl.debug_barrier()
            own = (tl.exp2(target_logit * LOG2E - logsum) - 1.0) * scale
            tl.store(start_of_row + target, own, mask=is_word)
            tl.store(losses + row, logsum / LOG2E - target_logit)

    @triton.jit  # type: ignore[untyped-decorator]
    def _scale_tiles(values, factor, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        by = tl.load(factor)
        if by != 1.0:
            first = tl.program_id(0).to(tl.int64) * TILE * 8
            for tile in range(8):
                place = first + tile * TILE + tl.arange(0, TILE)
                x = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32)
                tl.store(values + place, x * by, mask=place < count)


# For the catalogue. -------------------------------------------------------------------------------------------------


def reference_loss(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Outputs:
    """All logits at once."""
    logits_TV = hidden_TD @ weight_VD.t()
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return (torch.nn.functional.cross_entropy(logits_TV.to(wide), targets_T, reduction="sum", ignore_index=IGNORED),)


def _make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    options: Any = {"generator": generator, "device": device, "dtype": torch.float32}
    hidden = torch.randn(shape["tokens"], shape["width"], **options).to(dtype)
    weight = (torch.randn(shape["vocab"], shape["width"], **options) * shape["width"] ** -0.5).to(dtype)
    targets = torch.randint(0, shape["vocab"], (shape["tokens"],), generator=generator, device=device)
    targets[torch.rand(shape["tokens"], generator=generator, device=device) < 0.05] = IGNORED
    return hidden, weight, targets


def _draw_dominant(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw hidden states that give one class most of the probability; it is the target of nine tokens in ten."""
    hidden, weight, targets = _make_inputs(shape, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    winner = torch.randint(0, shape["vocab"], (), generator=generator, device=device)
    # The logit of the class grows by twice the logarithm of the vocabulary: its probability is close to 1.
    direction = weight[winner].float()
    amount = 2.0 * math.log(max(2, shape["vocab"])) / direction.square().sum().clamp(min=0.1)
    hidden = (hidden.float() + amount * direction).to(dtype)
    is_winner = torch.rand(shape["tokens"], generator=generator, device=device) < 0.9
    return hidden, weight, torch.where(is_winner & (targets != IGNORED), winner, targets)


def _draw_uneven_targets(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw targets as in text, where a few words are most of them; a third of the tokens is ignored."""
    hidden, weight, _ = _make_inputs(shape, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    rank = torch.rand(shape["tokens"], generator=generator, device=device).pow(4.0)
    words = (rank * shape["vocab"]).long().clamp(max=shape["vocab"] - 1)
    is_ignored = torch.rand(shape["tokens"], generator=generator, device=device) < 1 / 3
    return 2.0 * hidden, weight, torch.where(is_ignored, IGNORED, words)


def _draw_no_targets(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw a batch of padding, or of a prompt alone: all tokens are ignored."""
    hidden, weight, targets = _make_inputs(shape, dtype, device, seed)
    return hidden, weight, torch.full_like(targets, IGNORED)


def _count_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    tokens, width, vocab = shape["tokens"], shape["width"], shape["vocab"]
    factors = (tokens * width + vocab * width) * dtype.itemsize
    return KernelWork(read_bytes=factors + tokens * 8, written_bytes=factors + 4, flops=6 * tokens * width * vocab)


def _sizes(*rows: tuple[int, int, int]) -> list[Shape]:
    return [{"tokens": tokens, "width": width, "vocab": vocab} for tokens, width, vocab in rows]


LINEAR_CROSS_ENTROPY = register_kernel(
    KernelOp(
        name="linear-cross-entropy",
        summary="output head and summed cross-entropy, without holding the logits",
        reference=reference_loss,
        variants={
            "builtin": reference_loss,
            "chunked": lambda hidden, weight, targets: (linear_cross_entropy(hidden, weight, targets),),
        },
        make_inputs=_make_inputs,
        shapes=_sizes(
            (4096, 1024, 32000), (16384, 2048, 32000), (32768, 2048, 32000), (8192, 4096, 32000),
            (4096, 768, 50304), (32768, 1024, 50304), (8192, 2048, 128256), (16384, 2048, 128256),
            (4096, 4096, 128256), (8192, 4096, 128256), (16384, 4096, 128256), (8192, 8192, 128256),
            (4096, 3584, 152064),
        ),
        odd_shapes=_sizes((1, 16, 33), (37, 24, 101), (130, 72, 1031), (257, 40, 4099)),
        count_work=_count_work,
        structured_inputs={
            "one dominant class": _draw_dominant,
            "uneven targets": _draw_uneven_targets,
            "no targets": _draw_no_targets,
        },
        # Logits of a million: rounding decides which of two is larger.
        unfit_patterns=("huge values",),
        error_bound=lambda dtype: (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps,
        gradients=(0, 1),
    )
)  # fmt: skip
