"""A decoder layer in fp8 whose norms and activation write fp8 directly: three operators with their gradients.

`fp8_norm_products` is a norm with the matrices that read it (query, key and value in one product);
`fp8_turning_product` is the output matrix of attention; `fp8_gated_mlp` is the second half of a layer: sum, norm,
gate and up in one product, activation, the last matrix, and the sum. Values between their parts are rounded where
they are computed (`kernels/float8_*.py`) and never written in 16 bit, neither in forward nor in backward.
`float8.py`, in contrast, treats each matrix separately, with the compiler's code between them.

The scales are those of `float8.py`, rounded to powers of two; the products are the same, with sums over tokens in
fp32. Saved for backward: the sum, gate and up in 16 bit, the two inputs of matrices in fp8, transposed; of
attention's output nothing beyond what attention itself saves.

T tokens, D model, F MLP width, N widths of query, key and value together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.train.kernels.float8_norm import float8_norm_rows
from phalanx.train.kernels.float8_product import UNIT, multiply_fp8
from phalanx.train.kernels.float8_rounding import FORMAT, float8_transposed
from phalanx.train.kernels.float8_rows import scaled_matrices, scaled_rows, turned_rows
from phalanx.train.kernels.float8_swiglu import float8_swiglu_gradient_rows, float8_swiglu_rows
from phalanx.train.kernels.rms_norm import scaled_norm_gradients
from phalanx.train.models.decoder import Block
from phalanx.train.models.layers import Mlp, Rope
from phalanx.train.parallel.float8 import Float8Linear

# Results after the first are saved for backward.
torch.library.define(
    "phalanx::fp8_norm_products",
    "(Tensor x, Tensor norm, Tensor[] weights, float eps) -> (Tensor out, Tensor kept, Tensor scales, Tensor rms)",
)
torch.library.define(
    "phalanx::fp8_norm_products_gradients",
    "(Tensor grad, Tensor x, Tensor norm, Tensor[] weights, Tensor kept, Tensor scales, Tensor rms)"
    " -> (Tensor by_x, Tensor by_norm, Tensor by_weights)",
)
torch.library.define("phalanx::fp8_turning_product", "(Tensor x, Tensor weight) -> (Tensor out, Tensor scales)")
torch.library.define(
    "phalanx::fp8_turning_product_gradients",
    "(Tensor grad, Tensor x, Tensor weight, Tensor scales) -> (Tensor by_x, Tensor by_weight)",
)
torch.library.define(
    "phalanx::fp8_gated_mlp",
    "(Tensor x, Tensor more, Tensor norm, Tensor gate, Tensor up, Tensor down, float eps) -> (Tensor out,"
    " Tensor stream, Tensor gate_up, Tensor kept, Tensor inner, Tensor scales, Tensor rms)",
)
torch.library.define(
    "phalanx::fp8_gated_mlp_gradients",
    "(Tensor grad, Tensor norm, Tensor gate, Tensor up, Tensor down, Tensor stream, Tensor gate_up, Tensor kept,"
    " Tensor inner, Tensor scales, Tensor rms) -> (Tensor by_x, Tensor by_norm, Tensor by_gate_up, Tensor by_down)",
)


def can_fuse(block: nn.Module, tokens: int) -> bool:
    """Return whether the fused operators compute this block: gated by silu, RMSNorm, no bias, fp8 in every matrix."""
    if not isinstance(block, Block) or not isinstance(block.mlp, Mlp) or block.mlp.gate is None or tokens % UNIT:
        return False
    attn, mlp = block.attn, block.mlp
    linear_layers: list[nn.Module | None] = [attn.wq, attn.wk, attn.wv, attn.wo, mlp.gate, mlp.up, mlp.down]
    norms = (block.attn_norm, block.mlp_norm)
    return (
        all(isinstance(layer, Float8Linear) and not layer.recomputed and layer.bias is None for layer in linear_layers)
        and all(isinstance(norm, nn.RMSNorm) and norm.eps is not None for norm in norms)
        and mlp.act is nn.functional.silu
    )


def fused_layer(block: Block, x_BSD: Tensor, rope: Rope | None) -> Tensor:
    """Compute `Block.forward` with the fused operators."""
    attn, mlp = block.attn, block.mlp
    assert isinstance(mlp, Mlp)
    assert mlp.gate is not None
    x_TD = x_BSD.flatten(0, 1)
    weights = [attn.wq.weight, attn.wk.weight, attn.wv.weight]
    out_TN = torch.ops.phalanx.fp8_norm_products(x_TD, block.attn_norm.weight, weights, block.attn_norm.eps)[0]
    query, key, value = out_TN.unflatten(0, x_BSD.shape[:2]).split([len(weight) for weight in weights], dim=-1)
    # Attention saves the values for backward; a view of the joint tensor would keep queries and keys alive too.
    mixed_TN = attn.mix(query, key, value.contiguous(), rope).flatten(0, 1)
    more_TD = torch.ops.phalanx.fp8_turning_product(mixed_TN, attn.wo.weight)[0]
    out_TD: Tensor = torch.ops.phalanx.fp8_gated_mlp(
        x_TD, more_TD, block.mlp_norm.weight, mlp.gate.weight, mlp.up.weight, mlp.down.weight, block.mlp_norm.eps
    )[0]
    return out_TD.view(x_BSD.shape)


def _side_by_side(scales: tuple[Tensor, ...]) -> Tensor:
    """Put scales into one tensor, 16 bytes apart, which is the alignment that cuBLAS requires."""
    return torch.stack([scale.expand(4) for scale in scales])


def _turned_matrices(matrices: list[Tensor], whole: Tensor) -> Tensor:
    """Stack matrices by rows and transpose them: [columns, rows of all]; scaled as by `scaled_matrices`."""
    if len(matrices) == 1:
        return float8_transposed(matrices[0], whole)
    rows, scale = scaled_matrices(matrices)
    return turned_rows(rows, scale, whole)


# A norm and the matrices that read it. --------------------------------------------------------------------------------


@torch.library.impl("phalanx::fp8_norm_products", ("cpu", "cuda"))
def _norm_products(
    x_TD: Tensor, norm_D: Tensor, weights: list[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, scale, _, rms = float8_norm_rows(x_TD, None, norm_D, eps)
    matrices = scaled_matrices(weights)
    scales = _side_by_side((scale.amax(), matrices[1].amax()))
    out = multiply_fp8((rows, scale), matrices, x_TD.dtype)
    return out, turned_rows(rows, scale, scales[0, 0]), scales, rms


@torch.library.impl("phalanx::fp8_norm_products_gradients", ("cpu", "cuda"))
def _norm_products_gradients(
    grad_TN: Tensor, x_TD: Tensor, norm_D: Tensor, weights: list[Tensor], kept_DT: Tensor, scales: Tensor, rms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, scale = scaled_rows(grad_TN)
    grad_scale = scale.amax()
    by_weights = multiply_fp8(
        (turned_rows(rows, scale, grad_scale), grad_scale), (kept_DT, scales[0, 0]), grad_TN.dtype, fast_sums=False
    )
    by_normed = multiply_fp8((rows, scale), (_turned_matrices(weights, scales[1, 0]), scales[1, 0]), grad_TN.dtype)
    by_x, by_norm = scaled_norm_gradients(by_normed, None, x_TD, norm_D, rms)
    return by_x, by_norm, by_weights


@torch.library.register_fake("phalanx::fp8_norm_products")  # type: ignore[untyped-decorator]
def _norm_products_shapes(
    x_TD: Tensor, norm_D: Tensor, weights: list[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del norm_D, eps
    tokens, width = x_TD.shape
    out = x_TD.new_empty((tokens, sum(weight.shape[0] for weight in weights)))
    scales, rms = (x_TD.new_empty(size, dtype=torch.float32) for size in ((2, 4), (tokens,)))
    return out, x_TD.new_empty((width, tokens), dtype=FORMAT), scales, rms


@torch.library.register_fake("phalanx::fp8_norm_products_gradients")  # type: ignore[untyped-decorator]
def _norm_products_gradient_shapes(
    grad_TN: Tensor, x_TD: Tensor, norm_D: Tensor, weights: list[Tensor], kept_DT: Tensor, scales: Tensor, rms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del weights, kept_DT, scales, rms
    by_weights = grad_TN.new_empty((grad_TN.shape[1], x_TD.shape[1]))
    return x_TD.new_empty(x_TD.shape), norm_D.new_empty(norm_D.shape), by_weights


def _keep_norm_products(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TD, norm_D, weights, _ = inputs
    ctx.save_for_backward(x_TD, norm_D, *weights, *output[1:])


def _norm_products_backward(ctx: Any, grad_TN: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    x_TD, norm_D, *weights, kept_DT, scales, rms = ctx.saved_tensors
    by_x, by_norm, by_weights = torch.ops.phalanx.fp8_norm_products_gradients(
        grad_TN, x_TD, norm_D, weights, kept_DT, scales, rms
    )
    return by_x, by_norm, list(by_weights.split([len(weight) for weight in weights])), None


torch.library.register_autograd(
    "phalanx::fp8_norm_products", _norm_products_backward, setup_context=_keep_norm_products
)

# One matrix whose input is saved unrounded, by the operator that produced it. -----------------------------------------


@torch.library.impl("phalanx::fp8_turning_product", ("cpu", "cuda"))
def _turning_product(x_TN: Tensor, weight_DN: Tensor) -> tuple[Tensor, Tensor]:
    rows, matrix = scaled_rows(x_TN), scaled_rows(weight_DN)
    return multiply_fp8(rows, matrix, x_TN.dtype), _side_by_side((rows[1].amax(), matrix[1].amax()))


@torch.library.impl("phalanx::fp8_turning_product_gradients", ("cpu", "cuda"))
def _turning_product_gradients(
    grad_TD: Tensor, x_TN: Tensor, weight_DN: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    rows, scale = scaled_rows(grad_TD)
    grad_scale = scale.amax()
    by_x = multiply_fp8((rows, scale), (float8_transposed(weight_DN, scales[1, 0]), scales[1, 0]), grad_TD.dtype)
    by_weight = multiply_fp8(
        (turned_rows(rows, scale, grad_scale), grad_scale),
        (float8_transposed(x_TN, scales[0, 0]), scales[0, 0]),
        grad_TD.dtype,
        fast_sums=False,
    )
    return by_x, by_weight


@torch.library.register_fake("phalanx::fp8_turning_product")  # type: ignore[untyped-decorator]
def _turning_product_shapes(x_TN: Tensor, weight_DN: Tensor) -> tuple[Tensor, Tensor]:
    return x_TN.new_empty((x_TN.shape[0], weight_DN.shape[0])), x_TN.new_empty((2, 4), dtype=torch.float32)


@torch.library.register_fake("phalanx::fp8_turning_product_gradients")  # type: ignore[untyped-decorator]
def _turning_product_gradient_shapes(
    grad_TD: Tensor, x_TN: Tensor, weight_DN: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    del grad_TD, scales
    return x_TN.new_empty(x_TN.shape), weight_DN.new_empty(weight_DN.shape)


def _keep_turning_product(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _turning_product_backward(ctx: Any, grad_TD: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = torch.ops.phalanx.fp8_turning_product_gradients(grad_TD, *ctx.saved_tensors)
    return gradients


torch.library.register_autograd(
    "phalanx::fp8_turning_product", _turning_product_backward, setup_context=_keep_turning_product
)

# The second half of a layer. ----------------------------------------------------------------------------------------


@torch.library.impl("phalanx::fp8_gated_mlp", ("cpu", "cuda"))
def _gated_mlp(
    x_TD: Tensor, more_TD: Tensor, norm_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, eps: float
) -> tuple[Tensor, ...]:
    rows, scale, stream_TD, rms = float8_norm_rows(x_TD, more_TD, norm_D, eps)
    gate_up_weights = scaled_matrices([gate_FD, up_FD])
    gate_up = multiply_fp8((rows, scale), gate_up_weights, x_TD.dtype)
    x_scale = scale.amax()
    kept_DT = turned_rows(rows, scale, x_scale)
    rows, scale = float8_swiglu_rows(gate_up)
    down_weights = scaled_rows(down_DF)
    out_TD = multiply_fp8((rows, scale), down_weights, x_TD.dtype)
    out_TD += stream_TD
    inner_scale = scale.amax()
    inner_FT = turned_rows(rows, scale, inner_scale)
    scales = _side_by_side((x_scale, gate_up_weights[1].amax(), inner_scale, down_weights[1].amax()))
    return out_TD, stream_TD, gate_up, kept_DT, inner_FT, scales, rms


@torch.library.impl("phalanx::fp8_gated_mlp_gradients", ("cpu", "cuda"))
def _gated_mlp_gradients(
    grad_TD: Tensor, norm_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, stream_TD: Tensor,
    gate_up: Tensor, kept_DT: Tensor, inner_FT: Tensor, scales: Tensor, rms: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x_scale, wide_scale, inner_scale, down_scale = scales[:, 0].unbind()
    dtype = grad_TD.dtype
    rows, scale = scaled_rows(grad_TD)
    row_scale = scale.amax()
    by_down = multiply_fp8(
        (turned_rows(rows, scale, row_scale), row_scale), (inner_FT, inner_scale), dtype, fast_sums=False
    )
    by_inner = multiply_fp8((rows, scale), (float8_transposed(down_DF, down_scale), down_scale), dtype)
    rows, scale = float8_swiglu_gradient_rows(by_inner, gate_up)
    del by_inner
    row_scale = scale.amax()
    by_gate_up = multiply_fp8(
        (turned_rows(rows, scale, row_scale), row_scale), (kept_DT, x_scale), dtype, fast_sums=False
    )
    by_normed = multiply_fp8((rows, scale), (_turned_matrices([gate_FD, up_FD], wide_scale), wide_scale), dtype)
    by_x, by_norm = scaled_norm_gradients(by_normed, grad_TD, stream_TD, norm_D, rms)
    return by_x, by_norm, by_gate_up, by_down


@torch.library.register_fake("phalanx::fp8_gated_mlp")  # type: ignore[untyped-decorator]
def _gated_mlp_shapes(
    x_TD: Tensor, more_TD: Tensor, norm_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, eps: float
) -> tuple[Tensor, ...]:
    del more_TD, norm_D, up_FD, down_DF, eps
    (tokens, width), inner = x_TD.shape, gate_FD.shape[0]
    saved_x, saved_inner = (x_TD.new_empty((size, tokens), dtype=FORMAT) for size in (width, inner))
    scales, rms = (x_TD.new_empty(size, dtype=torch.float32) for size in ((4, 4), (tokens,)))
    out, stream = (x_TD.new_empty((tokens, width)) for _ in range(2))
    return out, stream, x_TD.new_empty((tokens, 2 * inner)), saved_x, saved_inner, scales, rms


@torch.library.register_fake("phalanx::fp8_gated_mlp_gradients")  # type: ignore[untyped-decorator]
def _gated_mlp_gradient_shapes(
    grad_TD: Tensor, norm_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, *kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del up_FD, kept
    by_gate_up = gate_FD.new_empty((2 * gate_FD.shape[0], gate_FD.shape[1]))
    return grad_TD.new_empty(grad_TD.shape), torch.empty_like(norm_D), by_gate_up, down_DF.new_empty(down_DF.shape)


def _keep_gated_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[2:6], *output[1:])


def _gated_mlp_backward(ctx: Any, grad_TD: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    by_x, by_norm, by_gate_up, by_down = torch.ops.phalanx.fp8_gated_mlp_gradients(grad_TD, *ctx.saved_tensors)
    by_gate, by_up = by_gate_up.chunk(2)
    return by_x, by_x, by_norm, by_gate, by_up, by_down, None


torch.library.register_autograd("phalanx::fp8_gated_mlp", _gated_mlp_backward, setup_context=_keep_gated_mlp)
