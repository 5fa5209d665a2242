"""Error limits of a kernel's results: the exact values in float64, and the allowed distance of each value.

An error is compared with the operation's bound, element by element, and with the built-in's own error on the same
inputs: by row, by column, over all rows and in its quantiles. A result that is within the bound everywhere but
several times less exact than PyTorch's own is wrong, such as a gradient without one of its small terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.train.kernels.kernel_op import KernelOp, Outputs, Shape
from phalanx.train.kernels.lab.candidate_server import RefusedError

# An operation's error bound applies to its results; gradients may be off by this many times more.
GRADIENT_ALLOWANCE = 4.0
CONDITION_ALLOWANCE = 4.0  # times the error of the reference itself in float32, on the same inputs
# Times the largest error of the built-in in the same row, where that is above the bound.
BUILTIN_ALLOWANCE = 4.0
# Multiples of the built-in's RMS error. A kernel that rounds an intermediate result three times more often than the
# built-in loses twice as much over all rows, and up to four times as much in the worst row.
RMS_MULTIPLE, ROW_MULTIPLE, QUANTILE_MULTIPLE = 3.0, 5.0, 3.0
# Limit of the mean error in the direction of the exact value, in the built-in's RMS errors. Rounding toward zero has
# 1.2 in bfloat16, a result that is 0.25 % too large 1.0, and all other rules allow both. Biases add up over layers.
BIAS_LIMIT, BIAS_SPREAD = 0.5, 4.0
# For codes: scales that are powers of two have errors up to one half larger than others.
CODE_MULTIPLE = 2.0
# An estimate from few values is uncertain: limits are wider by this over the square root of their number.
RMS_SPREAD, ROW_SPREAD = 3.0, 1.4
# Share: |z| of a normal distribution, in standard deviations.
QUANTILES = {0.5: 0.674, 0.9: 1.645, 0.99: 2.576}
MIN_QUANTILE_VALUES, MAX_SAMPLED_VALUES = 1000, 65536
# Rows shorter than this are estimated from the built-in's error on more inputs.
SHORT_ROW, MORE_DRAWS = 16, 4
CHUNK = 1024  # a long vector is compared in rows of this many elements
_FLOAT32_ROUNDING = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactResult:
    """One result or gradient in float64, and the limits of its error; rows are those of `as_rows`."""

    name: str
    value: Tensor
    allowed: Tensor  # per element, broadcast over rows
    # RMS error of the built-in in each row, at least the rounding error of the format.
    row_errors: Tensor
    row_limit: float  # multiples of `row_errors`
    rms_limit: float  # multiples of `row_errors`, root mean square over all rows
    # Multiples of `row_errors`, root mean square over each column; empty where there are few rows.
    column_limits: Tensor
    quantile_limits: Sequence[tuple[float, float]]  # (quantile, multiple)
    bias_limit: float = math.inf  # the same, of the mean error in the direction of the truth


def find_truth(
    op: KernelOp,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    output_gradients: Sequence[Tensor] = (),
    *,
    shape: Shape | None = None,
) -> list[ExactResult]:
    """Compute results and gradients in float64, with the limits of their errors; `shape` gives the reduction length."""
    exact, float32_values = (
        _reference_values(op, inputs, kind, output_gradients) for kind in (torch.float64, torch.float32)
    )
    num_results = len(exact) - (len(op.gradients) if output_gradients else 0)
    builtin = [_builtin_values(op, inputs, output_gradients)]
    errors = [[_finite_error(value, true) for value, true in zip(builtin[0], exact, strict=True)]]
    errors += _errors_of_more_draws(op, inputs, dtype, output_gradients, exact, num_results)
    kinds = _result_types(op, inputs, num_results, exact)
    length = (
        op.reduction_length(shape) if shape else max((max(tensor.shape, default=1) for tensor in inputs), default=1)
    )
    bound, exact_results = op.error_bound(dtype), []
    for number, true in enumerate(exact):
        is_gradient = number >= num_results
        largest = _row_largest(true)
        allowed = largest * bound * (GRADIENT_ALLOWANCE if is_gradient else 1.0)
        allowed = allowed + CONDITION_ALLOWANCE * _row_largest(_finite_error(float32_values[number], true))
        if op.format and op.format.steps and true.numel():
            allowed = allowed + op.format.steps[number] * true.abs().max()
        name = f"gradient of input {op.gradients[number - num_results]}" if is_gradient else f"result {number}"
        value_errors = [draw[number] for draw in errors if number < len(draw)]
        signed = _signed_error(builtin[0][number], true)
        for error in () if op.format else value_errors:
            allowed = torch.maximum(allowed, BUILTIN_ALLOWANCE * _row_largest(error))
        exact_results.append(_exact_result(name, true, allowed, value_errors, kinds[number], length, signed))
    return exact_results


def error_ratio(value: Tensor, exact: ExactResult) -> tuple[float, str]:
    """Return the largest error over its limit, by all rules, and a clause that describes the worst violation."""
    if not value.numel():
        return 0.0, ""
    wide = value.double()
    wrong = torch.isnan(wide) & ~torch.isnan(exact.value)
    if bool(wrong.any()):
        share = float(wrong.float().mean())
        clause = f"holds not-a-number in {share:.1%} of its elements: not written, or read outside of inputs"
        return math.inf, clause
    # Elements whose exact value is not finite are not compared.
    signed = torch.where(torch.isfinite(exact.value), wide - exact.value, 0.0)
    error = signed.abs()
    ratio = float((error / exact.allowed.clamp(min=torch.finfo(torch.float32).tiny)).max())
    if ratio > 1.0:
        share = float((error > exact.allowed).float().mean())
        return ratio, f"is off by {ratio:.3g} times the error bound, in {share:.1%} of its elements"
    return max(((ratio, ""), *_compare_distributions(signed, exact)), key=lambda pair: pair[0])


def _compare_distributions(signed: Tensor, exact: ExactResult) -> list[tuple[float, str]]:
    """Apply the rules relative to the built-in's own error; return (ratio to the limit, clause) of each."""
    relative = _relative_error(as_rows(signed.abs()), exact.row_errors)
    by_row = _rms(relative, -1)
    row = int(by_row.argmax())
    over = "times the error of PyTorch's own on the same inputs"
    largest = float(by_row[row])
    ratios = [(largest / exact.row_limit, f"has {largest:.3g} {over} in row {row:,}, {exact.row_limit:.3g} is allowed")]
    total = float(by_row.square().mean().sqrt())
    ratios.append((total / exact.rms_limit, f"has {total:.3g} {over}, {exact.rms_limit:.3g} is allowed"))
    if exact.column_limits.numel():
        excess = _rms(relative, 0) / exact.column_limits
        column = int(excess.argmax())
        multiple, limit = float(excess[column] * exact.column_limits[column]), float(exact.column_limits[column])
        clause = f"has {multiple:.3g} {over} in column {column:,}, {limit:.3g} is allowed"
        ratios.append((float(excess[column]), clause))
    bias = _mean_bias(signed, exact.value, exact.row_errors)
    is_small = "too small" if bias < 0 else "too large"
    clause = f"is {is_small} on average by {abs(bias):.3g} {over}, {exact.bias_limit:.3g} is allowed"
    ratios.append((abs(bias) / exact.bias_limit, clause))
    for quantile, multiple in exact.quantile_limits:
        beyond = float((relative > multiple).float().mean())
        # As a ratio of shares: 1 where exactly as many values as may be lie beyond the limit.
        clause = f"has {beyond:.1%} of its errors above {multiple:.3g} {over}, {1 - quantile:.0%} may be"
        ratios.append((beyond / (1.0 - quantile), clause))
    return ratios


