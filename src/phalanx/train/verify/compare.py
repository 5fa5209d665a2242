"""Two outcomes side by side: how far apart they are, and the first thing that is further apart than rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.train.verify.trial import Array, TrialOutcome
from phalanx.units import plural

# How far two right layouts may round apart, relative to the value itself. Each is derived, not fitted:
# - bf16 and fp16 keep 8 and 11 bits, so one rounding is off by up to 2^-8 and 2^-11; sums run in fp32 and add nothing.
# - fp32 sums run in fp32 too: a sum of n terms is off by about sqrt(n) roundings of 2^-24, and n is up to 2^12 here.
# - fp8 (e4m3) keeps 4 bits. Both sides round the same numbers to it, but for what bf16 had rounded apart before: of
#   two neighbours 2^-8 apart a share of 2^-8 / 2^-3 falls on different sides of a boundary, and is then 2^-3 apart, in
#   the root of the mean square sqrt(2^-8 x 2^-3) = 2^-5.5.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-18, "fp8": 2.0**-5.5}
# Roundings on the way of one number through forward and backward of a few layers, in the root of the mean square:
# about 2^8 (30 per layer and direction) that add up like a random walk.
ROUNDINGS_DEEP = 16
# A loss is a mean over tokens, a norm a sum over weights: single errors cancel in them. One rounding, and four for
# what is common to many; four times that after the first update, in which Adam turns roundings of small gradients into
# steps.
OF_LOSS, OF_NORM, LATER = 1, 4, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """What still counts as equal.

    In float64 every layout we know to be right is within 1e-12 after 5 AdamW steps, and a wrong one beyond 1e-4
    (shared/design/trainer.md, B1): the bounds below lie between, with room on both sides. In narrower formats
    (`rounded`) they are shares of the value, multiples of the format's rounding.
    """

    loss: float = 1e-10
    norm: float = 1e-9
    parameter: float | None = 1e-9  # None: not held
    gradient: float = 1e-8  # of the tensor's largest gradient: small ones must be right too
    gradient_floor: float = 1e-13  # of what is zero but for rounding, as the gradient of a key's bias
    rounding: float = 0.0  # of the format, relative; 0 is float64, where the bounds above are absolute
    later: float = 1.0  # loss and norm after the first step: so many times as much

    @classmethod
    def rounded(cls, compute: str, *, also: float = 0.0) -> Tolerances:
        """In a narrower format; `also` is the rounding of gradients that are sent compressed.

        The gradients of the first step are held tensor by tensor (the norm of the difference); parameters are not:
        Adam turns a gradient that is zero but for rounding into a whole step.
        """
        unit = ROUNDING[compute]
        return cls(
            # Rounding a gradient adds to its norm by the square only: a quarter is far more than its share.
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
    """The first thing that differs."""

    what: str  # the name of a tensor, or "loss", "gradient norm", "held-out loss"
    kind: str  # "value", "gradient", "parameter", "copies"
    step: int  # from 1; 0 is before the first step
    size: float
    others: int = 0  # tensors that differ at the same place besides this one
    of: int = 0

    def render(self) -> str:
        """A sentence."""
        if self.kind == "copies":
            return f"ranks that should hold the same do not: {self.what}"
        where = f"at step {self.step}" if self.step else "before the first step"
        if self.kind == "value":
            return f"{self.what} differs by {self.size:.1e} {where}"
        among = f", {self.others} of {plural(self.of - 1, 'other tensor')} too" if self.of > 1 else ""
        return f"{self.kind} of {self.what} differs by {self.size:.1e} {where}{among}"


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
    """How far `found` is from `wanted`; shares of the value where the bounds are such."""
    last = _largest_differences(found.params[-1], wanted.params[-1]) if wanted.params else {}
    worst = max(last, key=lambda name: last[name], default="")
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
        evaluation=_most_apart(*(_per_token(one.evaluations) for one in (found, wanted)), relative=relative),
        gradient=gradient,
        parameter=last[worst] if worst else 0.0,
        worst_parameter=worst,
        first=next(_outcome_differences(found, wanted, bounds), None),
    )


def _outcome_differences(found: TrialOutcome, wanted: TrialOutcome, bounds: Tolerances) -> Iterator[OutcomeDifference]:
    """In the order in which a step computes: the first is nearest to the cause."""
    pairs = zip(_per_token(found.evaluations), _per_token(wanted.evaluations), strict=True)
    before = [_difference_size(a, b, bounds) for a, b in pairs]
    if before and not before[0] <= bounds.loss:
        yield OutcomeDifference(what="held-out loss", kind="value", step=0, size=before[0])
    for index in range(len(wanted.losses)):
        yield from _step_differences(found, wanted, bounds, index)
    if before and not before[-1] <= bounds.loss * bounds.later:
        yield OutcomeDifference(what="held-out loss", kind="value", step=len(wanted.losses), size=before[-1])
    if found.quarrels:
        yield OutcomeDifference(what=found.quarrels[0], kind="copies", step=0, size=0.0, others=len(found.quarrels) - 1)


def _step_differences(
    found: TrialOutcome, wanted: TrialOutcome, bounds: Tolerances, index: int
) -> Iterator[OutcomeDifference]:
    step, more = index + 1, bounds.later if index else 1.0
    if not (size := _difference_size(found.losses[index], wanted.losses[index], bounds)) <= bounds.loss * more:
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
    if not (size := _difference_size(found.norms[index], wanted.norms[index], bounds)) <= bounds.norm * more:
        yield OutcomeDifference(what="gradient norm", kind="value", step=step, size=size)
    if bounds.parameter is not None:
        limits = dict.fromkeys(wanted.params[index], bounds.parameter)
        yield from _tensor_difference(
            "parameter", _largest_differences(found.params[index], wanted.params[index]), limits, step
        )


def _first_shares(found: Mapping[str, Array], wanted: Mapping[str, Array], bounds: Tolerances) -> dict[str, float]:
    """How far each tensor's gradient as a whole is off, of its own length; what is next to nothing may be rounding."""
    floor = bounds.gradient_floor * math.hypot(*(_vector_length(values) for values in wanted.values()))
    return {
        name: max(_length_apart(found.get(name), values) - floor, 0.0) / max(_vector_length(values), 1e-300)
        for name, values in wanted.items()
    }


def _difference_size(found: float, wanted: float, bounds: Tolerances) -> float:
    """How far apart two numbers are; as a share of the wanted one where bounds are shares."""
    size = abs(found - wanted)
    return size / abs(wanted) if bounds.rounding and wanted else size


def _tensor_difference(
    kind: str, sizes: Mapping[str, float], limits: Mapping[str, float], step: int
) -> Iterator[OutcomeDifference]:
    """Last tensors first: backward reaches them first."""
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
    """The largest difference of each tensor; infinite for one that is missing or of another shape."""
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
