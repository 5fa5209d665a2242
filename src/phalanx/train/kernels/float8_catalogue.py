"""The fp8 kernels of a layer in the catalogue: rows in fp8 and their transposed copy, compared with compiled plain
code.

The values that the rounded rows and the transposed copy represent are compared with float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from phalanx.train.kernels.float8_norm import float8_norm_rows
from phalanx.train.kernels.float8_rounding import plain_float8_rows, plain_float8_transposed
from phalanx.train.kernels.float8_rows import scaled_rows, turned_rows
from phalanx.train.kernels.float8_swiglu import (
    exact_gradients,
    exact_product,
    float8_swiglu_gradient_rows,
    float8_swiglu_rows,
)
from phalanx.train.kernels.kernel_op import (
    Inputs,
    KernelOp,
    KernelWork,
    Outputs,
    ResultFormat,
    Shape,
    register_kernel,
)

EPS = 1e-5
# 1/16 of the row's largest; 2 % more, because the rounded number was computed in float32.
BOUND = 0.0625 * 1.02
# The transposed copy has one scale for all rows: small rows are rounded to e4m3's smallest number, 2⁻⁹ of a scale, of
# which the largest element is 448.
STEP = 2.0**-9 / 448 * 0.5 * 1.02
Rounded = tuple[Tensor, Tensor, Tensor, Tensor]  # rows, their scales, the transposed copy, its scale


def _both_copies(rows: Tensor, scale: Tensor) -> Rounded:
    """Return rows, scales, the transposed copy made from the rounded rows, and its scale."""
    matrix_scale = scale.amax()
    return rows, scale, turned_rows(rows, scale, matrix_scale), matrix_scale


def _plain_copies(value: Tensor) -> Rounded:
    """What was done before: rounded by rows, and once more from 16 bit into the transposed copy."""
    rows, scale = plain_float8_rows(value)
    whole = scale.amax()
    return rows, scale, plain_float8_transposed(value, whole), whole


def _plain_norm(x: Tensor, more: Tensor, weight: Tensor) -> Rounded:
    return _plain_copies(torch.nn.functional.rms_norm(x + more, weight.shape, weight, EPS))


def _exact_norm(x: Tensor, more: Tensor, weight: Tensor) -> Tensor:
    # The sum is rounded to the stream's dtype, as the kernel does.
    stream = x + more
    wide = stream.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.to(wide.dtype)


def _plain_swiglu(gate_up: Tensor) -> Rounded:
    return _plain_copies(exact_product(gate_up).to(gate_up.dtype))


def _plain_swiglu_gradients(grad: Tensor, gate_up: Tensor) -> Rounded:
    return _plain_copies(exact_gradients(grad, gate_up).to(grad.dtype))


def _decode_copies(results: Outputs, inputs: Inputs) -> Outputs:
    """Return the values that the rows and the transposed copy represent, in float64."""
    del inputs
    rows, scale, transposed, matrix_scale = (tensor.double() for tensor in results)
    return rows * scale, transposed.t() * matrix_scale


PLAIN: dict[str, Callable[..., Rounded]] = {
    "float8-rows": _plain_copies,
    "float8-norm": _plain_norm,
    "float8-swiglu": _plain_swiglu,
    "float8-swiglu-gradients": _plain_swiglu_gradients,
}
FUSED: dict[str, Callable[..., Rounded]] = {
    "float8-rows": lambda x: _both_copies(*scaled_rows(x)),
    "float8-norm": lambda x, more, weight: _both_copies(*float8_norm_rows(x, more, weight, EPS)[:2]),
    "float8-swiglu": lambda gate_up: _both_copies(*float8_swiglu_rows(gate_up)),
    "float8-swiglu-gradients": lambda grad, gate_up: _both_copies(*float8_swiglu_gradient_rows(grad, gate_up)),
}
EXACT: dict[str, Callable[..., Tensor]] = {
    "float8-rows": lambda x: x,
    "float8-norm": _exact_norm,
    "float8-swiglu": exact_product,
    "float8-swiglu-gradients": exact_gradients,
}
SUMMARY = {
    "float8-rows": "rows in fp8 with their scales, and the transposed copy with one",
    "float8-norm": "sum and RMSNorm into fp8 rows and their transposed copy",
    "float8-swiglu": "silu(gate) · up into fp8 rows and their transposed copy",
    "float8-swiglu-gradients": "gradients of gate and up into fp8 rows and their transposed copy",
}
# Minimum bytes read and written per element of the product or the rows, with inputs in 16 bit.
BYTES = {"float8-rows": (2, 2), "float8-norm": (4, 4), "float8-swiglu": (4, 2), "float8-swiglu-gradients": (6, 4)}


@cache
def _compiled(name: str) -> Callable[..., Rounded]:
    """Return the plain operations, compiled."""
    compiled: Callable[..., Rounded] = torch.compile(PLAIN[name], dynamic=False)
    return compiled


def _draw(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    tokens, width = shape["tokens"], shape["width"]

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    match name:
        case "float8-rows":
            return (draw(tokens, width),)
        case "float8-norm":
            return draw(tokens, width), draw(tokens, width), 1 + 0.1 * draw(width)
        case "float8-swiglu":
            return (draw(tokens, 2 * width),)
        case _:
            return draw(tokens, width), draw(tokens, 2 * width)


def _draw_small(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw gradients of 1e-8, the size of a mean over millions of tokens: a scale with a floor would lose them."""
    first, *remaining = _draw(name, shape, dtype, device, seed)
    return first * 2.0**-26, *remaining


