"""`phalanx kernels bench`: times an operation's variants, eager PyTorch and torch.compile; plots them in a roofline."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.io.svg import PLANNED_STYLE, PlotLine, line_plot, standalone_svg, svg_element
from phalanx.io.values import printable
from phalanx.train.kernels.kernel_op import KernelOp, Outputs, Shape
from phalanx.train.kernels.lab.arena import DTYPES
from phalanx.train.kernels.lab.error_rules import error_ratio, find_truth
from phalanx.train.kernels.lab.machine_limits import MachineLimits, measure_limits, median_seconds
from phalanx.train.kernels.lab.trial_inputs import KernelCase, check_shape, draw_inputs, timed_shape
from phalanx.units import format_flops

REPEATS = {"cpu": 10, "cuda": 20}
# float64 results above this size are not computed, and errors not measured.
MOST_TRUTH_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantTime:
    """One variant at one shape; where it does not run here, `seconds` is infinite and `problem` is the reason."""

    shape: Mapping[str, int]
    name: str
    seconds: float
    moved_bytes: int  # the minimum that it must read and write
    flops: int
    light: float  # fraction of the speed of light
    error: float = math.nan  # the largest error over the allowed one; NaN where it was not compared
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTable:
    """The measured times of an operation, with device, date and software versions."""

    op: str
    dtype: str
    device: str
    device_name: str
    date: str
    torch: str
    triton: str
    bytes_per_s: float
    flops_per_s: float
    rows: tuple[VariantTime, ...]


def find_device(text: str | None) -> torch.device:
    """Return the requested device, or the default, a GPU where there is one; raise UserError or SystemFailure."""
    name = text or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise mistake("--device", f'"{name[:40]}" is no device', fix="use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise mistake("--device", f"kernels are measured on cpu and cuda, not on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        problem = "there is no GPU that this PyTorch can use"
        raise SystemFailure(
            Problem(where="--device cuda", what=problem, fix="use --device cpu, which runs every operation")
        )
    return device


def find_dtype(op: KernelOp, text: str | None) -> torch.dtype:
    """Return the dtype of an option, or the operation's first; raise UserError if the operation does not have it."""
    op_dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in op.dtypes}
    short = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}
    if text is None:
        return next(iter(op_dtypes.values()))
    name = short.get(text, text)
    if name not in op_dtypes:
        listed = ", ".join(op_dtypes)
        problem = f"{op.name} has no {text[:40]}" if name in DTYPES else f'"{text[:40]}" is no type of numbers'
        raise mistake("--dtype", problem, fix=f"use {listed}")
    return op_dtypes[name]


