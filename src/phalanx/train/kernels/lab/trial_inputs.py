"""What a candidate is tried on: odd and random shapes, several seeds, a wide range of values; and the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import UserError, mistake
from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.lab.arena import tensor_bytes
from phalanx.train.kernels.lab.candidate_server import RefusedError
from phalanx.units import MB

GRADIENT_ALLOWANCE = (
    4.0  # an operation's error bound is one of its results; gradients may be this many times further off
)
CONDITION_ALLOWANCE = 4.0  # times what the reference itself loses in float32, on the same inputs
WIDE_POWER, OUTLIER = 5, 32.0  # rows are multiplied by 2^-5 to 2^5, one element in a hundred by 32 more
# On a CPU, of the shape that is timed: enough to leave the caches, little enough for a float64 truth in a second.
MOST_CPU_BYTES, MOST_CPU_FLOPS = 48 * MB, 4e9
KEPT_TIMES = 120  # the guard keeps inputs and results of all timed calls of a GPU: about 80 times what one moves
MOST_GPU_BYTES, MOST_GPU_FLOPS = 1024 * MB, 2e12


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCase:
    """One trial: a shape, a type and a seed; `wide` spreads magnitudes, `poison` is the byte around all tensors."""

    shape: Shape
    dtype: torch.dtype
    seed: int
    wide: bool = False
    poison: int = 0xFF
    timed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """Results and gradients in float64, each with how far off a value may be."""

    values: list[Tensor]
    allowed: list[Tensor]
    names: list[str] = field(default_factory=list)


def draw_cases(op: KernelOp, dtypes: Sequence[torch.dtype], random_source: random.Random) -> list[KernelCase]:
    """Every odd shape and two random ones in every type; each shape at least twice with other values."""
    found = []
    shapes = [dict(one) for one in op.odd_shapes][:4] + random_shapes(op, 2, random_source)
    for dtype in dtypes:
        for number, shape in enumerate(shapes):
            for wide in (False, True):
                seed = random_source.getrandbits(31)
                poison = 0xFF if (number + wide) % 2 == 0 else 0x7B  # 0x7B: large numbers, for who hides not-a-number
                found.append(KernelCase(shape=shape, dtype=dtype, seed=seed, wide=wide, poison=poison))
    return found


def random_shapes(op: KernelOp, count: int, random_source: random.Random) -> list[dict[str, int]]:
    """Shapes between the listed odd ones, with the common divisor of each size; those the reference takes."""
    sizes = {name: [one[name] for one in op.odd_shapes if name in one] for name in op.odd_shapes[0]}
    found: list[dict[str, int]] = []
    for _ in range(4 * count):
        if len(found) == count:
            break
        shape = {}
        for name, values in sizes.items():
            step = math.gcd(*values, *(one[name] for one in op.shapes if name in one))
            shape[name] = step * random_source.randint(min(values) // step, max(values) // step)
        try:
            op.reference(*op.make_inputs(shape, torch.float32, torch.device("cpu"), 0))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            continue  # an operation may have bounds between its sizes that only it knows
        found.append(shape)
    return found


def timed_shape(op: KernelOp, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """The largest shape that this device measures in reasonable time; where all are larger, the largest odd one."""
    on_gpu = device.type == "cuda"
    most_bytes, most_flops = (MOST_GPU_BYTES, MOST_GPU_FLOPS) if on_gpu else (MOST_CPU_BYTES, MOST_CPU_FLOPS)
    if on_gpu:
        most_bytes = min(most_bytes, torch.cuda.get_device_properties(device).total_memory // KEPT_TIMES)

    def moved_bytes(shape: Any) -> int:
        work = op.count_work(shape, dtype)
        return work.read_bytes + work.written_bytes

    fits = [
        one for one in op.shapes if moved_bytes(one) <= most_bytes and op.count_work(one, dtype).flops <= most_flops
    ]
    return dict(max(fits or op.odd_shapes, key=moved_bytes))


def check_shape(op: KernelOp, shape: Shape) -> None:
    """Raise UserError for sizes that the operation does not have, or lacks."""
    known = set(op.odd_shapes[0])
    if set(shape) != known or any(size < 1 for size in shape.values()):
        example = ",".join(f"{name}={size}" for name, size in op.shapes[0].items())
        given = ",".join(f"{name}={size}" for name, size in shape.items())
        raise mistake("--shape", f'"{given[:60]}" are not the sizes of {op.name}', fix=f"write it like {example}")


def draw_inputs(op: KernelOp, case: KernelCase, device: torch.device) -> tuple[Tensor, ...]:
    """The inputs of a case, drawn in the judge's process."""
    inputs = op.make_inputs(case.shape, case.dtype, device, case.seed)
    if not case.wide:
        return tuple(one.contiguous() for one in inputs)
    source = torch.Generator().manual_seed(case.seed ^ 0x5EED)
    return tuple(_spread_values(one, source).contiguous() for one in inputs)


