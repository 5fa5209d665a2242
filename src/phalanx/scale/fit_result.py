"""A fitted law as a value: what `phalanx scale fit` writes as JSON, and what allocate and predict read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORMAT = 1
FARTHEST_DRIFT = 3.0  # times what the held-out budget showed: it says nothing of steps far longer than its own


@dataclass(frozen=True, kw_only=True, slots=True)
class FitEstimate:
    """A fitted number with its 80 % intervals: `low` and `high` by resampling, `profile_*` by profile likelihood.

    Where the points leave the lower end open `profile_low` is 0; with the upper end open it is a number beside a
    `profile_high` of None.
    """

    value: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    profile_low: float | None = None
    profile_high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataNote:
    """What the law was fitted to, and how its parameters and FLOPs are counted."""

    source: str
    sha256: str
    rows: int
    params_counted: str
    flops_counted: str
    params_range: tuple[float, float]
    tokens_range: tuple[float, float]
    flops_range: tuple[float, float]
    loss_range: tuple[float, float]
    tokenizer: str = ""
    data: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedRates:
    """What the best run of the largest budget was trained with, where the table says it: for allocate."""

    params: float  # as the law counts them
    tokens: float
    lr: float
    batch_tokens: float = 0.0  # 0: not known
    parametrization: str = ""  # "mup" or "completep", which carry the rate over to other sizes; empty: standard
    base_width: int = 0
    base_depth: int = 0
    base_head_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A point or a curve that the others contradict."""

    name: str
    what: str
    is_left_out: bool = False  # the fit did not take it in
    line: int = 0  # of the table; 0 for a curve, or several rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOutBudget:
    """The largest runs, predicted from the others alone."""

    rows: int
    least_flops: float
    mean_abs_error: float  # relative
    worst_error: float  # relative, with its sign: above 0 is a prediction too high
    baseline_mean_abs_error: float | None = None  # L ∝ C^-γ through the best loss of each budget
    drift: float = 0.0  # of ln L: how far all of them lie to one side, beyond what doubt of the law and noise explain
    decades: float = 0.0  # of compute between the largest run that was kept and those


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A published law of the same form, scored on the same points."""

    name: str
    source: str
    exponent: float | None
    objective_ratio: float | None  # its objective over ours; None where its losses are of other data
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveOptimum:
    """The minimum of one IsoFLOP curve."""

    flops: float
    rows: int
    params: float
    tokens: float
    loss: float
    used: bool = True
    note: str = ""
    spread: float | None = None  # standard error of ln N, where it is known


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """How far the fit can be trusted."""

    objective: float
    residual_sd: float  # of ln loss
    condition_number: float | None = None  # of the problem that is searched
    raw_condition_number: float | None = None  # of E, A, B, α and β at once
    noise: str = ""  # "proportional" to the loss or "constant", whichever the residuals speak for
    starts: int = 0
    starts_agreeing: float | None = None  # share that reach the optimum, exponents within 1 %
    left_out_budget: LeftOutBudget | None = None
    outliers: tuple[Outlier, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingFit:
    """A law, its intervals, the data it holds for, and what speaks against it."""

    method: str
    formula: str
    parameters: dict[str, FitEstimate]
    derived: dict[str, FitEstimate]
    data: DataNote
    diagnostics: Diagnostics
    draws: tuple[tuple[float, ...], ...] = ()  # resampled parameters, in the order of `parameters`
    curves: tuple[CurveOptimum, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    warnings: tuple[str, ...] = ()
    seed: int = 0
    format: int = FORMAT
    used_rates: UsedRates | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """The fitted numbers alone."""
        return {name: one.value for name, one in self.parameters.items()}

    def drift_at(self, flops: float) -> float:
        """Standard deviation of ln L beyond the largest run that comes from the form of the law being wrong.

        As far as the held-out budget drifted off, in proportion to the decades of compute. Draws of the fit know of
        noise alone: on public tables 80 % intervals held 73 % of larger runs without it
        (docs/scaling.md, "Beyond the data").
        """
        tested = self.diagnostics.left_out_budget
        beyond = math.log10(flops / self.data.flops_range[1]) if flops > self.data.flops_range[1] else 0.0
        if tested is None or tested.drift <= 0.0 or tested.decades <= 0.0:
            return 0.0
        return tested.drift * min(beyond / tested.decades, FARTHEST_DRIFT)
