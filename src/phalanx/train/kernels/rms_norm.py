"""RMSNorm, with or without the residual that is added before it: one pass forward, one backward.

Forward keeps 1 / rms of each row. Backward gives each program a band of rows, so that it can sum the weight's
gradient in registers; the bands' sums are added by one small reduction. With a residual both the sum and its norm are
results: the sum is the stream that the next layer reads.

Error: rows are summed in float32 and results rounded once: a unit in the last place of the largest value in the row.
The weight's gradient is a float32 sum over all rows.

T tokens, D width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as builtin_norm

from phalanx.train.kernels.kernel_op import Inputs, KernelOp, KernelWork, Outputs, Shape, register_kernel
from phalanx.train.kernels.triton_support import can_launch, on_device, runs_at_once

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

EPS = 1e-5
WIDEST_ROW = 32768  # elements; one program keeps a row in registers
BANDS_PER_PROCESSOR = 2

torch.library.define("phalanx::rms_norm", "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
torch.library.define(
    "phalanx::add_rms_norm", "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "phalanx::rms_norm_gradients",
    "(Tensor grad, Tensor? more, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = EPS) -> Tensor:
    """Return x / rms(x) · weight over the last dimension."""
    if runs_at_once(x, weight_D):
        output: Tensor = _RmsNormFunction.apply(x, weight_D, eps)
        return output
    normed: Tensor = torch.ops.phalanx.rms_norm(x, weight_D, eps)[0]
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself."""
    if runs_at_once(x, residual, weight_D):
        outputs: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x, residual, weight_D, eps)
        return outputs
    normed, stream, _ = torch.ops.phalanx.add_rms_norm(x, residual, weight_D, eps)
    return normed, stream


@torch.library.impl("phalanx::rms_norm", ("cpu", "cuda"))
def _norm_rows(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, _, scale = _forward(x, None, weight_D, eps)
    return normed, scale


@torch.library.impl("phalanx::add_rms_norm", ("cpu", "cuda"))
def _norm_sum(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight_D, eps)


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed, _, scale = _forward(x, None, weight_D, eps)
        ctx.save_for_backward(x, weight_D, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_backward(grads[0], None, *ctx.saved_tensors), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, stream, scale = _forward(x, residual, weight_D, eps)
        ctx.save_for_backward(stream, weight_D, scale)
        return normed, stream

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        by_sum, by_weight = _backward(grads[0], grads[1], *ctx.saved_tensors)
        return by_sum, by_sum, by_weight, None


def _forward(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    if not can_launch(x, weight_D) or width > WIDEST_ROW:
        return _plain_forward(x, residual, weight_D, eps)
    x = x.contiguous()
    rows = x.numel() // width
    normed = torch.empty_like(x)
    stream = torch.empty_like(x) if residual is not None else x
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    with on_device(x):
        _norm_row[(rows,)](
            x, x if residual is None else residual.contiguous(), weight_D.contiguous(), normed, stream, scale, width,
            eps, ADDS=residual is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return normed, stream, scale


def _plain_forward(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stream = x.clone() if residual is None else x + residual
    wide = stream.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * scale[..., None] * weight_D.to(wide.dtype)).to(x.dtype), stream, scale


def _scale_shape(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.register_fake("phalanx::rms_norm")  # type: ignore[untyped-decorator]
def _norm_shapes(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del weight_D, eps
    return torch.empty_like(x, memory_format=torch.contiguous_format), _scale_shape(x)


@torch.library.register_fake("phalanx::add_rms_norm")  # type: ignore[untyped-decorator]
def _sum_shapes(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    del residual, weight_D, eps
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like), _scale_shape(x)


# Backward: `more` is the gradient that reaches the sum directly, not through the norm. ------------------------------


@torch.library.impl("phalanx::rms_norm_gradients", ("cpu", "cuda"))
def _norm_gradients(
    grad: Tensor, more: Tensor | None, x: Tensor, weight_D: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    return _backward(grad, more, x, weight_D, scale)


def norm_gradients(grad: Tensor, x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight where forward kept no scales; they are recomputed from the rows."""
    return _backward(grad, None, x, weight_D, None, eps)


def scaled_norm_gradients(
    grad: Tensor, more: Tensor | None, x: Tensor, weight_D: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight from the scales, 1 / rms, of forward; `more` is added to that of x."""
    return _backward(grad, more, x, weight_D, scale)


def _backward(
    grad: Tensor, more: Tensor | None, x: Tensor, weight_D: Tensor, scale: Tensor | None, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if not can_launch(grad, x, weight_D) or width > WIDEST_ROW:
        if scale is None:
            scale = _plain_forward(x, None, weight_D, eps)[2]
        return _plain_gradients(grad, more, x, weight_D, scale)
    x, grad = x.contiguous(), grad.contiguous()
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    processors = _processors(x.device.index) if x.is_cuda else 2
    warps = _warps(block)
    bands = max(1, min(rows, processors * max(BANDS_PER_PROCESSOR, 32 // warps)))
    by_x = torch.empty_like(x)
    by_weight = torch.empty((bands, width), dtype=torch.float32, device=x.device)
    with on_device(x):
        _norm_band[(bands,)](
            grad, grad if more is None else more.contiguous(), x, weight_D.contiguous(),
            by_weight if scale is None else scale, by_x, by_weight, rows, width, triton.cdiv(rows, bands), eps,
            ADDS=more is not None, SCALED=scale is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return by_x, by_weight.sum(0).to(weight_D.dtype)


def _plain_gradients(
    grad: Tensor, more: Tensor | None, x: Tensor, weight_D: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    wide = scale.dtype
    normed = x.to(wide) * scale[..., None]
    inner = grad.to(wide) * weight_D.to(wide)
    by_x = scale[..., None] * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    if more is not None:
        by_x = by_x + more.to(wide)
    by_weight = (grad.to(wide) * normed).flatten(0, -2).sum(0)
    return by_x.to(x.dtype).contiguous(), by_weight.to(weight_D.dtype)


@torch.library.register_fake("phalanx::rms_norm_gradients")  # type: ignore[untyped-decorator]
def _gradient_shapes(
    grad: Tensor, more: Tensor | None, x: Tensor, weight_D: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    del grad, more, scale
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight_D)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _norm_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    x, weight_D, scale = ctx.saved_tensors
    by_x, by_weight = torch.ops.phalanx.rms_norm_gradients(grad, None, x, weight_D, scale)
    return by_x, by_weight, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])


def _sum_backward(ctx: Any, grad: Tensor, more: Tensor | None, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    stream, weight_D, scale = ctx.saved_tensors
    by_sum, by_weight = torch.ops.phalanx.rms_norm_gradients(grad, more, stream, weight_D, scale)
    return by_sum, by_sum, by_weight, None


torch.library.register_autograd("phalanx::rms_norm", _norm_backward, setup_context=_keep_rows)
torch.library.register_autograd("phalanx::add_rms_norm", _sum_backward, setup_context=_keep_sum)


def _warps(block: int) -> int:
    """Return the warps for a block of elements: one per 512, at most 16."""
    return max(1, min(16, block // 512))


@cache
def _processors(index: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _norm_row(x, residual, weight, normed, stream, scales, width, eps,  # type: ignore[no-untyped-def]
                  ADDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside, place = column < width, row * width + column
        value = tl.load(x + place, mask=inside, other=0.0)
        if ADDS:
            # Rounded to the stream's dtype first: the norm is of the values that the next layer reads.
            value = (value.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(
                value.dtype
            )
            tl.store(stream + place, value, mask=inside)
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
        by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + place, wide * scale * by, mask=inside)
        tl.store(scales + row, scale)

    @triton.jit  # type: ignore[untyped-decorator]
    def _norm_band(grad, more, x, weight, scales, by_x, by_weight, rows, width, band, eps,  # type: ignore[no-untyped-def]
                   ADDS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        column = tl.arange(0, BLOCK)
        inside = column < width
        by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        first = tl.program_id(0) * band
        for row in range(first, tl.minimum(first + band, rows)):
            place = tl.cast(row, tl.int64) * width + column
            d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            if SCALED:  # noqa: SIM108 (Triton leaves out the branch that is not taken)
                scale = tl.load(scales + row)
            else:
                scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
            n = value * scale
            inner = d * by
            result = scale * (inner - n * (tl.sum(inner * n, axis=0) / width))
            if ADDS:
                result += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(by_x + place, result, mask=inside)
            total += d * n
        tl.store(by_weight + tl.program_id(0).to(tl.int64) * width + column, total, mask=inside)


# For the catalogue. -------------------------------------------------------------------------------------------------


def _reference_norm(x: Tensor, weight_D: Tensor) -> Outputs:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return ((normed * weight_D.to(wide.dtype)).to(x.dtype),)


def _reference_sum(x: Tensor, residual: Tensor, weight_D: Tensor) -> Outputs:
    stream = x + residual
    return (*_reference_norm(stream, weight_D), stream)


def _builtin_sum(x: Tensor, residual: Tensor, weight_D: Tensor) -> Outputs:
    stream = x + residual
    return builtin_norm(stream, weight_D.shape, weight_D, EPS), stream


def _norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(shape["tokens"], shape["width"], generator=generator, device=device).to(dtype)
    weight = (1.0 + 0.1 * torch.randn(shape["width"], generator=generator, device=device)).to(dtype)
    return rows, weight


def _sum_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    rows, weight = _norm_inputs(shape, dtype, device, seed)
    return rows, _norm_inputs(shape, dtype, device, seed + 1)[0], weight


def _norm_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    """Count the work: forward reads and writes the rows once; backward reads them and their gradient and writes one."""
    each = shape["tokens"] * shape["width"] * dtype.itemsize
    return KernelWork(read_bytes=3 * each, written_bytes=2 * each, flops=12 * shape["tokens"] * shape["width"])


def _sum_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    """Count the work: forward reads two tensors and writes two; backward reads three and writes one."""
    each = shape["tokens"] * shape["width"] * dtype.itemsize
    return KernelWork(read_bytes=5 * each, written_bytes=3 * each, flops=14 * shape["tokens"] * shape["width"])


def _sizes(*rows: tuple[int, int]) -> list[Shape]:
    return [{"tokens": tokens, "width": width} for tokens, width in rows]


_SHAPES = _sizes(
    (8192, 768), (32768, 1024), (16384, 1536), (4096, 2048), (16384, 2048), (32768, 2048), (16384, 3072), (4096, 4096),
    (8192, 4096), (16384, 4096), (16384, 5120), (8192, 8192), (4096, 16384),
)  # fmt: skip
_ODD_SHAPES = _sizes((1, 5), (13, 129), (37, 520), (255, 1031))

RMS_NORM = register_kernel(
    KernelOp(
        name="rms-norm",
        summary="RMSNorm over the last dimension",
        reference=_reference_norm,
        variants={
            "builtin": lambda x, weight: (builtin_norm(x, weight.shape, weight, EPS),),
            "triton": lambda x, weight: (rms_norm(x, weight),),
        },
        make_inputs=_norm_inputs,
        shapes=_SHAPES,
        odd_shapes=_ODD_SHAPES,
        count_work=_norm_work,
        error_bound=lambda dtype: (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps,
        gradients=(0, 1),
    )
)
ADD_RMS_NORM = register_kernel(
    KernelOp(
        name="add-rms-norm",
        summary="residual add and RMSNorm of the sum, both of which are results",
        reference=_reference_sum,
        variants={"builtin": _builtin_sum, "triton": lambda x, more, weight: add_rms_norm(x, more, weight)},
        make_inputs=_sum_inputs,
        shapes=_SHAPES,
        odd_shapes=_ODD_SHAPES,
        count_work=_sum_work,
        error_bound=lambda dtype: (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps,
        gradients=(0, 1, 2),
    )
)
