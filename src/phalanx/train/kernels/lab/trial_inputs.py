"""The cases that a candidate is judged on: odd, random and real shapes, and patterns of values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import UserError, mistake
from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.units import MB

# Patterns of values, as refusals name them.
ORDINARY, WIDE = "ordinary values", "wide range of values"
CORRELATED, LARGE_MEANS = "correlated columns", "large means"
ZEROS, TINY, HUGE = "zeros and equal numbers", "tiny values", "huge values"
# Rows are multiplied by 2^-5 to 2^5, one element in a hundred by 32 more.
WIDE_POWER, OUTLIER = 5, 32.0
# Powers of two: gradients of a large model, and the few outlier activations.
TINY_POWER, HUGE_POWER = -14, 20
# Shares of rows and elements: padding, and zeros of dropout or a rectifier.
ZERO_ROWS, ZERO_ELEMENTS = 0.2, 0.25
# Limits of the timed shape on a CPU: larger than the caches, small enough for the exact result in a second.
MOST_CPU_BYTES, MOST_CPU_FLOPS = 48 * MB, 4e9
# Limits of a shape with one size of a real model: there are many of these cases.
MAX_STRETCHED_BYTES, MAX_STRETCHED_FLOPS = 12 * MB, 4e8
LARGE_CASES = 2  # cases at the timed shape, in each dtype that is not timed
# The guard keeps inputs and results of all timed calls of a GPU: about 80 times what one moves.
KEPT_TIMES = 120
MOST_GPU_BYTES, MOST_GPU_FLOPS = 1024 * MB, 2e12


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCase:
    """One case: a shape, a dtype, a seed and a pattern of values; `poison` is the byte around all tensors."""

    shape: Shape
    dtype: torch.dtype
    seed: int
    pattern: str = ORDINARY
    poison: int = 0xFF
    timed: bool = False
    # Indices of inputs whose gradients are requested; None: all.
    gradients_of: tuple[int, ...] | None = None
    unused: int | None = None  # a result that the loss does not depend on
    overlap: bool = False  # all results of its batch are computed before any gradient
    turned: bool = False  # gradients of results are stored column by column, as autograd may pass them
    kept_seed: int | None = None  # seed of the values that both ends and half of every input keep

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.shape.items())
        notes = ", timed run" if self.timed else ""
        if self.gradients_of is not None:
            listed = ", ".join(map(str, self.gradients_of))
            notes += f", gradients of input {listed} only" if listed else ", without gradients"
        if self.unused is not None:
            notes += f", result {self.unused} unused"
        if self.overlap:
            notes += ", overlapping calls"
        if self.turned:
            notes += ", gradients by columns"
        if self.kept_seed is not None:
            notes += ", half of the values as in the call before"
        return f"{str(self.dtype).removeprefix('torch.')}, {sizes}, {self.pattern}{notes}"


def op_patterns(op: KernelOp) -> list[str]:
    """Return the patterns of values for an operation, ordinary ones first."""
    general = [pattern for pattern in _PATTERNS if pattern not in op.unfit_patterns]
    return [ORDINARY, *general, *op.structured_inputs]


def draw_cases(
    op: KernelOp,
    dtypes: Sequence[torch.dtype],
    random_source: random.Random,
    *,
    large: Shape,
    timed_dtype: torch.dtype | None = None,
) -> list[KernelCase]:
    """Draw cases of odd, random and real sizes, and of the shape `large`, in every dtype and pattern.

    Values of `large` in `timed_dtype` are left to the timed runs, which are compared as well.
    """
    small = [dict(shape) for shape in op.odd_shapes][:4] + random_shapes(op, 2, random_source)
    cases: list[KernelCase] = []

    def add(shape: Shape, dtype: torch.dtype, pattern: str) -> None:
        # 0x7B: large numbers, for kernels that hide NaN
        poison = 0xFF if len(cases) % 2 == 0 else 0x7B
        seed = random_source.getrandbits(31)
        cases.append(KernelCase(shape=shape, dtype=dtype, seed=seed, pattern=pattern, poison=poison))

    for dtype in dtypes:
        structured = op_patterns(op)[1:]
        random_source.shuffle(structured)
        endless = itertools.cycle(structured)
        for shape in small:
            add(shape, dtype, ORDINARY)
            add(shape, dtype, next(endless))
            add(shape, dtype, next(endless))
        for shape in stretched_shapes(op, dtype, random_source):
            add(shape, dtype, next(endless))
        if dtype != timed_dtype:
            for _ in range(min(LARGE_CASES, len(structured))):
                add(large, dtype, next(endless))
    return cases


def draw_uses(
    op: KernelOp, dtype: torch.dtype, random_source: random.Random, *, gradients: bool
) -> list[list[KernelCase]]:
    """Draw batches that use a kernel as a model does, in ways that separate calls do not show."""
    shape = dict(op.odd_shapes[min(2, len(op.odd_shapes) - 1)])

    def draw(**options: Any) -> KernelCase:
        return KernelCase(shape=shape, dtype=dtype, seed=random_source.getrandbits(31), **options)

    first = draw()
    batches = [[first], [draw(kept_seed=first.seed)], [draw(overlap=True), draw(overlap=True)]]
    if not (gradients and op.gradients):
        return batches
    batches += [[draw(gradients_of=())], [draw(turned=True)]]
    if len(op.gradients) > 1:
        batches += [[draw(gradients_of=(place,))] for place in op.gradients]
    inputs = draw_inputs(op, first, torch.device("cpu"))
    with torch.no_grad():
        num_results = len(op.plain(*inputs))
    if num_results > 1:
        batches += [[draw(unused=number)] for number in range(num_results)]
    return batches


def stretched_shapes(op: KernelOp, dtype: torch.dtype, random_source: random.Random) -> list[dict[str, int]]:
    """Return small shapes with one size of a real model: per size the largest of all real models and a random one."""
    shapes: list[dict[str, int]] = []
    for name in op.odd_shapes[0]:
        real = sorted({shape[name] for shape in op.shapes})
        for size in dict.fromkeys((real[-1], random_source.choice(real))):
            odd_shapes = [dict(shape) for shape in op.odd_shapes]
            random_source.shuffle(odd_shapes)
            for odd_shape in odd_shapes:
                shape = {**odd_shape, name: size}
                work = op.count_work(shape, dtype)
                fits = work.read_bytes + work.written_bytes <= MAX_STRETCHED_BYTES and work.flops <= MAX_STRETCHED_FLOPS
                if fits and _is_valid_shape(op, shape):
                    shapes.append(shape)
                    break
    return shapes


def _is_valid_shape(op: KernelOp, shape: Shape) -> bool:
    """Return whether the reference accepts a shape: it may have constraints between sizes."""
    try:
        op.plain(*op.make_inputs(shape, op.dtypes[0], torch.device("cpu"), 0))
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    return True


def random_shapes(op: KernelOp, count: int, random_source: random.Random) -> list[dict[str, int]]:
    """Draw shapes between the listed odd ones that the reference accepts, in steps of each size's common divisor."""
    sizes = {
        name: [listed_shape[name] for listed_shape in op.odd_shapes if name in listed_shape]
        for name in op.odd_shapes[0]
    }
    shapes: list[dict[str, int]] = []
    for _ in range(4 * count):
        if len(shapes) == count:
            break
        shape = {}
        for name, values in sizes.items():
            step = math.gcd(*values, *(listed_shape[name] for listed_shape in op.shapes if name in listed_shape))
            shape[name] = step * random_source.randint(min(values) // step, max(values) // step)
        if _is_valid_shape(op, shape):
            shapes.append(shape)
    return shapes


def timed_shape(op: KernelOp, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Return the largest shape that this device measures in reasonable time; the largest odd one if all are larger."""
    on_gpu = device.type == "cuda"
    most_bytes, most_flops = (MOST_GPU_BYTES, MOST_GPU_FLOPS) if on_gpu else (MOST_CPU_BYTES, MOST_CPU_FLOPS)
    if on_gpu:
        most_bytes = min(most_bytes, torch.cuda.get_device_properties(device).total_memory // KEPT_TIMES)

    def moved_bytes(shape: Any) -> int:
        work = op.count_work(shape, dtype)
        return work.read_bytes + work.written_bytes

    fits = [
        shape
        for shape in op.shapes
        if moved_bytes(shape) <= most_bytes and op.count_work(shape, dtype).flops <= most_flops
    ]
    return dict(max(fits or op.odd_shapes, key=moved_bytes))


def check_shape(op: KernelOp, shape: Shape) -> None:
    """Raise UserError if a shape lacks a size of the operation, or has an unknown or non-positive one."""
    size_names = set(op.odd_shapes[0])
    if set(shape) != size_names or any(size < 1 for size in shape.values()):
        example = ",".join(f"{name}={size}" for name, size in op.shapes[0].items())
        shape_text = ",".join(f"{name}={size}" for name, size in shape.items())
        raise mistake("--shape", f'"{shape_text[:60]}" are not the sizes of {op.name}', fix=f"write it like {example}")


def draw_inputs(op: KernelOp, case: KernelCase, device: torch.device) -> tuple[Tensor, ...]:
    """Draw the inputs of a case; only the judge's process calls this."""
    if case.kept_seed is not None:
        kept_inputs = draw_inputs(op, replace(case, seed=case.kept_seed, kept_seed=None), device)
        new_inputs = draw_inputs(op, replace(case, kept_seed=None), device)
        mixed = torch.Generator(device).manual_seed(case.seed ^ 0x4A1F)
        return tuple(_keep_half(*pair, mixed) for pair in zip(kept_inputs, new_inputs, strict=True))
    if case.pattern in op.structured_inputs:
        inputs = op.structured_inputs[case.pattern](case.shape, case.dtype, device, case.seed)
        return tuple(tensor.contiguous() for tensor in inputs)
    inputs = op.make_inputs(case.shape, case.dtype, device, case.seed)
    source = torch.Generator(device).manual_seed(case.seed ^ 0x5EED)
    changes = _PATTERNS.get(case.pattern)
    if changes is None:
        return tuple(tensor.contiguous() for tensor in inputs)
    tables = [place for place, tensor in enumerate(inputs) if _is_table(tensor)]
    return tuple(
        (changes(tensor, source, is_first=place == tables[0]) if place in tables else tensor).contiguous()
        if case.pattern != ZEROS or place in tables or not tables or not _is_vector(tensor)
        else tensor[:1].expand_as(tensor).contiguous()
        for place, tensor in enumerate(inputs)
    )


def draw_output_gradients(
    case: KernelCase, inputs: Sequence[Tensor], kinds: Sequence[tuple[torch.dtype, Sequence[int]]]
) -> list[Tensor]:
    """Draw the gradients of the results, from which the candidate computes those of its inputs.

    Gradients that are independent of the inputs would hide terms that are sums of products with them: a sum of n
    random products only grows with √n. In structured cases they have a mean, and resemble an input of the same shape.
    """
    device = inputs[0].device
    source = torch.Generator(device).manual_seed(case.seed ^ 0x6AD)
    gradients = []
    for dtype, shape in kinds:
        gradient = torch.randn(tuple(shape), generator=source, device=device)
        if case.pattern != ORDINARY:
            similar_input = next(
                (tensor for tensor in inputs if tensor.shape == gradient.shape and tensor.is_floating_point()), None
            )
            gradient = gradient + 0.5
            if similar_input is not None:
                wide = similar_input.float()
                gradient = gradient + wide / _row_rms(wide)
        gradients.append(gradient.to(dtype))
    return gradients


def _is_table(values: Tensor) -> bool:
    """Return whether patterns apply: not to integers, codes and vectors (permutations, scales, second moments)."""
    return values.is_floating_point() and values.dim() >= 2 and values.dtype.itemsize >= 2


def _is_vector(values: Tensor) -> bool:
    return values.is_floating_point() and values.dim() == 1


def _keep_half(kept: Tensor, new: Tensor, source: torch.Generator) -> Tensor:
    """Return `new` with half of its numbers and both ends from `kept`; integers stay new: they may be permutations."""
    if not new.is_floating_point() or not new.dim():
        return new
    is_kept = torch.rand(new.shape, generator=source, device=new.device) < 0.5
    is_kept[0], is_kept[-1] = True, True
    return torch.where(is_kept, kept, new)


def _row_rms(values: Tensor) -> Tensor:
    return values.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6) if values.dim() else values.abs() + 1e-6


def _spread_values(values: Tensor, source: torch.Generator, *, is_first: bool) -> Tensor:
    """Scale rows to very different sizes, with outliers."""
    del is_first
    options: Any = {"generator": source, "device": values.device}
    powers = torch.randint(-WIDE_POWER, WIDE_POWER + 1, (*values.shape[:-1], 1), **options)
    outliers = torch.rand(values.shape, **options) < 0.01
    factor = torch.exp2(powers.float()) * torch.where(outliers, OUTLIER, 1.0)
    return (values.float() * factor).to(values.dtype)


def _correlate_columns(values: Tensor, source: torch.Generator, *, is_first: bool) -> Tensor:
    """Let rows share a direction, and a quarter of the columns, adjacent ones, have most of the energy."""
    del is_first
    options: Any = {"generator": source, "device": values.device}
    width = values.shape[-1]
    direction = torch.randn(width, **options)
    amount = torch.randn((*values.shape[:-1], 1), **options) * _row_rms(values.float())
    first = int(torch.randint(0, width, (1,), **options))
    place = (torch.arange(width, device=values.device) - first) % width
    energy = torch.where(place < max(1, width // 4), 4.0, 1.0)
    return ((0.7 * values.float() + 0.7 * amount * direction) * energy).to(values.dtype)


def _shift_means(values: Tensor, source: torch.Generator, *, is_first: bool) -> Tensor:
    """Add a mean several times the spread of the values; only to the first input, or products would merely cancel."""
    del source
    if not is_first:
        return values
    wide = values.float()
    return (wide + 4.0 * _row_rms(wide)).to(values.dtype)


def _plant_zeros(values: Tensor, source: torch.Generator, *, is_first: bool) -> Tensor:
    """Set the same rows to zero in all inputs, at least one of several, and single elements elsewhere."""
    del is_first
    device = values.device
    same_rows = torch.Generator(device).manual_seed(source.initial_seed())
    is_empty = torch.rand((*values.shape[:-1], 1), generator=same_rows, device=device) < ZERO_ROWS
    if is_empty.numel() > 1:
        is_empty.view(-1)[int(torch.randint(0, is_empty.numel(), (1,), generator=same_rows, device=device))] = True
    is_zero = torch.rand(values.shape, generator=source, device=device) < ZERO_ELEMENTS
    return values.masked_fill(is_empty | is_zero, 0.0)


def _shrink_values(values: Tensor, source: torch.Generator, *, is_first: bool) -> Tensor:
    """Scale values down until their squares hardly matter."""
    del source, is_first
    return values * 2.0**TINY_POWER


def _grow_first(values: Tensor, source: torch.Generator, *, is_first: bool) -> Tensor:
    """Scale values beyond the range of float16; only of the first input, or products would overflow."""
    del source
    return values * 2.0**HUGE_POWER if is_first else values


_PATTERNS: Mapping[str, Callable[..., Tensor]] = {
    WIDE: _spread_values,
    CORRELATED: _correlate_columns,
    LARGE_MEANS: _shift_means,
    ZEROS: _plant_zeros,
    TINY: _shrink_values,
    HUGE: _grow_first,
}


def parse_shape(text: str) -> dict[str, int]:
    """Parse a text such as tokens=4096,width=2048; raise UserError."""
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        try:
            sizes[name.strip()] = int(size.strip().replace("_", ""))
        except ValueError:
            raise _bad_shape(text) from None
    return sizes


def _bad_shape(text: str) -> UserError:
    return mistake("--shape", f'"{text[:60]}" is not of the form tokens=4096,width=2048')
