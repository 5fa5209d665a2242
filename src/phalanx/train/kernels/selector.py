"""Selection of the fastest variant of an operation by measurement; it is never slower than PyTorch's built-in.

Each (operation, shape, dtype) is measured once per GPU, driver and versions of torch and Triton, and stored in the
user's cache. Variants are timed in turn, so that clocks and temperature are the same for all, and a variant replaces
the built-in only if it gains more than the spread of both timings. A variant with wrong results on small odd shapes
is never selected. Cache entries that cannot be read are measured again. On a CPU nothing is measured and the built-in
runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.kernel_choices import chosen_variants, kernel_cache_folder, read_choices, write_choice
from phalanx.io.files import read_bounded
from phalanx.train.kernels.kernel_op import Inputs, KernelOp, Shape

BUILTIN = "builtin"
WORTH = 0.98  # share of the built-in's time: two timings of one variant differ by up to 2 %
FLUSHED_BYTES = 256 * 2**20  # written between two timings: more than any L2 cache
# Flushes before a timed call: they keep the GPU (an H200) busy for half a millisecond, in which the host gets ahead as
# in a training step. A call that takes the host longer than that is as slow as the host.
FLUSHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of a call: the median of its repetitions, and half of their interquartile range."""

    median_ms: float
    spread_ms: float = 0.0

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Summarize repetitions.

        >>> Timing.of([1.0, 5.0, 2.0, 4.0, 3.0])
        Timing(median_ms=3.0, spread_ms=1.0)
        """
        low, _, high = statistics.quantiles(samples_ms, n=4, method="inclusive") if len(samples_ms) > 1 else (0, 0, 0)
        return cls(median_ms=statistics.median(samples_ms), spread_ms=(high - low) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """The variant that runs, and the measured time of each variant."""

    op: str
    variant: str
    times_ms: Mapping[str, float]  # by variant; empty where nothing was measured
    spreads_ms: Mapping[str, float] = field(default_factory=dict)  # by variant
    is_remembered: bool = False  # measured by an earlier run

    def describe(self) -> str:
        """Return one line for the console.

        >>> KernelChoice(op="adamw", variant="triton", times_ms={"builtin": 8.46, "triton": 6.9}).describe()
        'adamw: triton, 6.90 ms (builtin 8.46 ms)'
        >>> timed = {"flash": 8.46, "cudnn": 6.9}
        >>> KernelChoice(op="attention", variant="cudnn", times_ms=timed, spreads_ms={"cudnn": 0.05}).describe()
        'attention: cudnn, 6.90 ± 0.05 ms (flash 8.46 ms)'
        >>> KernelChoice(op="adamw", variant="builtin", times_ms={}).describe()
        'adamw: builtin'
        """
        if self.time_ms is None:
            return f"{self.op}: {self.variant}"
        other_times = ", ".join(f"{name} {self._time_of(name)}" for name in self.times_ms if name != self.variant)
        return f"{self.op}: {self.variant}, {self._time_of(self.variant)}" + (
            f" ({other_times})" if other_times else ""
        )

    @property
    def time_ms(self) -> float | None:
        """Milliseconds of the selected variant, or None where it was not measured."""
        time_ms = self.times_ms.get(self.variant, math.inf)
        return time_ms if math.isfinite(time_ms) else None

    def _time_of(self, variant: str) -> str:
        """Return a variant's time with its spread, if that is visible with two decimals."""
        spread = self.spreads_ms.get(variant, 0.0)
        return f"{self.times_ms[variant]:.2f}" + (f" ± {spread:.2f} ms" if spread >= 0.005 else " ms")


def choose_variant(
    op: KernelOp, shape: Shape, dtype: torch.dtype, device: torch.device, *, folder: Path | None
) -> KernelChoice:
    """Select the fastest variant for this shape; `folder` caches the choices between runs, None disables the cache."""
    if device.type != "cuda":
        return KernelChoice(op=op.name, variant=BUILTIN, times_ms={})
    key = choice_key(op.name, shape, dtype, device)
    return choose_measured(
        op.name, key, list(op.variants), lambda: measure_variants(op, shape, dtype, device), folder=folder
    )


