"""Comparison of two trial outcomes: the largest differences, and the first one that rounding does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.train.verify.trial import Array, TrialOutcome
from phalanx.units import plural

# Rounding differences between two right layouts, relative to the value. Each is derived, not fitted:
# - bf16 and fp16 have 8 and 11 bits, so one rounding is off by up to 2^-8 and 2^-11; sums run in fp32 and add nothing.
# - fp32 sums run in fp32 too: a sum of n terms is off by about sqrt(n) roundings of 2^-24, and n is up to 2^12 here.
# - fp8 (e4m3) has 4 bits. Both sides round the same numbers to it, except for what bf16 had rounded apart before: of
#   two neighbours 2^-8 apart a share of 2^-8 / 2^-3 falls on different sides of a boundary, and is then 2^-3 apart, in
#   the root of the mean square sqrt(2^-8 x 2^-3) = 2^-5.5.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-18, "fp8": 2.0**-5.5}
# Roundings that one number undergoes in forward and backward of a few layers, in the root of the mean square: about
# 2^8 (30 per layer and direction) that add up like a random walk.
ROUNDINGS_DEEP = 16
# A loss is a mean over tokens, a norm a sum over weights: single errors cancel in them. One rounding, and four for
# errors that many values share; four times that after the first update, in which Adam turns roundings of small
# gradients into steps.
OF_LOSS, OF_NORM, LATER = 1, 4, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """Bounds within which two outcomes count as equal.

    In float64 every layout known to be right is within 1e-12 after 5 AdamW steps, and a wrong one beyond 1e-4
    (shared/design/trainer.md, B1): the bounds below lie in between, far from both. In narrower formats (`rounded`)
    they are shares of the value, multiples of the format's rounding.
    """

    loss: float = 1e-10
    norm: float = 1e-9
    parameter: float | None = 1e-9  # None: not compared
    gradient: float = 1e-8  # share of the tensor's largest gradient: small ones must be right too
    # For values that are zero except for rounding, such as the gradient of a key's bias
    gradient_floor: float = 1e-13
    rounding: float = 0.0  # of the format, relative; 0 is float64, where the bounds above are absolute
    later: float = 1.0  # factor on the bounds of loss and norm after the first step

    @classmethod
    def rounded(cls, compute: str, *, also: float = 0.0) -> Tolerances:
        """Return the bounds for a narrower format; `also` is the rounding of gradients that are sent compressed.

        The gradients of the first step are compared tensor by tensor (the norm of the difference); parameters are
        not: Adam turns a gradient that is zero except for rounding into a full step.
        """
        unit = ROUNDING[compute]
        return cls(
            # Rounding a gradient adds to its norm only by the square: a quarter is a generous bound.
            loss=OF_LOSS * unit + also / 4,
            norm=OF_NORM * unit + also / 4,
            parameter=None,
            gradient=ROUNDINGS_DEEP * unit + also,
            gradient_floor=unit,
            rounding=unit,
            later=LATER,
        )


IN_FLOAT64 = Tolerances()


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeDifference:
    """The first value that differs by more than its bound."""

    what: str  # the name of a tensor, or "loss", "gradient norm", "held-out loss"
    kind: str  # "value", "gradient", "parameter", "copies"
    step: int  # from 1; 0 is before the first step
    size: float
    others: int = 0  # further tensors that differ at the same place
    of: int = 0

    def render(self) -> str:
        """Return the difference as a sentence."""
        if self.kind == "copies":
            return f"ranks that should hold the same do not: {self.what}"
        step_text = f"at step {self.step}" if self.step else "before the first step"
        if self.kind == "value":
            return f"{self.what} differs by {self.size:.1e} {step_text}"
        other_tensors = f", {self.others} of {plural(self.of - 1, 'other tensor')} too" if self.of > 1 else ""
        return f"{self.kind} of {self.what} differs by {self.size:.1e} {step_text}{other_tensors}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeComparison:
    """The largest differences, and the first one beyond the bounds if there is any."""

    loss: float
    norm: float
    evaluation: float
    gradient: float
    parameter: float
    worst_parameter: str
    first: OutcomeDifference | None


def compare_outcomes(found: TrialOutcome, wanted: TrialOutcome, bounds: Tolerances = IN_FLOAT64) -> OutcomeComparison:
    """Compare `found` with `wanted`; differences are shares of the value if the bounds are."""
    last_differences = _largest_differences(found.params[-1], wanted.params[-1]) if wanted.params else {}
    worst_name = max(last_differences, key=lambda name: last_differences[name], default="")
    relative = bool(bounds.rounding)
    if relative:
        shares = _first_shares(found.grads[0], wanted.grads[0], bounds) if wanted.grads else {}
        gradient = max(shares.values(), default=0.0)
    else:
        pairs = zip(found.grads, wanted.grads, strict=False)
        gradient = max((max(_largest_differences(a, b).values(), default=0.0) for a, b in pairs), default=0.0)
    return OutcomeComparison(
        loss=_most_apart(found.losses, wanted.losses, relative=relative),
        norm=_most_apart(found.norms, wanted.norms, relative=relative),
        evaluation=_most_apart(*(_per_token(outcome.evaluations) for outcome in (found, wanted)), relative=relative),
        gradient=gradient,
        parameter=last_differences[worst_name] if worst_name else 0.0,
        worst_parameter=worst_name,
        first=next(_outcome_differences(found, wanted, bounds), None),
    )


def _outcome_differences(found: TrialOutcome, wanted: TrialOutcome, bounds: Tolerances) -> Iterator[OutcomeDifference]:
    """Yield differences in the order in which a step computes: the first is nearest to the cause."""
    pairs = zip(_per_token(found.evaluations), _per_token(wanted.evaluations), strict=True)
    loss_differences = [_difference_size(a, b, bounds) for a, b in pairs]
    if loss_differences and not loss_differences[0] <= bounds.loss:
        yield OutcomeDifference(what="held-out loss", kind="value", step=0, size=loss_differences[0])
    for index in range(len(wanted.losses)):
        yield from _step_differences(found, wanted, bounds, index)
    if loss_differences and not loss_differences[-1] <= bounds.loss * bounds.later:
        yield OutcomeDifference(what="held-out loss", kind="value", step=len(wanted.losses), size=loss_differences[-1])
    if found.quarrels:
        yield OutcomeDifference(what=found.quarrels[0], kind="copies", step=0, size=0.0, others=len(found.quarrels) - 1)


def _step_differences(
    found: TrialOutcome, wanted: TrialOutcome, bounds: Tolerances, index: int
) -> Iterator[OutcomeDifference]:
    step, factor = index + 1, bounds.later if index else 1.0
    if not (size := _difference_size(found.losses[index], wanted.losses[index], bounds)) <= bounds.loss * factor:
        yield OutcomeDifference(what="loss", kind="value", step=step, size=size)
    if index < min(len(found.grads), len(wanted.grads)):
        if not bounds.rounding:
            reference = wanted.grads[index]
            largest = {name: float(np.abs(values).max(initial=0.0)) for name, values in reference.items()}
            limits = {name: bounds.gradient * size + bounds.gradient_floor for name, size in largest.items()}
            yield from _tensor_difference("gradient", _largest_differences(found.grads[index], reference), limits, step)
        elif not index:
            shares = _first_shares(found.grads[0], wanted.grads[0], bounds)
            yield from _tensor_difference("gradient", shares, dict.fromkeys(shares, bounds.gradient), step)
    if not (size := _difference_size(found.norms[index], wanted.norms[index], bounds)) <= bounds.norm * factor:
        yield OutcomeDifference(what="gradient norm", kind="value", step=step, size=size)
    if bounds.parameter is not None:
        limits = dict.fromkeys(wanted.params[index], bounds.parameter)
        yield from _tensor_difference(
            "parameter", _largest_differences(found.params[index], wanted.params[index]), limits, step
        )


def _first_shares(found: Mapping[str, Array], wanted: Mapping[str, Array], bounds: Tolerances) -> dict[str, float]:
    """Return each tensor's gradient error relative to its length, less a floor for gradients that may be rounding."""
    floor = bounds.gradient_floor * math.hypot(*(_vector_length(values) for values in wanted.values()))
    return {
        name: max(_length_apart(found.get(name), values) - floor, 0.0) / max(_vector_length(values), 1e-300)
        for name, values in wanted.items()
    }


def _difference_size(found: float, wanted: float, bounds: Tolerances) -> float:
    """Return the difference of two numbers, as a share of the wanted one if the bounds are shares."""
    size = abs(found - wanted)
    return size / abs(wanted) if bounds.rounding and wanted else size


def _tensor_difference(
    kind: str, sizes: Mapping[str, float], limits: Mapping[str, float], step: int
) -> Iterator[OutcomeDifference]:
    """Yield the first wrong tensor; last tensors first, because backward computes them first."""
    wrong = [name for name in reversed(list(limits)) if not sizes[name] <= limits[name]]
    if wrong:
        yield OutcomeDifference(
            what=wrong[0], kind=kind, step=step, size=sizes[wrong[0]], others=len(wrong) - 1, of=len(limits)
        )


def _vector_length(values: Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


def _length_apart(found: Array | None, wanted: Array) -> float:
    if found is None or found.shape != wanted.shape:
        return float("inf")
    return _vector_length(found.astype(np.float64) - wanted)


def _largest_differences(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest difference of each tensor; infinite for one that is missing or of another shape."""
    return {name: _largest_difference(found.get(name), values) for name, values in wanted.items()}


def _largest_difference(found: Array | None, wanted: Array) -> float:
    if found is None or found.shape != wanted.shape:
        return float("inf")
    return float(np.abs(found.astype(np.float64) - wanted).max(initial=0.0))


def _most_apart(a: Sequence[float], b: Sequence[float], *, relative: bool = False) -> float:
    sizes = (abs(x - y) / (abs(y) if relative and y else 1.0) for x, y in zip(a, b, strict=True))
    return max(sizes, default=0.0)


def _per_token(evaluations: Sequence[tuple[float, int]]) -> list[float]:
    return [loss / max(tokens, 1) for loss, tokens in evaluations]