def measure_op(
    op: KernelOp,
    *,
    shapes: Sequence[Shape] = (),
    dtype: str | None = None,
    device: str | None = None,
    compiled: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> BenchTable:
    """Time every variant at every shape; a variant that fails gets the reason as its `problem`."""
    run_device, kind = find_device(device), find_dtype(op, dtype)
    for shape in shapes:
        check_shape(op, shape)
    chosen = [dict(given_shape) for given_shape in shapes] or [timed_shape(op, kind, run_device)]
    tell(f"what this machine does at most, in {str(kind).removeprefix('torch.')}")
    limits = measure_limits(run_device, kind)
    rows: list[VariantTime] = []
    for shape in chosen:
        rows += _measure_shape(op, shape, kind, run_device, limits, compiled=compiled, tell=tell)
    return BenchTable(
        op=op.name,
        dtype=str(kind).removeprefix("torch."),
        device=run_device.type,
        device_name=torch.cuda.get_device_name(run_device) if run_device.type == "cuda" else _cpu_name(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        torch=torch.__version__,
        triton=_triton_version(),
        bytes_per_s=limits.bytes_per_s,
        flops_per_s=limits.flops_per_s,
        rows=tuple(rows),
    )


def _measure_shape(
    op: KernelOp,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    limits: MachineLimits,
    *,
    compiled: bool,
    tell: Callable[[str], None],
) -> list[VariantTime]:
    """Time every variant at one shape and measure its error."""
    inputs = draw_inputs(op, KernelCase(shape=shape, dtype=dtype, seed=1), device)
    output_gradients = [
        torch.randn_like(result) if result.ndim else torch.ones_like(result) for result in op.reference(*inputs)
    ]
    work = op.count_work(shape, dtype)
    calls: dict[str, Callable[..., Outputs]] = {"eager": op.plain}
    if compiled:
        calls["torch.compile"] = torch.compile(op.plain, dynamic=False)
    if device.type in op.devices or device.type == "cpu":
        calls |= op.variants
    rows, exact_results = [], None
    if work.written_bytes / dtype.itemsize * 8 <= MOST_TRUTH_BYTES:
        exact_results = find_truth(op, inputs, dtype, shape=shape)
    for name, call in calls.items():
        tell(f"{op.name} {','.join(f'{key}={size}' for key, size in shape.items())}: {name}")
        seconds, error, problem = math.inf, math.nan, ""
        try:
            with torch.no_grad():
                if exact_results is not None:
                    pairs = zip(op.decoded(call(*inputs), inputs), exact_results, strict=True)
                    error = max(error_ratio(value, exact)[0] for value, exact in pairs)
            timed = _timed_call(op, name, call, inputs, output_gradients)
            seconds = median_seconds(timed, device, repeats=REPEATS[device.type])
        # Such as a compiler that is not installed, a kernel that the device cannot run, or too little memory.
        except Exception as failure:
            problem = printable(f"{type(failure).__name__}: {failure}", most=160).splitlines()[0]
        rows.append(
            VariantTime(
                shape=dict(shape),
                name=name,
                seconds=seconds,
                moved_bytes=work.read_bytes + work.written_bytes,
                flops=work.flops,
                light=limits.least_seconds(work) / seconds,
                error=error,
                problem=problem,
            )
        )
    return rows


def _timed_call(
    op: KernelOp, name: str, call: Callable[..., Outputs], inputs: tuple[torch.Tensor, ...], back: list[torch.Tensor]
) -> Callable[[], object]:
    """Return a call of forward, and backward where the operation has gradients, as its minimum work counts both."""
    if name in op.timed_in_place:
        in_place, copies = op.timed_in_place[name], [tensor.clone() for tensor in inputs]
        return lambda: in_place(*copies)
    if not op.gradients:
        return lambda: call(*inputs)
    sources = [tensor.detach().requires_grad_(place in op.gradients) for place, tensor in enumerate(inputs)]
    differentiable = [sources[place] for place in op.gradients]

    def both_ways() -> object:
        results = [(result, grad) for result, grad in zip(call(*sources), back, strict=True) if result.requires_grad]
        return torch.autograd.grad([result for result, _ in results], differentiable, [grad for _, grad in results])

    return both_ways


def _cpu_name() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def _triton_version() -> str:
    from phalanx.io.packages import installed_version

    return installed_version("triton") or "none"


def roofline_svg(table: BenchTable) -> str:
    """Draw arithmetic per second over arithmetic per byte: the two roofs of the machine, and a dot per variant."""
    rows = [row for row in table.rows if math.isfinite(row.seconds) and row.flops > 0 and row.moved_bytes > 0]
    if not rows:
        return ""
    ridge = math.log10(table.flops_per_s / table.bytes_per_s)
    marks = [math.log10(row.flops / row.moved_bytes) for row in rows]
    low, high = min(*marks, ridge) - 0.5, max(*marks, ridge) + 0.5
    roof = PlotLine(
        label="speed of light",
        x=[low, ridge, high],
        mean=[math.log10(table.bytes_per_s) + low, math.log10(table.flops_per_s), math.log10(table.flops_per_s)],
        style=PLANNED_STYLE,
    )
    names = list(dict.fromkeys(row.name for row in rows))
    lines = [
        PlotLine(
            label=name,
            x=[mark for row, mark in zip(rows, marks, strict=True) if row.name == name],
            mean=[math.log10(row.flops / row.seconds) for row in rows if row.name == name],
            style=str(index % 3 + 1),
            dots=True,
        )
        for index, name in enumerate(names)
    ]
    picture = line_plot(
        f"roofline of {table.op}, {table.dtype}, on {table.device_name}",
        [roof, *lines],
        show=lambda value: format_flops(10.0**value).removesuffix("FLOP/s").strip(),
        show_x=lambda value: f"{10.0**value:.3g}",
    )
    labels = [
        svg_element("text", "FLOP/s", class_="tick", x=68.0, y=22.0),
        svg_element("text", "FLOP per byte", class_="tick", text_anchor="end", x=630.0, y=188.0),
    ]
    for index, name in enumerate(names):
        best = max(row.light for row in rows if row.name == name)
        y = 174.0 - 14.0 * (len(names) - 1 - index)
        labels.append(svg_element("circle", class_=f"dot s{index % 3 + 1}", cx=420.0, cy=y - 4.0, r=3))
        labels.append(svg_element("text", printable(f"{name}: {best:.0%} of light"), class_="tick", x=428.0, y=y))
    return standalone_svg(picture.replace("</svg>", "\n".join([*labels, "</svg>"])))