def choose_measured(
    name: str, key: str, variants: Sequence[str], measure: Callable[[], Mapping[str, Timing]], *, folder: Path | None
) -> KernelChoice:
    """Return the fastest of some variants, by the cached times of an earlier run or by calling `measure` now."""
    entry = read_choices(folder).get(key)
    # Entries without spreads are from versions that timed variants one after the other, with another attention kernel.
    if entry is not None and entry["variant"] in variants and entry.get("of") == list(variants) and entry["spreads_ms"]:
        return KernelChoice(
            op=name,
            variant=entry["variant"],
            times_ms=entry["times_ms"],
            spreads_ms=entry["spreads_ms"],
            is_remembered=True,
        )
    timings = measure()
    choice = KernelChoice(
        op=name,
        variant=fastest_variant(timings),
        times_ms={variant: timing.median_ms for variant, timing in timings.items()},
        spreads_ms={variant: timing.spread_ms for variant, timing in timings.items()},
    )
    remember_choice(key, choice, variants, folder)
    return choice


def chosen_here(ops: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the cached choices for this machine's GPU, by operation; without a GPU, the built-in for each."""
    if not torch.cuda.is_available():
        return dict.fromkeys(ops, f"{BUILTIN} (CPU)")
    return chosen_variants(read_choices(kernel_cache_folder(environ)), device=torch.cuda.get_device_name())


def fastest_variant(timings: Mapping[str, Timing]) -> str:
    """Return the fastest variant; the built-in where the gain is small or within the spread of the two.

    >>> builtin, fast = Timing(median_ms=1.0, spread_ms=0.1), Timing(median_ms=0.5, spread_ms=0.1)
    >>> fastest_variant({"builtin": builtin, "triton": fast})
    'triton'
    >>> fastest_variant({"builtin": builtin, "triton": Timing(median_ms=0.99)})
    'builtin'
    >>> fastest_variant({"builtin": builtin, "triton": Timing(median_ms=0.9, spread_ms=0.05)})
    'builtin'
    """
    best = min(timings, key=lambda name: timings[name].median_ms)
    builtin = timings.get(BUILTIN, Timing(median_ms=math.inf))
    gain = builtin.median_ms - timings[best].median_ms
    is_clear = gain > builtin.spread_ms + timings[best].spread_ms
    return best if is_clear and timings[best].median_ms < WORTH * builtin.median_ms else BUILTIN


def choice_key(op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """Return the cache key: everything that a measurement depends on."""
    sizes = " ".join(f"{name}={size}" for name, size in sorted(shape.items()))
    return " | ".join((op, sizes, str(dtype).removeprefix("torch."), device_name(device), _package_versions()))


def device_name(device: torch.device) -> str:
    """Return a GPU's name with its driver version, or the type of another device."""
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} driver {_driver_version()}"


def _driver_version() -> str:
    """Return the version of the NVIDIA kernel module; torch only reports the CUDA version that it supports."""
    try:
        words = read_bounded(Path("/proc/driver/nvidia/version"), 4096).decode(errors="replace").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") == 2 and word.replace(".", "").isdigit()), "unknown")


def _package_versions() -> str:
    versions = []
    for name in ("torch", "triton", "phalanx"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} none")
    return " ".join(versions)


def remember_choice(key: str, choice: KernelChoice, variants: Sequence[str], folder: Path | None) -> None:
    """Store a choice with the variants that it was made from."""
    entry = {
        "variant": choice.variant,
        "times_ms": dict(choice.times_ms),
        "spreads_ms": dict(choice.spreads_ms),
        "of": list(variants),
    }
    write_choice(key, entry, folder)


# Measuring. ---------------------------------------------------------------------------------------------------------


def measure_variants(op: KernelOp, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Timing]:
    """Time every correct variant: forward, and backward where the operation has gradients."""
    try:
        inputs = op.make_inputs(shape, dtype, device, 0)
        calls = {
            name: timed_call(op, name, inputs)
            for name in op.variants
            if name == BUILTIN or is_right(op, name, dtype, device)
        }
    except torch.OutOfMemoryError:  # a job that fills the GPU still trains, with the built-in
        return {BUILTIN: Timing(median_ms=math.inf)}
    return time_in_turn(calls, device) or {BUILTIN: Timing(median_ms=math.inf)}


def timed_call(op: KernelOp, variant: str, inputs: Inputs) -> Callable[[], object]:
    """Return a call of one repetition: in place where a trainer runs the variant so, else forward and backward."""
    if variant in op.timed_in_place:
        in_place = op.timed_in_place[variant]
        return lambda: in_place(*inputs)
    run = op.variants[variant]
    if not op.gradients:
        return lambda: run(*inputs)
    sources = [tensor.detach().requires_grad_(place in op.gradients) for place, tensor in enumerate(inputs)]
    differentiable = [sources[place] for place in op.gradients]
    with torch.no_grad():
        grads = [torch.randn_like(tensor) if tensor.ndim else torch.ones_like(tensor) for tensor in run(*inputs)]
    return lambda: torch.autograd.grad(run(*sources), differentiable, grads)


def time_in_turn(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 20,
    limit_s: float = 1.0,
    with_host: bool = False,
    flushes: int = FLUSHES,
) -> dict[str, Timing]:
    """Time calls in alternating order (A B, B A, …) with a cold L2 cache; a call that runs out of memory is left out.

    Each call runs `rounds` times, or fewer if that exceeds `limit_s` seconds per call on average. Times are those of
    the device, or, `with_host`, until the host has the result: a call of many small kernels takes as long as the host
    needs to issue them.
    """
    remaining = dict(calls)
    samples_ms: dict[str, list[float]] = {name: [] for name in calls}
    flushed = torch.empty(FLUSHED_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)

    def run(name: str, measure: Callable[[Callable[[], object]], float | None]) -> None:
        try:
            took_ms = measure(remaining[name])
            if took_ms is not None:
                samples_ms[name].append(took_ms)
        except torch.OutOfMemoryError:
            del remaining[name], samples_ms[name]
            torch.cuda.empty_cache()

    def warm_up(call: Callable[[], object]) -> None:
        for _ in range(3):
            call()

    def one_call_ms(call: Callable[[], object]) -> float:
        if device.type != "cuda":
            return _host_ms(call)
        for _ in range(flushes):
            flushed.zero_()
        return _until_done_ms(call, device) if with_host else _on_device_ms(call)

    for name in calls:
        run(name, warm_up)
    began_s, done = time.perf_counter(), 0
    while remaining and done < rounds and (done < 3 or time.perf_counter() - began_s < limit_s * len(remaining)):
        for name in list(remaining) if done % 2 == 0 else list(reversed(remaining)):
            run(name, one_call_ms)
        done += 1
    return {name: Timing.of(samples) for name, samples in samples_ms.items()}


def _on_device_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call on the GPU, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _until_done_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds from the call to the end of its work on the GPU."""
    torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began_s) * 1e3


def _host_ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call by the host's clock."""
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e3


def is_right(op: KernelOp, variant: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether results and gradients on the odd shapes are within the operation's error bound of float64."""
    return all(
        largest_error(op, variant, shape, dtype, device, seed) <= op.error_bound(dtype)
        for seed, shape in enumerate(op.odd_shapes)
    )


def largest_error(
    op: KernelOp, variant: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> float:
    """Return the largest error of results and gradients, relative to the largest exact value in the same row."""
    inputs = op.make_inputs(shape, dtype, device, seed)
    sources = [tensor.detach().requires_grad_(place in op.gradients) for place, tensor in enumerate(inputs)]
    exact = [tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in inputs]
    for place in op.gradients:
        exact[place].requires_grad_()
    results, truth = op.decoded(op.variants[variant](*sources), inputs), op.reference(*exact)
    pairs = [(tensor.detach(), expected.detach()) for tensor, expected in zip(results, truth, strict=True)]
    if op.gradients:
        # In the dtype of the results, so that both sides start from the same numbers.
        grads = [torch.randn_like(tensor) if tensor.ndim else torch.ones_like(tensor) for tensor, _ in pairs]
        result_grads = torch.autograd.grad(results, [sources[place] for place in op.gradients], grads)
        truth_grads = torch.autograd.grad(
            truth, [exact[place] for place in op.gradients], [tensor.double() for tensor in grads]
        )
        pairs += zip(result_grads, truth_grads, strict=True)
    return max(_row_error(tensor, expected) for tensor, expected in pairs)


def _row_error(found: Tensor, truth: Tensor) -> float:
    """Return the largest error relative to the largest exact value in its row; infinite for another shape or NaN."""
    if found.shape != truth.shape:
        return math.inf
    error, size = (found.double() - truth).abs(), truth.abs()
    if truth.ndim:
        error, size = error.amax(dim=-1), size.amax(dim=-1)
    worst = float((error / size.clamp(min=1e-30)).max()) if error.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf
