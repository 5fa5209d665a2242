"""Two outcomes side by side: how far apart they are, and the first thing that is further apart than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.train.verify.trial import Array, Outcome
from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What still counts as equal.

    In float64 every layout we know to be right is within 1e-12 after 5 AdamW steps, and a wrong one beyond 1e-4
    (shared/design/trainer.md, B1): the bounds below lie between, with room on both sides.
    """

    loss: float = 1e-10
    norm: float = 1e-9
    parameter: float = 1e-9
    gradient: float = 1e-8  # of the tensor's largest gradient: small ones must be right too
    gradient_floor: float = 1e-13  # of what is zero but for rounding, as the gradient of a key's bias


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
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
class Comparison:
    """The largest differences, and the first one beyond the bounds if there is any."""

    loss: float
    norm: float
    evaluation: float
    gradient: float
    parameter: float
    worst_parameter: str
    first: Difference | None


def compare(found: Outcome, wanted: Outcome, bounds: Bounds = Bounds()) -> Comparison:  # noqa: B008 (frozen)
    """How far `found` is from `wanted`."""
    last = _apart(found.params[-1], wanted.params[-1])
    worst = max(last, key=lambda name: last[name], default="")
    return Comparison(
        loss=_most(found.losses, wanted.losses),
        norm=_most(found.norms, wanted.norms),
        evaluation=_most(*(_per_token(one.evaluations) for one in (found, wanted))),
        gradient=max(
            (max(_apart(a, b).values()) for a, b in zip(found.grads, wanted.grads, strict=False)), default=0.0
        ),
        parameter=last[worst] if worst else 0.0,
        worst_parameter=worst,
        first=next(_differences(found, wanted, bounds), None),
    )


def _differences(found: Outcome, wanted: Outcome, bounds: Bounds) -> Iterator[Difference]:
    """In the order in which a step computes: the first is nearest to the cause."""
    before = [abs(a - b) for a, b in zip(_per_token(found.evaluations), _per_token(wanted.evaluations), strict=True)]
    if not before[0] <= bounds.loss:
        yield Difference(what="held-out loss", kind="value", step=0, size=before[0])
    for index in range(len(wanted.losses)):
        yield from _step_differences(found, wanted, bounds, index)
    if not before[-1] <= bounds.loss:
        yield Difference(what="held-out loss", kind="value", step=len(wanted.losses), size=before[-1])
    if found.quarrels:
        yield Difference(what=found.quarrels[0], kind="copies", step=0, size=0.0, others=len(found.quarrels) - 1)


def _step_differences(found: Outcome, wanted: Outcome, bounds: Bounds, index: int) -> Iterator[Difference]:
    step = index + 1
    if not (size := abs(found.losses[index] - wanted.losses[index])) <= bounds.loss:
        yield Difference(what="loss", kind="value", step=step, size=size)
    if index < min(len(found.grads), len(wanted.grads)):
        reference = wanted.grads[index]
        limits = {n: bounds.gradient * _largest(v) + bounds.gradient_floor for n, v in reference.items()}
        yield from _tensor_difference("gradient", found.grads[index], reference, limits, step)
    if not (size := abs(found.norms[index] - wanted.norms[index])) <= bounds.norm:
        yield Difference(what="gradient norm", kind="value", step=step, size=size)
    limits = dict.fromkeys(wanted.params[index], bounds.parameter)
    yield from _tensor_difference("parameter", found.params[index], wanted.params[index], limits, step)


def _tensor_difference(
    kind: str, found: Mapping[str, Array], wanted: Mapping[str, Array], limits: Mapping[str, float], step: int
) -> Iterator[Difference]:
    """Last tensors first: backward reaches them first."""
    sizes = _apart(found, wanted)
    wrong = [name for name in reversed(list(wanted)) if not sizes[name] <= limits[name]]
    if wrong:
        yield Difference(
            what=wrong[0], kind=kind, step=step, size=sizes[wrong[0]], others=len(wrong) - 1, of=len(wanted)
        )


def _apart(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> dict[str, float]:
    """The largest difference of each tensor; infinite for one that is missing or of another shape."""
    return {name: _distance(found.get(name), values) for name, values in wanted.items()}


def _distance(found: Array | None, wanted: Array) -> float:
    if found is None or found.shape != wanted.shape:
        return float("inf")
    return float(np.abs(found.astype(np.float64) - wanted).max(initial=0.0))


def _largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def _most(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def _per_token(evaluations: Sequence[tuple[float, int]]) -> list[float]:
    return [loss / max(tokens, 1) for loss, tokens in evaluations]