def _spread_values(values: Tensor, source: torch.Generator) -> Tensor:
    """Rows of very different size, with outliers; whole numbers and vectors stay as they are."""
    if not values.is_floating_point() or values.dim() < 2 or values.dtype.itemsize < 2:
        return values
    powers = torch.randint(-WIDE_POWER, WIDE_POWER + 1, (*values.shape[:-1], 1), generator=source)
    outliers = torch.rand(values.shape, generator=source) < 0.01
    factor = torch.exp2(powers.float()) * torch.where(outliers, OUTLIER, 1.0)
    return (values.float() * factor.to(values.device)).to(values.dtype)


def result_kinds(op: KernelOp, inputs: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each result, from plain operations without values where they work without."""
    try:
        found = op.plain(*(one.to("meta") for one in inputs))
    except (RuntimeError, NotImplementedError, ValueError):
        found = op.plain(*inputs)
    return [(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in found]


def input_bytes(inputs: Sequence[Tensor]) -> int:
    """Of all inputs."""
    return sum(tensor_bytes(one) for one in inputs)


def find_truth(
    op: KernelOp, inputs: Sequence[Tensor], dtype: torch.dtype, output_gradients: Sequence[Tensor] = ()
) -> Truth:
    """What is right for these inputs, in float64, with what a value may be off by."""
    exact, rough = (_reference_values(op, inputs, kind, output_gradients) for kind in (torch.float64, torch.float32))
    results = len(exact) - (len(op.gradients) if output_gradients else 0)
    bound, allowed, names = op.error_bound(dtype), [], []
    for number, (true, near) in enumerate(zip(exact, rough, strict=True)):
        is_gradient = number >= results
        most = _row_most(true)
        lost = _row_most(near.double() - true)
        off = most * bound * (GRADIENT_ALLOWANCE if is_gradient else 1.0) + CONDITION_ALLOWANCE * lost
        if op.format and op.format.steps and true.numel():
            off = off + op.format.steps[number] * true.abs().max()
        allowed.append(off)
        names.append(f"gradient of input {op.gradients[number - results]}" if is_gradient else f"result {number}")
    return Truth(values=exact, allowed=allowed, names=names)


def _row_most(values: Tensor) -> Tensor:
    """The largest size in each row; a single number is its own row."""
    sizes = values.abs()
    return sizes.amax(dim=-1, keepdim=True) if sizes.dim() and sizes.shape[-1] else sizes


def _reference_values(
    op: KernelOp, inputs: Sequence[Tensor], kind: torch.dtype, output_gradients: Sequence[Tensor]
) -> list[Tensor]:
    given = [one.to(kind) if one.is_floating_point() else one for one in inputs]
    if not output_gradients:
        with torch.no_grad():
            return [one.double() for one in op.reference(*given)]
    given = [one.requires_grad_() if place in op.gradients else one for place, one in enumerate(given)]
    results = op.reference(*given)
    pairs = [
        (one, grad.to(one.dtype)) for one, grad in zip(results, output_gradients, strict=True) if one.requires_grad
    ]
    wanted = [given[place] for place in op.gradients]
    found = torch.autograd.grad([one for one, _ in pairs], wanted, [grad for _, grad in pairs])
    return [one.detach().double() for one in (*results, *found)]


def compare_values(got: Sequence[Tensor], truth: Truth, case: KernelCase) -> float:
    """The largest error over what is allowed; raises RefusedError where it is above 1."""
    worst = 0.0
    for name, value, true, allowed in zip(truth.names, got, truth.values, truth.allowed, strict=True):
        if not value.numel():
            continue
        found = value.double()
        shown = f"{_case_text(case)}: {name}"
        # Where the truth itself is not finite, so must the result be, in the same way.
        finite = torch.isfinite(true)
        wrong = torch.isnan(found) & ~torch.isnan(true)
        if bool(wrong.any()):
            share = float(wrong.float().mean())
            raise RefusedError(
                "values",
                f"{shown} holds not-a-number in {share:.1%} of its elements: not written, or read outside of inputs",
            )
        error = torch.where(finite, (found - true).abs(), torch.zeros_like(true))
        ratio = float((error / allowed.clamp(min=torch.finfo(torch.float32).tiny)).max())
        if ratio > 1.0:
            share = float((error > allowed).float().mean())
            raise RefusedError(
                "values", f"{shown} is off by {ratio:.3g} times the error bound, in {share:.1%} of its elements"
            )
        worst = max(worst, ratio)
    return worst


def _case_text(case: KernelCase) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in case.shape.items())
    values = "wide range of values" if case.wide else "timed run" if case.timed else "ordinary values"
    return f"{str(case.dtype).removeprefix('torch.')}, {sizes}, {values}"


def parse_shape(text: str) -> dict[str, int]:
    """tokens=4096,width=2048 as a mapping; raises UserError."""
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        try:
            found[name.strip()] = int(size.strip().replace("_", ""))
        except ValueError:
            raise _bad_shape(text) from None
    return found


def _bad_shape(text: str) -> UserError:
    return mistake("--shape", f'"{text[:60]}" is not of the form tokens=4096,width=2048')
