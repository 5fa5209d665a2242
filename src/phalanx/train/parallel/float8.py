"""fp8 matrix products for linear layers, on GPUs that support them: all three products of a layer in e4m3.

In forward, each factor has a scale per row. A factor that backward reads across its rows has one scale for the whole
matrix, the largest of its rows' (`kernels/float8_rounding.py` gives the reason).

A weight gradient sums over all tokens of a micro-batch. By default tensor cores add fp8 products with about 14 bits
("fast accumulation"), and over 16,384 tokens of real text such sums came out up to 16 % too small (an H200; 0.2 %
with fp32 sums, the rounding itself): weight gradients are summed in fp32, at 2 to 11 % of the product's time.
Backward's copy of an input is stored rounded and transposed: half the bytes. The head stays in 16 bit, unless
`precision.fp8_head` is set (`kernels/float8_head.py`).

Under tensor parallelism every rank multiplies its own part, with scales computed from that part: where a product sums
over a split dimension (rows of a matrix in forward, columns in backward), a row has one scale per rank, and none is
exchanged.

Blocks that recompute use the product as one operator. Inside an `autograd.Function`, compiled torch 2.11 does not
recompute (2.13 does): full recompute saved 11 % of the memory instead of 40 % (1.2B, an H200).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from phalanx.errors import mistake
from phalanx.train.kernels.float8_product import UNIT, multiply_fp8
from phalanx.train.kernels.float8_rounding import float8_transposed, round_rows

LEAST_CAPABILITY = (8, 9)  # Ada and Hopper


def refuse_without_float8(device: torch.device) -> None:
    """Raise UserError if the device has no fp8 matrix products."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise mistake(
            "precision.compute",
            f'"fp8" has no matrix product on {name}',
            why="fp8 needs compute capability 8.9 or newer (H100, H200, B200, L40S)",
            fix='use "bf16"',
        )


def use_float8(blocks: list[nn.Module], *, recomputed: int = 0) -> None:
    """Replace the linear layers of the blocks whose widths allow fp8; parameters keep their names.

    The first `recomputed` blocks are recomputed in backward.
    """
    for index, block in enumerate(blocks):
        for module in block.modules():
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and not any(width % UNIT for width in part_shape(child.weight)):
                    setattr(module, name, Float8Linear(child, recomputed=index < recomputed))


class Float8Linear(nn.Module):
    """A linear layer with fp8 products around the weight and bias of an existing `nn.Linear`."""

    def __init__(self, plain: nn.Linear, *, recomputed: bool = False) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        # Keeps the hooks in which tensor parallelism gathers inputs and scatters outputs.
        self._forward_pre_hooks, self._forward_hooks = plain._forward_pre_hooks, plain._forward_hooks

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ plus the bias."""
        if isinstance(self.weight, DTensor):
            out: Tensor = _split_product(x, self.weight, self.recomputed)
        else:
            out = _fp8_product(x, self.weight, self.recomputed)
        return out if self.bias is None else out + self.bias


def _split_product(x: Tensor, weight: DTensor, recomputed: bool) -> DTensor:
    """Return this rank's part: columns of the result if the weight is split by column, a summand of it if by row."""
    assert isinstance(x, DTensor), "the hooks of tensor parallelism make it one"
    mesh, (place,) = weight.device_mesh, weight.placements
    by_column = place == Shard(0)
    assert x.placements == ((Replicate(),) if by_column else (Shard(x.ndim - 1),))
    # A rank's columns give only a partial sum of the gradient of a replicated input.
    local_x = x.to_local(grad_placements=[Partial()]) if by_column else x.to_local()
    out = _fp8_product(local_x, weight.to_local(), recomputed)
    return DTensor.from_local(out, mesh, [Shard(out.ndim - 1) if by_column else Partial()], run_check=False)


def _fp8_product(x: Tensor, weight: Tensor, recomputed: bool) -> Tensor:
    rows = x.flatten(0, -2)
    if recomputed:
        out: Tensor = fp8_product(rows, weight)
    elif torch.is_grad_enabled():
        out = _Product.apply(rows, weight)
    else:
        out = multiply_fp8(round_rows(rows), round_rows(weight), x.dtype)
    return out.unflatten(0, x.shape[:-1])


def part_shape(weight: Tensor) -> tuple[float, ...]:
    """Return the widths of a rank's part of a matrix, the same on every rank.

    Fractional if it does not divide evenly.
    """
    shape: list[float] = list(weight.shape)
    if isinstance(weight, DTensor):
        for place in weight.placements:
            if isinstance(place, Shard):
                shape[place.dim] /= weight.device_mesh.size()
    return tuple(shape)


class _Product(torch.autograd.Function):
    """x_TI W_OIᵀ with T tokens, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        # Otherwise no fp8 product can sum over these tokens
        ctx.whole_units = x_TI.shape[0] % UNIT == 0
        x_rows, weight_rows = round_rows(x_TI), round_rows(weight_OI)
        x_scale, weight_scale = x_rows[1].amax(), weight_rows[1].amax()
        saved_x = float8_transposed(x_TI, x_scale) if ctx.whole_units else x_TI
        ctx.save_for_backward(weight_OI, weight_scale, saved_x, x_scale)
        return multiply_fp8(x_rows, weight_rows, x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad_TO,) = grads
        weight_OI, weight_scale, saved_x, x_scale = ctx.saved_tensors
        grad_rows = round_rows(grad_TO)
        weight_IO = float8_transposed(weight_OI, weight_scale), weight_scale
        grad_x = multiply_fp8(grad_rows, weight_IO, grad_TO.dtype)
        if not ctx.whole_units:
            return grad_x, grad_TO.t() @ saved_x
        grad_scale = grad_rows[1].amax()
        grad_OT = float8_transposed(grad_TO, grad_scale), grad_scale
        return grad_x, multiply_fp8(grad_OT, (saved_x, x_scale), grad_TO.dtype, fast_sums=False)


@torch.library.custom_op("phalanx::fp8_product", mutates_args=())
def fp8_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """`_Product` as one operator; it saves its input unrounded, which a block that recomputes frees anyway."""
    return multiply_fp8(round_rows(x_TI), round_rows(weight_OI), x_TI.dtype)


@fp8_product.register_fake
def _product_shape(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))


@torch.library.custom_op("phalanx::fp8_product_gradients", mutates_args=())
def _product_gradients(grad_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    grad_rows, weight_scale = round_rows(grad_TO), round_rows(weight_OI)[1].amax()
    weight_IO = float8_transposed(weight_OI, weight_scale), weight_scale
    grad_x = multiply_fp8(grad_rows, weight_IO, grad_TO.dtype)
    if x_TI.shape[0] % UNIT:
        return grad_x, grad_TO.t() @ x_TI
    grad_scale, x_scale = grad_rows[1].amax(), round_rows(x_TI)[1].amax()
    grad_OT, x_IT = (float8_transposed(grad_TO, grad_scale), grad_scale), (float8_transposed(x_TI, x_scale), x_scale)
    return grad_x, multiply_fp8(grad_OT, x_IT, grad_TO.dtype, fast_sums=False)


@_product_gradients.register_fake
def _gradient_shapes(grad_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    del grad_TO
    return x_TI.new_empty(x_TI.shape), weight_OI.new_empty(weight_OI.shape)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _product_gradients(grad_TO, *ctx.saved_tensors)
    return gradients


fp8_product.register_autograd(_product_backward, setup_context=_save_inputs)
FP8_PRODUCT = torch.ops.phalanx.fp8_product.default
