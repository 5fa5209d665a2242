"""The value of a fitted law: `phalanx scale fit` writes it as JSON, and allocate and predict read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORMAT = 1
# Largest multiple of the held-out budget's drift that is applied: it is weak evidence for longer extrapolations.
FARTHEST_DRIFT = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FitEstimate:
    """A fitted number with its 80 % intervals: `low` and `high` by resampling, `profile_*` by profile likelihood.

    Where the points leave the lower end open, `profile_low` is 0. Where they leave the upper end open, `profile_high`
    is None and `profile_low` is a number.
    """

    value: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    profile_low: float | None = None
    profile_high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataNote:
    """The data that the law was fitted to, and how its parameters and FLOPs are counted."""

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
    """The training settings of the best run of the largest budget, where the table has them; allocate uses them."""

    params: float  # as the law counts them
    tokens: float
    lr: float
    batch_tokens: float = 0.0  # 0: unknown
    # "mup" or "completep", with which the learning rate transfers to other sizes; empty: standard.
    parametrization: str = ""
    base_width: int = 0
    base_depth: int = 0
    base_head_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A point or a curve that contradicts the others."""

    name: str
    what: str
    is_left_out: bool = False  # True if the fit excluded it
    line: int = 0  # line of the table; 0 for a curve, or several rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOutBudget:
    """The errors at the largest budget, predicted from the other runs."""

    rows: int
    least_flops: float
    mean_abs_error: float  # relative
    worst_error: float  # relative; positive where the prediction is too high
    # The same error of the law L = K·N^-p·D^-q, which has no irreducible loss.
    baseline_mean_abs_error: float | None = None
    # Mean offset of ln L of the held-out runs that uncertainty of the law and noise do not explain.
    drift: float = 0.0
    # Decades of compute between the largest fitted run and the held-out runs.
    decades: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A published law of the same form, scored on the same points."""

    name: str
    source: str
    exponent: float | None
    # Its objective over that of this fit; None where its losses are of other data.
    objective_ratio: float | None
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
    spread: float | None = None  # standard error of ln N; None if unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """Diagnostics that show how far the fit can be trusted."""

    objective: float
    residual_sd: float  # of ln loss
    condition_number: float | None = None  # of the problem that the optimizer solves
    raw_condition_number: float | None = None  # of a fit of E, A, B, α and β at once
    # "proportional" to the loss or "constant", whichever the residuals support.
    noise: str = ""
    starts: int = 0
    starts_agreeing: float | None = None  # share that reach the optimum, with exponents within 1 %
    left_out_budget: LeftOutBudget | None = None
    outliers: tuple[Outlier, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingFit:
    """A fitted law with its intervals, data, diagnostics and warnings."""

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
        """Return the fitted numbers by name."""
        return {name: estimate.value for name, estimate in self.parameters.items()}

    def drift_at(self, flops: float) -> float:
        """Return the standard deviation of ln L that a wrong form of the law adds beyond the largest run.

        It is the drift of the held-out budget, in proportion to the decades of compute. Draws of the fit reflect only
        noise: without this term, 80 % intervals on public tables held only 73 % of larger runs (docs/scaling.md,
        "Beyond the data").
        """
        held_out = self.diagnostics.left_out_budget
        beyond = math.log10(flops / self.data.flops_range[1]) if flops > self.data.flops_range[1] else 0.0
        if held_out is None or held_out.drift <= 0.0 or held_out.decades <= 0.0:
            return 0.0
        return held_out.drift * min(beyond / held_out.decades, FARTHEST_DRIFT)
