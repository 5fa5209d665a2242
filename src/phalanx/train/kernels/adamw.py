"""One step of AdamW over a flat buffer: each number is read once and written once, 28 bytes per parameter in fp32.

Weights are fp32, or bf16 with stochastic rounding: an update of p percent of a bf16 digit then moves the weight by a
digit in p percent of the steps, where rounding to nearest would never move it. Moments are fp32. The random bits
depend on (seed, position) only, so a step can be repeated exactly.

Error: fp32 arithmetic in the order of torch's fused kernel; with stochastic rounding less than one bf16 digit, and
zero on average.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from phalanx.train.kernels.kernel_op import Inputs, KernelOp, KernelWork, Outputs, Shape, register_kernel
from phalanx.train.kernels.triton_support import can_launch, on_device

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

# The fastest of six on an H200: 6.6 ms for a billion parameters, as fast as a copy.
TILE, WARPS = 1024, 4
LR, BETA1, BETA2, EPS, DECAY, STEP = (
    3e-4,
    0.9,
    0.95,
    1e-8,
    0.1,
    7,
)  # the values that the catalogue measures and verifies with

torch.library.define(
    "phalanx::adamw_",
    "(Tensor(a!) weight, Tensor grad, Tensor(b!) first, Tensor(c!) second, float lr, float beta1, float beta2, "
    "float eps, float decay, int step, int seed) -> ()",
)


def adamw_step_(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, *, lr: float, betas: tuple[float, float], eps: float,
    decay: float, step: int, seed: int = 0,
) -> None:  # fmt: skip
    """Apply step `step`, counted from 1, in place; bf16 weights are rounded stochastically with the bits of `seed`."""
    torch.ops.phalanx.adamw_(weight, grad, first, second, lr, *betas, eps, decay, step, seed)


@torch.library.impl("phalanx::adamw_", ("cpu", "cuda"))
def _step_in_place(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    decay: float, step: int, seed: int,
) -> None:  # fmt: skip
    if not can_launch(weight, grad, first, second):
        _plain_step_(weight, grad, first, second, lr, beta1, beta2, eps, decay, step, seed)
        return
    for tensor in (weight, grad, first, second):
        assert tensor.is_contiguous()
    count = weight.numel()
    with on_device(weight):
        _adamw_tile[(triton.cdiv(count, TILE),)](
            weight, grad, first, second, count, beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps, 1.0 - lr * decay,
            lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5, seed,
            STOCHASTIC=weight.dtype == torch.bfloat16, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip


def _plain_step_(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    decay: float, step: int, seed: int,
) -> None:  # fmt: skip
    """Compute the kernel's step in plain operations; its random bits differ from the kernel's."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    slope = grad.to(wide)
    first.lerp_(slope.to(first.dtype), 1.0 - beta1)
    second.mul_(beta2).addcmul_(slope.to(second.dtype), slope.to(second.dtype), value=1.0 - beta2)
    root = second.to(wide).sqrt() / (1.0 - beta2**step) ** 0.5 + eps
    moved = weight.to(wide) * (1.0 - lr * decay) - lr / (1.0 - beta1**step) * (first.to(wide) / root)
    if weight.dtype == torch.bfloat16:
        generator = torch.Generator(weight.device).manual_seed(seed)
        moved = round_stochastically(moved, generator)
    weight.copy_(moved)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 numbers to bf16, up or down with the probability that keeps their mean."""
    bits = values.contiguous().view(torch.int32)
    # bf16 is the upper half of float32: a random lower half carries over with the probability of the dropped fraction.
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=values.device, dtype=torch.int32)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


@torch.library.register_fake("phalanx::adamw_")  # type: ignore[untyped-decorator]
def _no_result(*_: object) -> None:
    return None


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _adamw_tile(weight, grad, first, second, count, beta1, beta2, less1, less2, eps,  # type: ignore[no-untyped-def]
                    shrink, rate, root_scale, seed, STOCHASTIC: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < count
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        m = beta1 * m + less1 * g
        v = beta2 * v + less2 * g * g
        w = w * shrink - rate * (m / (tl.sqrt(v) * root_scale + eps))
        tl.store(first + place, m, mask=inside)
        tl.store(second + place, v, mask=inside)
        if STOCHASTIC:
            noise = (tl.randint(seed, place.to(tl.int32)) & 0xFFFF).to(tl.int32)
            bits = w.to(tl.int32, bitcast=True)
            is_number = (bits & 0x7F800000) != 0x7F800000
            bits = tl.where(is_number, (bits + noise) & -65536, bits)
            tl.store(weight + place, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
        else:
            tl.store(weight + place, w, mask=inside)


# For the catalogue. -------------------------------------------------------------------------------------------------


def _reference_step(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Outputs:
    m = BETA1 * first + (1.0 - BETA1) * grad
    v = BETA2 * second + (1.0 - BETA2) * grad * grad
    root = (v / (1.0 - BETA2**STEP)).sqrt() + EPS
    return weight * (1.0 - LR * DECAY) - LR * (m / (1.0 - BETA1**STEP)) / root, m, v


def _builtin_step_(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
    count = torch.full((), float(STEP - 1), dtype=torch.float32, device=weight.device)
    adamw(
        [weight], [grad], [first], [second], [], [count], fused=True, foreach=False, amsgrad=False, maximize=False,
        beta1=BETA1, beta2=BETA2, lr=LR, weight_decay=DECAY, eps=EPS,
    )  # fmt: skip


def _own_step_(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
    adamw_step_(weight, grad, first, second, lr=LR, betas=(BETA1, BETA2), eps=EPS, decay=DECAY, step=STEP)


def _builtin_step(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Outputs:
    changed = weight.clone(), first.clone(), second.clone()
    _builtin_step_(changed[0], grad, changed[1], changed[2])
    return changed


def _own_step(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Outputs:
    changed = weight.clone(), first.clone(), second.clone()
    _own_step_(changed[0], grad, changed[1], changed[2])
    return changed


def _make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    weight, grad, first, second = (
        torch.randn(shape["parameters"], generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(4)
    )
    return weight, grad, first.mul_(0.1), second.square_().mul_(0.1)


def _draw_at_rest(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw inputs where a third of gradients and moments are zero or tiny, as of unused rows: epsilon matters there."""
    weight, grad, first, second = _make_inputs(shape, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    kind = torch.randint(0, 3, (shape["parameters"],), generator=generator, device=device)
    scale = torch.where(kind == 0, 0.0, torch.where(kind == 1, 1e-7, 1.0)).to(dtype)
    return weight, grad * scale, first * scale, second * scale * scale


def _draw_uneven(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw blocks of parameters whose gradients differ by a factor of a million, with moments of the same scale."""
    weight, grad, first, second = _make_inputs(shape, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    block = max(1, shape["parameters"] // 61)
    powers = torch.randint(-10, 11, (shape["parameters"] // block + 1,), generator=generator, device=device)
    scale = torch.exp2(powers.float()).repeat_interleave(block)[: shape["parameters"]].to(dtype)
    return weight + 3.0, grad * scale, first * scale, second * scale * scale


def _count_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
    each = shape["parameters"] * dtype.itemsize
    return KernelWork(read_bytes=4 * each, written_bytes=3 * each, flops=14 * shape["parameters"])


ADAMW = register_kernel(
    KernelOp(
        name="adamw",
        summary="one step of AdamW over a flat buffer, weights and moments in fp32",
        reference=_reference_step,
        variants={"builtin": _builtin_step, "triton": _own_step},
        make_inputs=_make_inputs,
        shapes=[
            {"parameters": count}
            for count in (
                2**20, 4_194_304, 8_388_608, 16_777_216, 33_554_432, 58_720_256, 65_536_000, 117_440_512, 134_217_728,
                262_668_288, 525_336_576, 1_000_000_000,
            )
        ],
        odd_shapes=[{"parameters": count} for count in (1, 31, 2049, 100_003)],
        count_work=_count_work,
        error_bound=lambda dtype: 16 * torch.finfo(dtype).eps,
        reduction_length=lambda shape: 1,
        structured_inputs={"parameters at rest": _draw_at_rest, "uneven gradients": _draw_uneven},
        dtypes=(torch.float32,),
        timed_in_place={"builtin": _builtin_step_, "triton": _own_step_},
    )
)  # fmt: skip