def as_rows(values: Tensor) -> Tensor:
    """Return values in two dimensions: rows of the last one; a long vector as rows of `CHUNK`, padded with zeros."""
    if values.dim() >= 2:
        return values.reshape(-1, values.shape[-1])
    flat = values.reshape(1, -1)
    if flat.shape[1] < 2 * CHUNK:
        return flat
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % CHUNK)).view(-1, CHUNK)


def _exact_result(
    name: str,
    true: Tensor,
    allowed: Tensor,
    errors: Sequence[Tensor],
    kind: torch.dtype | None,
    length: int,
    signed: Tensor,
) -> ExactResult:
    """Derive the limits from the built-in's errors on these inputs, and on more draws where there are any."""
    rows = as_rows(torch.where(torch.isfinite(true), true, 0.0))
    if not rows.numel():
        empty = torch.empty(0, dtype=torch.float64, device=true.device)
        return ExactResult(
            name=name, value=true, allowed=allowed, row_errors=empty, row_limit=1.0, rms_limit=1.0,
            column_limits=empty, quantile_limits=(),
        )  # fmt: skip
    sizes = _rms(rows, -1)
    by_row = torch.stack([_rms(as_rows(error), -1) for error in errors]).square().mean(0).sqrt()
    typical = (by_row / sizes.clamp(min=torch.finfo(torch.float64).tiny))[sizes > 0]
    pooled = typical.median() if typical.numel() else sizes.new_zeros(())
    # A sum of n numbers in float32 has about √n rounding errors; the result itself is rounded once more.
    rounding = torch.finfo(kind).eps / 4 if kind is not None else 0.0
    floor = rounding + _FLOAT32_ROUNDING * math.sqrt(max(1, length))
    row_errors = torch.maximum(by_row, sizes * torch.maximum(pooled, sizes.new_tensor(floor)))[:, None]
    relative = _relative_error(as_rows(errors[0]), row_errors)
    columns = sizes.new_empty(0)
    if len(rows) >= SHORT_ROW:
        # A column may be dominated by a few outliers, whose errors grow with their size.
        expected = torch.maximum(_rms(relative, 0), _rms(_relative_error(rows, sizes[:, None]), 0)).clamp(min=1.0)
        columns = ROW_MULTIPLE * (1 + ROW_SPREAD / math.sqrt(len(rows))) * expected
    # Errors within a row may share the rounding of a factor, so only rows count as independent samples.
    bias = math.inf
    if len(rows) >= SHORT_ROW and rows.numel() >= MIN_QUANTILE_VALUES:
        own = abs(_mean_bias(signed, true, row_errors))
        bias = BIAS_LIMIT + BIAS_SPREAD / math.sqrt(len(rows)) + own
    quantiles = []
    if rows.numel() >= MIN_QUANTILE_VALUES:
        sampled = relative.flatten()[:: -(-relative.numel() // MAX_SAMPLED_VALUES)].sort().values
        for quantile, normal in QUANTILES.items():
            own = float(sampled[int(quantile * (len(sampled) - 1))])
            quantiles.append((quantile, QUANTILE_MULTIPLE * max(own, normal)))
    return ExactResult(
        name=name,
        value=true,
        allowed=allowed,
        row_errors=row_errors,
        row_limit=ROW_MULTIPLE * (1 + ROW_SPREAD / math.sqrt(rows.shape[1])),
        rms_limit=(RMS_MULTIPLE if kind is not None else CODE_MULTIPLE) * (1 + RMS_SPREAD / math.sqrt(rows.numel())),
        column_limits=columns,
        quantile_limits=tuple(quantiles),
        bias_limit=bias,
    )


def _relative_error(rows: Tensor, row_errors: Tensor) -> Tensor:
    """Divide errors by the expected error of their row; a row of zeros must have no error."""
    tiny = torch.finfo(torch.float32).tiny
    return rows / row_errors.clamp(min=tiny)


def _mean_bias(signed: Tensor, true: Tensor, row_errors: Tensor) -> float:
    """Return the mean relative error in the direction of the exact value: positive where values are too large."""
    toward = torch.where(torch.isfinite(true), signed * true.sign(), 0.0)
    return float(_relative_error(as_rows(toward), row_errors).mean())


def _rms(values: Tensor, dim: int) -> Tensor:
    """Return the root mean square along a dimension."""
    return values.square().mean(dim).sqrt()


def _row_largest(values: Tensor) -> Tensor:
    """Return the largest magnitude in each row; a single number is its own row."""
    sizes = values.abs()
    return sizes.amax(dim=-1, keepdim=True) if sizes.dim() and sizes.shape[-1] else sizes


def _finite_error(value: Tensor, true: Tensor) -> Tensor:
    """Return |value - true|, zero where either is not finite: an overflow of the built-in must not widen a limit."""
    return _signed_error(value, true).abs()


def _signed_error(value: Tensor, true: Tensor) -> Tensor:
    """Return value - true, zero where either is not finite."""
    return torch.where(torch.isfinite(true) & torch.isfinite(value), value - true, 0.0)


# ---- the built-in and the reference ----------------------------------------------------------------------------------


def _errors_of_more_draws(
    op: KernelOp,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    output_gradients: Sequence[Tensor],
    exact: Sequence[Tensor],
    num_results: int,
) -> list[list[Tensor]]:
    """Return the built-in's errors on inputs that differ in the last place, where results have short rows.

    The error of a single short row may be small by luck.
    """
    short = [number for number, true in enumerate(exact) if true.numel() and as_rows(true).shape[1] < SHORT_ROW]
    if not short or op.format is not None:
        return []
    needed_gradients = output_gradients if max(short) >= num_results else ()
    errors = []
    for seed in range(MORE_DRAWS):
        source = torch.Generator(inputs[0].device).manual_seed(seed)
        changed = [_change_last_place(tensor, dtype, source) for tensor in inputs]
        values = _builtin_values(op, changed, needed_gradients)
        truth = _reference_values(op, changed, torch.float64, needed_gradients)
        errors.append([_finite_error(value, true) for value, true in zip(values, truth, strict=True)])
    return errors


def _change_last_place(values: Tensor, dtype: torch.dtype, source: torch.Generator) -> Tensor:
    """Multiply each number by 1 ± up to one epsilon of `dtype`."""
    if not values.is_floating_point():
        return values
    change = torch.rand(values.shape, generator=source, device=values.device) - 0.5
    return (values.double() * (1.0 + 2.0 * torch.finfo(dtype).eps * change.double())).to(values.dtype)


def _builtin_values(op: KernelOp, inputs: Sequence[Tensor], output_gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of PyTorch's built-in in the operation's dtypes, decoded, in float64."""
    builtin = op.plain if op.format else op.variants.get("builtin", op.plain)
    # Copies: a built-in that works in place must not change the inputs of the exact result.
    copies = tuple(tensor.detach().clone() for tensor in inputs)
    try:
        values = _values_and_gradients(op, builtin, copies, output_gradients)
    except (RuntimeError, NotImplementedError):  # the built-in does not run on this device
        values = _values_and_gradients(op, op.plain, copies, output_gradients)
    num_results = len(values) - (len(op.gradients) if output_gradients else 0)
    decoded = op.decoded(tuple(values[:num_results]), copies)
    return [tensor.double() for tensor in (*decoded, *values[num_results:])]


def _reference_values(
    op: KernelOp, inputs: Sequence[Tensor], kind: torch.dtype, output_gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Return the results of the reference, computed in dtype `kind`, in float64."""
    converted = [tensor.detach().to(kind) if tensor.is_floating_point() else tensor for tensor in inputs]
    return [tensor.double() for tensor in _values_and_gradients(op, op.reference, converted, output_gradients)]


def _values_and_gradients(
    op: KernelOp, function: Callable[..., Outputs], given: Sequence[Tensor], output_gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Call a function and return its results, then its gradients if gradients of results are given."""
    if not output_gradients:
        with torch.no_grad():
            return list(function(*given))
    sources = [tensor.requires_grad_() if place in op.gradients else tensor for place, tensor in enumerate(given)]
    results = function(*sources)
    pairs = [
        (tensor, grad.to(tensor.dtype))
        for tensor, grad in zip(results, output_gradients, strict=True)
        if tensor.requires_grad
    ]
    differentiable = [sources[place] for place in op.gradients]
    gradients = torch.autograd.grad([tensor for tensor, _ in pairs], differentiable, [grad for _, grad in pairs])
    for tensor in differentiable:
        tensor.requires_grad_(False)
    return [tensor.detach() for tensor in (*results, *gradients)]


def _result_types(
    op: KernelOp, inputs: Sequence[Tensor], num_results: int, exact: Sequence[Tensor]
) -> list[torch.dtype | None]:
    """Return the dtype of each result and gradient; None where results are codes, whose format sets the bound."""
    if op.format is not None:
        return [None] * len(exact)
    kinds = [kind[0] for kind in result_kinds(op, inputs)]
    dtypes: list[torch.dtype | None] = [*kinds, *(inputs[place].dtype for place in op.gradients)]
    return dtypes[: len(exact)]


def result_kinds(op: KernelOp, inputs: Sequence[Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return (dtype, shape) of each result, by plain operations on meta tensors where they support them."""
    try:
        results = op.plain(*(tensor.to("meta") for tensor in inputs))
    except (RuntimeError, NotImplementedError, ValueError):
        results = op.plain(*inputs)
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in results]


def compare_values(values: Sequence[Tensor], truth: Sequence[ExactResult], case_text: str) -> float:
    """Return the largest error over its limit; raise RefusedError where it is above 1."""
    worst = 0.0
    for value, exact in zip(values, truth, strict=True):
        ratio, clause = error_ratio(value, exact)
        if not ratio <= 1.0:
            raise RefusedError("values", f"{case_text}: {exact.name} {clause}")
        worst = max(worst, ratio)
    return worst
