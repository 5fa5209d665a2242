"""Which variant of an operation runs here: the fastest that was measured, never one slower than PyTorch's own.

Measured once for every (operation, shape, dtype) on a GPU with its driver and the versions of torch and Triton, and
remembered in the user's cache. A variant that is wrong on small odd shapes is not taken, however fast. What cannot be
read there is measured again; what cannot be written is not remembered. On a CPU nothing is measured, and PyTorch's own
runs.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.kernel_choices import chosen_variants, kernel_cache_folder, read_choices, write_choice
from phalanx.io.files import read_bounded
from phalanx.train.kernels.kernel_op import Inputs, KernelOp, Shape

BUILTIN = "builtin"
WORTH = 0.98  # of the built-in's time: a smaller gain is within what two timings of one variant differ by
FLUSHED_BYTES = 256 * 2**20  # written between two timings: more than any L2 cache
# So often: a GPU that is busy for half a millisecond (an H200) lets the host get ahead, as in a training step. A call
# that takes the host longer than that is as slow as the host.
FLUSHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """The variant that runs, and what each took."""

    op: str
    variant: str
    times_ms: Mapping[str, float]  # by variant; empty where nothing was measured
    is_remembered: bool = False  # measured by an earlier run

    def describe(self) -> str:
        """For a person.

        >>> KernelChoice(op="adamw", variant="triton", times_ms={"builtin": 8.46, "triton": 6.9}).describe()
        'adamw: triton, 6.90 ms (builtin 8.46 ms)'
        >>> KernelChoice(op="adamw", variant="builtin", times_ms={}).describe()
        'adamw: builtin'
        """
        if not math.isfinite(self.times_ms.get(self.variant, math.inf)):
            return f"{self.op}: {self.variant}"
        others = ", ".join(f"{name} {took:.2f} ms" for name, took in self.times_ms.items() if name != self.variant)
        return f"{self.op}: {self.variant}, {self.times_ms[self.variant]:.2f} ms" + (f" ({others})" if others else "")


def choose_variant(
    op: KernelOp, shape: Shape, dtype: torch.dtype, device: torch.device, *, folder: Path | None
) -> KernelChoice:
    """The fastest variant for this shape; from `folder` where an earlier run measured it, which None never did."""
    if device.type != "cuda":
        return KernelChoice(op=op.name, variant=BUILTIN, times_ms={})
    key = choice_key(op.name, shape, dtype, device)
    return choose_measured(
        op.name, key, list(op.variants), lambda: measure_variants(op, shape, dtype, device), folder=folder
    )


def choose_measured(
    name: str, key: str, variants: Sequence[str], measure: Callable[[], Mapping[str, float]], *, folder: Path | None
) -> KernelChoice:
    """The fastest of some variants by milliseconds that `measure` finds, or found in an earlier run."""
    entry = read_choices(folder).get(key)
    if entry is not None and entry["variant"] in variants and entry.get("of") == list(variants):
        return KernelChoice(op=name, variant=entry["variant"], times_ms=entry["times_ms"], is_remembered=True)
    times_ms = measure()
    choice = KernelChoice(op=name, variant=fastest_variant(times_ms), times_ms=times_ms)
    remember_choice(key, choice, variants, folder)
    return choice


def chosen_here(ops: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """By operation, what was taken on this machine's GPU so far; PyTorch's own on a machine without one."""
    if not torch.cuda.is_available():
        return dict.fromkeys(ops, f"{BUILTIN} (CPU)")
    return chosen_variants(read_choices(kernel_cache_folder(environ)), device=torch.cuda.get_device_name())


def fastest_variant(times_ms: Mapping[str, float]) -> str:
    """The fastest that is worth it.

    >>> fastest_variant({"builtin": 1.0, "triton": 0.99}), fastest_variant({"builtin": 1.0, "triton": 0.5})
    ('builtin', 'triton')
    """
    best = min(times_ms, key=lambda name: times_ms[name])
    return best if times_ms[best] < WORTH * times_ms.get(BUILTIN, math.inf) else BUILTIN


def choice_key(op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """Everything a measurement depends on."""
    sizes = " ".join(f"{name}={size}" for name, size in sorted(shape.items()))
    return " | ".join((op, sizes, str(dtype).removeprefix("torch."), device_name(device), _package_versions()))


def device_name(device: torch.device) -> str:
    """A GPU's name with its driver."""
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} driver {_driver_version()}"


def _driver_version() -> str:
    """As the kernel module says it; torch knows the CUDA version that it supports only."""
    try:
        words = read_bounded(Path("/proc/driver/nvidia/version"), 4096).decode(errors="replace").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") == 2 and word.replace(".", "").isdigit()), "unknown")