def _count_work(name: str, shape: Shape, dtype: torch.dtype) -> KernelWork:
    del dtype
    read, written = BYTES[name]
    elements = shape["tokens"] * shape["width"]
    return KernelWork(read_bytes=read * elements, written_bytes=written * elements, flops=20 * elements)


def _sizes(*rows: tuple[int, int]) -> list[Shape]:
    return [{"tokens": tokens, "width": width} for tokens, width in rows]


_NARROW = _sizes(
    (8192, 768), (32768, 1024), (16384, 1536), (4096, 2048), (16384, 2048), (32768, 2048), (16384, 3072), (4096, 4096),
    (8192, 4096), (16384, 4096), (16384, 5120), (8192, 8192), (4096, 16384),
)  # fmt: skip
_WIDE = _sizes(
    (4096, 2048), (16384, 3072), (32768, 5504), (4096, 8192), (8192, 8192), (16384, 8192), (32768, 8192), (4096, 14336),
    (8192, 14336), (16384, 14336), (4096, 28672), (8192, 28672), (2048, 53248),
)  # fmt: skip


def _register(name: str) -> KernelOp:
    def exact(*inputs: Tensor) -> Outputs:
        return (EXACT[name](*inputs),) * 2

    return register_kernel(
        KernelOp(
            name=name,
            summary=SUMMARY[name],
            reference=exact,
            variants={"builtin": PLAIN[name], "triton": FUSED[name]},
            # As in a compiled block.
            timed_in_place={
                "builtin": lambda *inputs: (_compiled(name) if inputs[0].is_cuda else PLAIN[name])(*inputs)
            },
            format=ResultFormat(encode=PLAIN[name], decode=_decode_copies, steps=(0.0, STEP)),
            make_inputs=partial(_draw, name),
            # The two operations that round gradients.
            structured_inputs=(
                {"small gradients": partial(_draw_small, name)}
                if name in ("float8-rows", "float8-swiglu-gradients")
                else {}
            ),
            shapes=_WIDE if "swiglu" in name else _NARROW,
            odd_shapes=_sizes((4, 8), (13, 130), (36, 520), (256, 1040)),
            count_work=partial(_count_work, name),
            error_bound=lambda dtype: BOUND,
            dtypes=(torch.bfloat16,),
        )
    )


FLOAT8_OPS = [_register(name) for name in PLAIN]
