"""Tokens to their experts and back: one pass over memory each way, forward and backward, without atomics.

Experts need their rows next to each other. `gather_rows` reads a token once and writes it to each of its K rows;
plain operations copy every token K times and read all copies again to sort them. `combine_rows` reads a token's K
expert outputs where the experts left them, weighs and adds them; backward writes each output's gradient to its row
and computes the gradient of its weight from the same reads. Every row is written by one program, and sums have a
fixed order: the results are bitwise reproducible.

Error: gathering is exact. Sums over K run in float32 and are rounded once: half a unit in the last place of the
result plus K · 2⁻²⁴ of the sum of magnitudes. The gradient of a weight is a product of two rows of D, summed in
float32 in a tree: at most (D / 32 + 10) · 2⁻²⁴ of the sum of its terms' magnitudes, about 2⁻²³ of the product of the
rows' lengths. Where terms cancel that can exceed a unit in the last place of the result.

T tokens, K experts per token, M = T · K visits, D model. A visit is one (token, expert) pair; a token's visits are
adjacent. `order_M` lists the visits sorted by expert and `back_M` is its inverse: visit v is in row back[v].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.train.kernels.kernel_op import Inputs, KernelOp, KernelWork, Outputs, Shape, register_kernel
from phalanx.train.kernels.triton_support import can_launch, on_device, runs_at_once

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

# Each thread has 8 columns of all K rows: 16 bytes per read, and sums over K need no exchange between threads. In tiles
# of 8 × 512 two warps shared a column, and kernels ran at half the speed of light on an H200 instead of four fifths.
COLUMNS_PER_WARP, MOST_WARPS = 256, 4

torch.library.define("phalanx::expert_gather", "(Tensor x, Tensor back) -> Tensor")
torch.library.define("phalanx::expert_sum", "(Tensor rows, Tensor back) -> Tensor")
torch.library.define("phalanx::expert_combine", "(Tensor y, Tensor back, Tensor weight) -> Tensor")
torch.library.define(
    "phalanx::expert_combine_gradients", "(Tensor grad, Tensor y, Tensor back, Tensor weight) -> (Tensor, Tensor)"
)


# Plain operations, for a CPU, and for a GPU where they were measured to be faster. ------------------------------------


def repeat_tokens(x_TD: Tensor, times: int) -> Tensor:
    """Each token once per visit, the visits of a token side by side."""
    return x_TD[:, None, :].expand(-1, times, -1).flatten(0, 1)


def weigh_answers(y_MD: Tensor, weight_TK: Tensor) -> Tensor:
    """A token's answers (side by side, in the order it ranked its experts), weighted and added."""
    y_TKD = y_MD.view(*weight_TK.shape, y_MD.shape[-1])
    return (y_TKD * weight_TK[:, :, None]).sum(dim=1).to(y_MD.dtype)


def permute_rows(x_MD: Tensor, order_M: Tensor, back_M: Tensor) -> Tensor:
    """x[order], where `back` undoes `order`: the gradient is a gather too, so no atomics and always the same bits."""
    moved: Tensor = _Permute.apply(x_MD, order_M, back_M)  # type: ignore[no-untyped-call]
    return moved


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_M: Tensor, back_M: Tensor) -> Tensor:
        ctx.save_for_backward(back_M)
        return x_MD[order_M]

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (back_M,) = ctx.saved_tensors
        return grad_MD[back_M], None, None


# To the experts. ----------------------------------------------------------------------------------------------------


def gather_rows(x_TD: Tensor, back_TK: Tensor) -> Tensor:
    """Copy token t to the rows back[t, k] of its K visits; every row belongs to one visit."""
    if runs_at_once(x_TD, back_TK):
        gathered: Tensor = _GatherVisits.apply(x_TD, back_TK)
        return gathered
    rows: Tensor = torch.ops.phalanx.expert_gather(x_TD, back_TK)
    return rows


class _GatherVisits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, back_TK: Tensor) -> Tensor:
        ctx.save_for_backward(back_TK)
        return _gather(x_TD, back_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _add_visits(grads[0], *ctx.saved_tensors), None


def _gather(x_TD: Tensor, back_TK: Tensor) -> Tensor:
    rows_MD = x_TD.new_empty(back_TK.numel(), x_TD.shape[1])
    if not can_launch(x_TD):
        return rows_MD.index_copy_(0, back_TK.flatten(), repeat_tokens(x_TD, back_TK.shape[1]))
    if not rows_MD.numel():
        return rows_MD
    tile = _tile_of(back_TK.shape[1], x_TD.shape[1])
    with on_device(x_TD):
        _gather_tile[(len(x_TD), triton.cdiv(x_TD.shape[1], tile["COLUMNS"]))](
            x_TD.contiguous(), back_TK.contiguous(), rows_MD, **tile
        )
    return rows_MD


def _add_visits(rows_MD: Tensor, back_TK: Tensor) -> Tensor:
    """Sum the rows of each token's visits."""
    if not can_launch(rows_MD):
        wide = torch.promote_types(rows_MD.dtype, torch.float32)
        return rows_MD[back_TK].to(wide).sum(dim=1).to(rows_MD.dtype)
    return _launch_sum(rows_MD, back_TK, None)


def _launch_sum(rows_MD: Tensor, back_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    (tokens, times), width = back_TK.shape, rows_MD.shape[1]
    sum_TD = rows_MD.new_empty(tokens, width)
    if not sum_TD.numel():
        return sum_TD
    tile = _tile_of(times, width)
    with on_device(rows_MD):
        _sum_tile[(tokens, triton.cdiv(width, tile["COLUMNS"]))](
            rows_MD.contiguous(), back_TK.contiguous(), back_TK if weight_TK is None else weight_TK.contiguous(),
            sum_TD, WEIGHTED=weight_TK is not None, **tile,
        )  # fmt: skip
    return sum_TD


def _tile_of(times: int, width: int) -> dict[str, int]:
    """Return the launch parameters for `times` visits per token and `width` columns."""
    warps = min(MOST_WARPS, int(triton.next_power_of_2(triton.cdiv(width, COLUMNS_PER_WARP))))
    visits = int(triton.next_power_of_2(times))
    return {"TIMES": times, "WIDTH": width, "VISITS": visits, "COLUMNS": COLUMNS_PER_WARP * warps, "num_warps": warps}


torch.library.impl("phalanx::expert_gather", ("cpu", "cuda"), _gather)
torch.library.impl("phalanx::expert_sum", ("cpu", "cuda"), _add_visits)


@torch.library.register_fake("phalanx::expert_gather")  # type: ignore[untyped-decorator]
def _gathered_shape(x_TD: Tensor, back_TK: Tensor) -> Tensor:
    return x_TD.new_empty(back_TK.shape[0] * back_TK.shape[1], x_TD.shape[1])


@torch.library.register_fake("phalanx::expert_sum")  # type: ignore[untyped-decorator]
def _summed_shape(rows_MD: Tensor, back_TK: Tensor) -> Tensor:
    return rows_MD.new_empty(back_TK.shape[0], rows_MD.shape[1])


def _keep_places(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[1])


def _gather_backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
    return torch.ops.phalanx.expert_sum(grad_MD, *ctx.saved_tensors), None


torch.library.register_autograd("phalanx::expert_gather", _gather_backward, setup_context=_keep_places)


# And back. ----------------------------------------------------------------------------------------------------------


def combine_rows(y_MD: Tensor, back_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return for each token the weighted sum of its K expert outputs, which are in rows back[t]."""
    if runs_at_once(y_MD, back_TK, weight_TK):
        combined: Tensor = _CombineAnswers.apply(y_MD, back_TK, weight_TK)
        return combined
    sum_TD: Tensor = torch.ops.phalanx.expert_combine(y_MD, back_TK, weight_TK)
    return sum_TD


class _CombineAnswers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, back_TK: Tensor, weight_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_MD, back_TK, weight_TK)
        return _combine(y_MD, back_TK, weight_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        by_row, by_weight = _combine_gradients(grads[0], *ctx.saved_tensors)
        return by_row, None, by_weight


def _combine(y_MD: Tensor, back_TK: Tensor, weight_TK: Tensor) -> Tensor:
    if not can_launch(y_MD, weight_TK):
        return weigh_answers(y_MD[back_TK.flatten()], weight_TK)
    return _launch_sum(y_MD, back_TK, weight_TK)


def _combine_gradients(grad_TD: Tensor, y_MD: Tensor, back_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows, in the experts' order, and of the weights."""
    by_row, by_weight = y_MD.new_empty(y_MD.shape), weight_TK.new_empty(weight_TK.shape)
    if not can_launch(grad_TD, y_MD, weight_TK):
        wide = torch.promote_types(y_MD.dtype, weight_TK.dtype)
        grad_T1D, weight_TK1 = grad_TD[:, None].to(wide), weight_TK[:, :, None].to(wide)
        by_row.index_copy_(0, back_TK.flatten(), (grad_T1D * weight_TK1).flatten(0, 1).to(y_MD.dtype))
        return by_row, (grad_T1D * y_MD[back_TK].to(wide)).sum(-1).to(weight_TK.dtype)
    if not by_row.numel():
        return by_row, by_weight.zero_()
    with on_device(y_MD):
        _combine_gradient_tile[(len(grad_TD),)](
            grad_TD.contiguous(), y_MD.contiguous(), back_TK.contiguous(), weight_TK.contiguous(), by_row, by_weight,
            **_tile_of(back_TK.shape[1], y_MD.shape[1]),
        )  # fmt: skip
    return by_row, by_weight


torch.library.impl("phalanx::expert_combine", ("cpu", "cuda"), _combine)
torch.library.impl("phalanx::expert_combine_gradients", ("cpu", "cuda"), _combine_gradients)


@torch.library.register_fake("phalanx::expert_combine")  # type: ignore[untyped-decorator]
def _combined_shape(y_MD: Tensor, back_TK: Tensor, weight_TK: Tensor) -> Tensor:
    del back_TK
    return y_MD.new_empty(weight_TK.shape[0], y_MD.shape[1])


@torch.library.register_fake("phalanx::expert_combine_gradients")  # type: ignore[untyped-decorator]
def _combine_gradient_shapes(
    grad_TD: Tensor, y_MD: Tensor, back_TK: Tensor, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    del grad_TD, back_TK
    return y_MD.new_empty(y_MD.shape), weight_TK.new_empty(weight_TK.shape)


def _keep_answers(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, Tensor]:
    by_row, by_weight = torch.ops.phalanx.expert_combine_gradients(grad_TD, *ctx.saved_tensors)
    return by_row, None, by_weight


torch.library.register_autograd("phalanx::expert_combine", _combine_backward, setup_context=_keep_answers)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _gather_tile(x, back, rows, TIMES: tl.constexpr, WIDTH: tl.constexpr,  # type: ignore[no-untyped-def]
                     VISITS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        visit = tl.arange(0, VISITS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        place = tl.load(back + token * TIMES + visit, mask=visit < TIMES, other=0)
        value = tl.load(x + token * WIDTH + column, mask=column < WIDTH, other=0.0)
        inside = (visit < TIMES)[:, None] & (column < WIDTH)[None, :]
        all_rows = tl.broadcast_to(value[None, :], (VISITS, COLUMNS))
        tl.store(rows + place[:, None] * WIDTH + column[None, :], all_rows, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _sum_tile(rows, back, weight, total, WEIGHTED: tl.constexpr, TIMES: tl.constexpr,  # type: ignore[no-untyped-def]
                  WIDTH: tl.constexpr, VISITS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        visit = tl.arange(0, VISITS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        place = tl.load(back + token * TIMES + visit, mask=visit < TIMES, other=0)
        inside = (visit < TIMES)[:, None] & (column < WIDTH)[None, :]
        value = tl.load(rows + place[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            share = tl.load(weight + token * TIMES + visit, mask=visit < TIMES, other=0.0).to(tl.float32)
            value = value * share[:, None]
        tl.store(total + token * WIDTH + column, tl.sum(value, axis=0), mask=column < WIDTH)

    @triton.jit  # type: ignore[untyped-decorator]
    def _combine_gradient_tile(grad, y, back, weight, by_row, by_weight, TIMES: tl.constexpr,  # type: ignore[no-untyped-def]
                               WIDTH: tl.constexpr, VISITS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        visit = tl.arange(0, VISITS)
        place = tl.load(back + token * TIMES + visit, mask=visit < TIMES, other=0)
        share = tl.load(weight + token * TIMES + visit, mask=visit < TIMES, other=0.0).to(tl.float32)
        products = tl.zeros((VISITS, COLUMNS), dtype=tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = (visit < TIMES)[:, None] & (column < WIDTH)[None, :]
            where = place[:, None] * WIDTH + column[None, :]
            d = tl.load(grad + token * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
            products += d * tl.load(y + where, mask=inside, other=0.0).to(tl.float32)
            tl.store(by_row + where, d * share[:, None], mask=inside)
        tl.store(by_weight + token * TIMES + visit, tl.sum(products, axis=1), mask=visit < TIMES)


# For the catalogue. -------------------------------------------------------------------------------------------------


def _plain_gather(x_TD: Tensor, order_M: Tensor, back_M: Tensor) -> Outputs:
    return (permute_rows(repeat_tokens(x_TD, len(back_M) // len(x_TD)), order_M, back_M),)


def _plain_combine(y_MD: Tensor, order_M: Tensor, back_M: Tensor, weight_TK: Tensor) -> Outputs:
    return (weigh_answers(permute_rows(y_MD, back_M, order_M), weight_TK),)


def _kernel_gather(x_TD: Tensor, order_M: Tensor, back_M: Tensor) -> Outputs:
    del order_M
    return (gather_rows(x_TD, back_M.view(len(x_TD), -1)),)


def _kernel_combine(y_MD: Tensor, order_M: Tensor, back_M: Tensor, weight_TK: Tensor) -> Outputs:
    del order_M
    return (combine_rows(y_MD, back_M.view_as(weight_TK), weight_TK),)


def _draw_visits(
    shape: Shape, generator: torch.Generator, device: torch.device, *, busy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw order, back and weights for unevenly chosen experts; with `busy`, nearly all tokens choose the same one."""
    liking_E = torch.randn(shape["experts"], generator=generator, device=device)
    if busy:
        liking_E[torch.randint(0, shape["experts"], (), generator=generator, device=device)] += 8.0
    scores_TE = torch.randn(shape["tokens"], shape["experts"], generator=generator, device=device) + liking_E
    best = scores_TE.softmax(dim=-1).topk(shape["chosen"], dim=-1)
    order_M = best.indices.flatten().argsort(stable=True)
    return order_M, order_M.argsort(), best.values / best.values.sum(dim=-1, keepdim=True)


def _gather_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, *, busy: bool = False) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    order_M, back_M, _ = _draw_visits(shape, generator, device, busy=busy)
    x_TD = torch.randn(shape["tokens"], shape["width"], generator=generator, device=device).to(dtype)
    return x_TD, order_M, back_M


def _combine_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, *, busy: bool = False) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    order_M, back_M, weight_TK = _draw_visits(shape, generator, device, busy=busy)
    y_MD = torch.randn(len(order_M), shape["width"], generator=generator, device=device).to(dtype)
    # The router's weights are float32 even where rows are bfloat16.
    return y_MD, order_M, back_M, weight_TK.to(torch.promote_types(dtype, torch.float32))


def _count_gather(shape: Shape, dtype: torch.dtype) -> KernelWork:
    """Count the work: forward reads tokens and writes their visits, backward the reverse; both read the row numbers."""
    token, visits = shape["width"] * dtype.itemsize, shape["tokens"] * shape["chosen"]
    moved = (shape["tokens"] + visits) * token
    return KernelWork(read_bytes=moved + 16 * visits, written_bytes=moved, flops=visits * shape["width"])


def _count_combine(shape: Shape, dtype: torch.dtype) -> KernelWork:
    """Count the work: outputs are read twice and gradients written, sums written and their gradients read."""
    token, visits = shape["width"] * dtype.itemsize, shape["tokens"] * shape["chosen"]
    moved = (shape["tokens"] + visits) * token
    return KernelWork(
        read_bytes=moved + visits * (token + 24), written_bytes=moved + 4 * visits, flops=5 * visits * shape["width"]
    )


def _sizes(*rows: tuple[int, int, int, int]) -> list[Shape]:
    return [{"tokens": row[0], "width": row[1], "experts": row[2], "chosen": row[3]} for row in rows]


SHAPES = _sizes(
    (8192, 4096, 8, 2), (32768, 4096, 8, 2),  # Mixtral 8x7B
    (16384, 6144, 8, 2),  # Mixtral 8x22B
    (4096, 7168, 256, 8), (16384, 7168, 256, 8),  # DeepSeek-V3
    (16384, 5120, 160, 6),  # DeepSeek-V2
    (16384, 2048, 64, 6),  # DeepSeek-V2-Lite
    (8192, 2048, 128, 8), (32768, 2048, 128, 8),  # Qwen3-30B-A3B
    (16384, 4096, 128, 8),  # Qwen3-235B-A22B
    (32768, 2048, 64, 8),  # OLMoE
    (16384, 2880, 32, 4), (16384, 2880, 128, 4),  # gpt-oss 20b and 120b
    (16384, 5120, 16, 1),  # Llama 4 Scout
    (8192, 7168, 384, 8),  # Kimi K2
)  # fmt: skip
# At least two visits: the product of two rows may cancel, and errors are relative to the largest of a token's.
ODD_SHAPES = _sizes((1, 7, 8, 2), (13, 129, 9, 3), (37, 513, 17, 8), (101, 1031, 11, 5))

EXPERT_GATHER = register_kernel(
    KernelOp(
        name="expert-gather",
        summary="tokens to the experts they chose, rows sorted by expert",
        reference=_plain_gather,
        variants={"builtin": _plain_gather, "triton": _kernel_gather},
        make_inputs=_gather_inputs,
        shapes=SHAPES,
        odd_shapes=ODD_SHAPES,
        count_work=_count_gather,
        error_bound=lambda dtype: 4 * torch.finfo(dtype).eps,
        structured_inputs={"one busy expert": partial(_gather_inputs, busy=True)},
        reduction_length=lambda shape: shape["chosen"],
        gradients=(0,),
    )
)
EXPERT_COMBINE = register_kernel(
    KernelOp(
        name="expert-combine",
        summary="experts' answers back to their tokens, weighted and added",
        reference=_plain_combine,
        variants={"builtin": _plain_combine, "triton": _kernel_combine},
        make_inputs=_combine_inputs,
        shapes=SHAPES,
        odd_shapes=ODD_SHAPES,
        count_work=_count_combine,
        # 2⁻¹⁴ for float32, because products of rows may cancel (see above); tf32 would still exceed it.
        error_bound=lambda dtype: max(4 * torch.finfo(dtype).eps, 2.0**-14),
        structured_inputs={"one busy expert": partial(_combine_inputs, busy=True)},
        reduction_length=lambda shape: max(shape["chosen"], shape["width"]),
        gradients=(0, 3),
    )
)