def _package_versions() -> str:
    found = []
    for name in ("torch", "triton", "phalanx"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} none")
    return " ".join(found)


def remember_choice(key: str, choice: KernelChoice, variants: Sequence[str], folder: Path | None) -> None:
    """Keep a choice, and between which it was."""
    entry = {"variant": choice.variant, "times_ms": dict(choice.times_ms), "of": list(variants)}
    write_choice(key, entry, folder)


# Measuring. ---------------------------------------------------------------------------------------------------------


def measure_variants(op: KernelOp, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Milliseconds of every variant that is right: forward, and backward where the operation has gradients."""
    times: dict[str, float] = {}
    try:
        inputs = op.make_inputs(shape, dtype, device, 0)
    except torch.OutOfMemoryError:  # a job that fills the GPU trains all the same
        return {BUILTIN: math.inf}
    for name in op.variants:
        if name != BUILTIN and not is_right(op, name, dtype, device):
            continue
        with contextlib.suppress(torch.OutOfMemoryError):
            times[name] = time_call(timed_call(op, name, inputs), device)
        torch.cuda.empty_cache()
    return times or {BUILTIN: math.inf}


def timed_call(op: KernelOp, variant: str, inputs: Inputs) -> Callable[[], object]:
    """One round of a variant: in place where a trainer runs it so, else forward and backward."""
    if variant in op.timed_in_place:
        in_place = op.timed_in_place[variant]
        return lambda: in_place(*inputs)
    run = op.variants[variant]
    if not op.gradients:
        return lambda: run(*inputs)
    given = [one.detach().requires_grad_(place in op.gradients) for place, one in enumerate(inputs)]
    wanted = [given[place] for place in op.gradients]
    with torch.no_grad():
        grads = [torch.randn_like(one) if one.ndim else torch.ones_like(one) for one in run(*inputs)]
    return lambda: torch.autograd.grad(run(*given), wanted, grads)


def time_call(
    call: Callable[[], object],
    device: torch.device,
    *,
    rounds: int = 20,
    limit_s: float = 1.0,
    with_host: bool = False,
    flushes: int = FLUSHES,
) -> float:
    """Median milliseconds of a call with a cold L2 cache, of `rounds` or as many as fit into the limit.

    On the device; or `with_host`, until it is done: a call of many small kernels takes what the host takes.
    """
    for _ in range(3):
        call()
    if device.type != "cuda":
        return statistics.median(_host_ms(call) for _ in range(rounds))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    found: list[float] = []
    while len(found) < rounds and (len(found) < 3 or time.perf_counter() - began_s < limit_s):
        for _ in range(flushes):
            flushed.zero_()
        if with_host:
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            call()
            torch.cuda.synchronize(device)
            found.append((time.perf_counter() - began) * 1e3)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def _host_ms(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e3


def is_right(op: KernelOp, variant: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether results and gradients on the odd shapes lie within the operation's own bound of float64."""
    return all(
        largest_error(op, variant, shape, dtype, device, seed) <= op.error_bound(dtype)
        for seed, shape in enumerate(op.odd_shapes)
    )


def largest_error(
    op: KernelOp, variant: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int
) -> float:
    """Of results and gradients, relative to the largest number in the row of the truth."""
    inputs = op.make_inputs(shape, dtype, device, seed)
    given = [one.detach().requires_grad_(place in op.gradients) for place, one in enumerate(inputs)]
    exact = [one.detach().double() if one.is_floating_point() else one for one in inputs]
    for place in op.gradients:
        exact[place].requires_grad_()
    found, truth = op.decoded(op.variants[variant](*given), inputs), op.reference(*exact)
    pairs = [(one.detach(), other.detach()) for one, other in zip(found, truth, strict=True)]
    if op.gradients:
        # In the format of the results, so that both sides start from the same numbers.
        grads = [torch.randn_like(one) if one.ndim else torch.ones_like(one) for one, _ in pairs]
        found_grads = torch.autograd.grad(found, [given[place] for place in op.gradients], grads)
        truth_grads = torch.autograd.grad(
            truth, [exact[place] for place in op.gradients], [one.double() for one in grads]
        )
        pairs += zip(found_grads, truth_grads, strict=True)
    return max(_row_error(one, other) for one, other in pairs)


def _row_error(found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape:
        return math.inf
    off, size = (found.double() - truth).abs(), truth.abs()
    if truth.ndim:
        off, size = off.amax(dim=-1), size.amax(dim=-1)
    worst = float((off / size.clamp(min=1e-30)).max()) if off.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf
