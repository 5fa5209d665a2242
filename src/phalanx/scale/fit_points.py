"""Fit a scaling law to points with one of six methods: parameters, intervals, diagnostics and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import Problem, UserError
from phalanx.scale.fit_result import (
    Comparison,
    DataNote,
    Diagnostics,
    FitEstimate,
    LeftOutBudget,
    Outlier,
    ScalingFit,
)
from phalanx.scale.huber import score_law
from phalanx.scale.isoflop import fit_isoflop, group_budgets
from phalanx.scale.laws import FORMULAS, SURFACES, law_loss, law_optimum, size_exponent
from phalanx.scale.other_laws import KAPLAN_NAMES, fit_kaplan
from phalanx.scale.points import COUNTED, ScalingPoints
from phalanx.scale.published import PUBLISHED
from phalanx.scale.repeated_data import effective_tokens, fit_repeated
from phalanx.scale.run_points import used_rates
from phalanx.scale.surface import Surface, SurfaceData
from phalanx.scale.surface_fit import NAMES, STARTS, estimate_interval, fit_surface, is_open_exponent
from phalanx.scale.surface_profile import Ends
from phalanx.units import format_count, plural

Array = NDArray[np.float64]

METHODS = {
    "vpnls": "the loss surface by variable projection (default)",
    "huber3": "the loss surface by Huber's loss of ln L: approach 3 of Hoffmann et al.",
    "isoflop": "the best size of each budget, and a power law through them: approach 2",
    "kaplan": "Kaplan's law of N and D, without an irreducible loss",
    "overtrain": "the surface with α = β: Gadre's law of compute and tokens per parameter",
    "data-constrained": "the surface where tokens read again count for less: Muennighoff's law of repeated data",
}
LEAST_ROWS = {"vpnls": 6, "huber3": 6, "overtrain": 5, "kaplan": 6, "isoflop": 9, "data-constrained": 8}
DRAWS = 400
OUTLIER_SDS = 4.5  # robust standard deviations
MOST_OUTLIERS = 12
# Factor beyond the sizes of the runs above which an optimum is only a guess.
OUTSIDE = 2.0
# Factor between the flops column and 6·N·D above which a warning is given: attention, heads and embeddings explain
# less.
FLOPS_OFF = 5.0
# Smaller than any language model: the table probably counts in millions or billions.
FEW_PARAMS, FEW_TOKENS = 1e3, 1e5
# In nats: a uniform guess among a million words is 13.8.
LARGE_LOSS = 14.0
# Share of the rows that is held out where there are no budgets.
LEFT_OUT_SHARE = 0.15
# Resamples of the fit without the largest budget: enough for its uncertainty.
LEFT_OUT_DRAWS = 60
# Standard deviations above which a drift is not noise: one of 20 fits of a correct law exceeds it.
DRIFT_SDS = 2.0
# Least distance in decades that a held-out budget is assumed to have from the others.
LEAST_DECADES = 0.3


def fit_law(
    points: ScalingPoints,
    *,
    method: str = "vpnls",
    draws: int = DRAWS,
    seed: int = 0,
    leave_out: bool = True,
    with_starts: bool = True,
) -> ScalingFit:
    """Fit a law to points; raises UserError for points that no law can be fitted to.

    Without `leave_out` the largest budget is not predicted from the others. Without `with_starts` the law is not
    searched from random starts and has no profile intervals, which halves the time.
    """
    check_points(points, method)
    rng = np.random.default_rng(seed)
    is_fitted = np.ones(len(points), dtype=bool)
    if method == "data-constrained":
        repeated = fit_repeated(points, draws=draws, rng=rng)
        notes = Diagnostics(objective=repeated.objective, residual_sd=0.0)
        fit = _assemble_fit(points, method, repeated.values, repeated.draws, repeated.residuals, notes)
        fit = replace(fit, warnings=("allocate and predict take the law of fresh data: no token is read twice",))
    elif method in SURFACES:
        fit, strays = _fit_surface(points, method, draws, rng, with_starts=with_starts)
        is_fitted[list(strays)] = False
    elif method == "isoflop":
        fit = _fit_isoflop(points, draws, rng)
    else:
        values, resampled, residuals, objective = fit_kaplan(points, draws=draws, rng=rng)
        names = dict(zip(KAPLAN_NAMES, values, strict=True))
        fit = _assemble_fit(
            points, method, names, resampled, residuals, Diagnostics(objective=objective, residual_sd=0.0)
        )
    # Rows that the fit excluded would distort the test of its extrapolation.
    left_out = left_out_error(points.take(is_fitted), method) if leave_out else None
    return replace(
        fit,
        seed=seed,
        used_rates=used_rates(points),
        diagnostics=replace(fit.diagnostics, left_out_budget=left_out),
        warnings=(*_fit_warnings(points, fit), *fit.warnings),
    )


def check_points(points: ScalingPoints, method: str) -> None:
    """Raise UserError for too few points, too few sizes or token counts, or losses that do not fall with compute."""
    problems = []
    least = LEAST_ROWS[method]
    if len(points) < least:
        problem = f"has {plural(len(points), 'row')}; {method} needs at least {least}"
        why = "a law with five numbers goes through any five points and predicts nothing"
        fix = "; ".join(["train more small runs", *(f"left out: {note}" for note in points.left_out)])
        problems.append(Problem(where=points.source, what=problem, why=why, fix=fix))
    for name, values in (("model size", points.params), ("token count", points.tokens)):
        distinct = len(np.unique(np.round(np.log(values), 3)))
        if distinct < 3 and not problems:
            problem = f"has {plural(distinct, name)}; a law in both N and D needs at least 3 of each"
            problems.append(Problem(where=points.source, what=problem, fix=f"add runs with another {name}"))
    if not problems and (ends := _rising_losses(points)):
        trend = "rise" if ends[1] > ends[0] else "do not fall"
        problem = (
            f"its losses {trend} with compute: among the best of the smaller half of the runs is {ends[0]:.4g}, of the "
            f"larger half {ends[1]:.4g}"
        )
        fix = "look at the columns (loss in nats, not accuracy; flops, not seconds), and at runs that diverged"
        problems.append(Problem(where=points.source, what=problem, fix=fix))
    if problems:
        raise UserError(problems)


def _rising_losses(points: ScalingPoints) -> tuple[float, float] | None:
    """Return the best losses of the smaller and the larger runs if more compute does not lower them, else None.

    The runs are split in half by FLOPs. With 20 rows the second best losses are compared, with 40 the third and so
    on, so that one wrong row does not reject a table.
    """
    middle = np.median(points.flops)
    small, large = (np.sort(points.loss[rows]) for rows in (points.flops <= middle, points.flops > middle))
    rank = min(len(points) // 20, len(large) - 1)
    return (float(small[rank]), float(large[rank])) if len(large) and large[rank] >= small[rank] else None


def _fit_surface(
    points: ScalingPoints, method: str, draws: int, rng: np.random.Generator, *, with_starts: bool
) -> tuple[ScalingFit, tuple[int, ...]]:
    """Return the fit of the loss surface, and the rows that it excluded."""
    # Huber's loss needs random starts; the other methods search a grid of exponents.
    starts = STARTS if with_starts or method == "huber3" else 0
    surface_fit = fit_surface(
        points.params,
        points.tokens,
        points.loss,
        method=method,
        draws=draws,
        rng=rng,
        weight=points.weight,
        starts=starts,
        profile=with_starts,
    )
    resampled = np.array([[getattr(draw, name) for name in NAMES] for draw in surface_fit.draws]).reshape(draws, 5)
    notes = Diagnostics(
        objective=surface_fit.objective,
        residual_sd=0.0,
        condition_number=surface_fit.condition_number,
        raw_condition_number=surface_fit.raw_condition_number,
        starts=surface_fit.starts,
        starts_agreeing=surface_fit.agreeing if starts else None,
        noise=surface_fit.noise if method == "vpnls" else "",
    )
    values = {name: float(getattr(surface_fit.law, name)) for name in NAMES}
    fit = _assemble_fit(
        points, method, values, resampled, surface_fit.residuals, notes, surface_fit.profiles, surface_fit.strays
    )
    data = SurfaceData.of(points.params, points.tokens, points.loss, weight=points.weight)
    note = (
        "the runs do not tell how the loss depends on N, or on D: the values are the middle of what they "
        "allow, and the intervals count; train runs of more sizes and token counts"
    )
    fit = replace(
        fit,
        comparisons=_compare_published(data, surface_fit.law, fit),
        warnings=(note,) if surface_fit.is_degenerate else (),
    )
    return fit, surface_fit.strays


def _fit_isoflop(points: ScalingPoints, draws: int, rng: np.random.Generator) -> ScalingFit:
    """Return the fit of approach 2, with its curves and a warning where curves were unusable."""
    isoflop = fit_isoflop(points, draws=draws, rng=rng)
    predicted = np.array(
        [law_loss("isoflop", isoflop.values, n, d) for n, d in zip(points.params, points.tokens, strict=True)]
    )
    notes = Diagnostics(objective=isoflop.residual_sd, residual_sd=0.0)
    fit = _assemble_fit(points, "isoflop", isoflop.values, isoflop.draws, np.log(points.loss / predicted), notes)
    note = "ln L of a curve is taken as a parabola of ln N: its minima are biased where α ≠ β or sizes are off centre"
    return replace(
        fit,
        curves=isoflop.curves,
        diagnostics=replace(fit.diagnostics, outliers=isoflop.outliers),
        comparisons=_compare_published(None, None, fit),
        warnings=(note,) if any(not curve.used for curve in isoflop.curves) or isoflop.outliers else (),
    )


def _assemble_fit(
    points: ScalingPoints,
    method: str,
    values: dict[str, float],
    resampled: Array,
    residuals: Array,
    notes: Diagnostics,
    profiles: Mapping[str, Ends] | None = None,
    strays: tuple[int, ...] = (),
) -> ScalingFit:
    """Build the fit of any method from its numbers, resamples and residuals of ln loss.

    `strays` are the rows that the fit excluded.
    """
    names = tuple(values)
    exponents = np.array([size_exponent(method, dict(zip(names, row, strict=True))) for row in resampled])
    outliers = tuple(_find_outliers(points, residuals, strays))
    fitted = np.delete(residuals, strays)
    return ScalingFit(
        method=method,
        formula=FORMULAS[method],
        parameters={
            name: estimate_interval(float(values[name]), _doubted(resampled[:, column]), (profiles or {}).get(name))
            for column, name in enumerate(names)
        },
        derived={"a": estimate_interval(size_exponent(method, values), _doubted(exponents))},
        data=describe_points(points),
        diagnostics=replace(
            notes,
            residual_sd=float(np.sqrt((fitted**2).sum() / max(1, len(fitted) - len(names)))),
            outliers=outliers,
        ),
        draws=tuple(tuple(float(number) for number in row) for row in resampled),
    )


def _doubted(draws: Array) -> Array:
    """Return the draws of one number, or no draws where all are equal: then the number was not resampled."""
    return draws if len(draws) and np.ptp(draws) > 1e-12 * np.abs(draws).max() else draws[:0]


def _find_outliers(points: ScalingPoints, residuals: Array, strays: tuple[int, ...] = ()) -> list[Outlier]:
    """Return the rows that the fit excluded, and points further from the law than 4.5 robust standard deviations."""
    # 1.4826 times the median absolute deviation is the standard deviation of normal noise.
    spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    if spread <= 0.0:
        return []
    size = np.abs(residuals - np.median(residuals)) / spread
    rows = [int(row) for row in np.argsort(-size) if size[row] > OUTLIER_SDS or row in strays]
    rows = [*(row for row in rows if row in strays), *(row for row in rows if row not in strays)]
    outliers = []
    for row in rows[:MOST_OUTLIERS]:
        description = (
            f"N {points.params[row]:.3g}, D {points.tokens[row]:.3g}: loss {points.loss[row]:.4g}, the law expects "
            f"{points.loss[row] / np.exp(residuals[row]):.4g} ({100 * np.expm1(residuals[row]):+.1f} %), "
            f"{size[row]:.0f} standard deviations off"
        )
        outliers.append(
            Outlier(name=points.place(row), what=description, is_left_out=row in strays, line=int(points.line[row]))
        )
    if len(rows) > MOST_OUTLIERS:
        outliers.append(Outlier(name=f"{len(rows) - MOST_OUTLIERS} more", what="as far off"))
    return outliers


def left_out_error(points: ScalingPoints, method: str) -> LeftOutBudget | None:
    """Return the error at the largest budget, predicted from the others; None where too few points remain."""
    budgets = group_budgets(points)
    covered = sum(len(rows) for _, rows in budgets)
    if len(budgets) >= 3 and covered > 0.8 * len(points):
        is_held_out = np.zeros(len(points), dtype=bool)
        is_held_out[budgets[-1][1]] = True
        is_held_out |= points.flops >= points.flops[budgets[-1][1]].min()
    else:
        count = max(1, round(LEFT_OUT_SHARE * len(points)))
        is_held_out = points.flops >= np.sort(points.flops)[-count]
    try:
        fit = fit_law(
            points.take(~is_held_out), method=method, draws=LEFT_OUT_DRAWS, leave_out=False, with_starts=False
        )
    except UserError:
        return None
    test = points.take(is_held_out)
    values = fit.values()
    errors = predicted_losses(method, values, test) / test.loss - 1.0
    baseline = constant_exponent_losses(points.take(~is_held_out), test) / test.loss - 1.0
    return LeftOutBudget(
        rows=len(test),
        least_flops=float(test.flops.min()),
        mean_abs_error=float(np.abs(errors).mean()),
        worst_error=float(errors[int(np.argmax(np.abs(errors)))]),
        baseline_mean_abs_error=float(np.abs(baseline).mean()),
        drift=_unexplained_drift(fit, test),
        decades=max(LEAST_DECADES, float(np.log10(test.flops).mean() - np.log10(points.flops[~is_held_out].max()))),
    )


def _unexplained_drift(kept: ScalingFit, test: ScalingPoints) -> float:
    """Return the mean offset of ln L of larger runs from the law, beyond what its draws and noise explain."""
    names = tuple(kept.parameters)
    offset = float(np.log(test.loss / predicted_losses(kept.method, kept.values(), test)).mean())
    means = [
        float(np.log(predicted_losses(kept.method, dict(zip(names, draw, strict=True)), test)).mean())
        for draw in kept.draws
    ]
    explained = (float(np.var(means)) if means else 0.0) + kept.diagnostics.residual_sd**2 / len(test)
    return float(np.sqrt(offset**2 - explained)) if offset**2 > DRIFT_SDS**2 * explained else 0.0


def predicted_losses(method: str, values: Mapping[str, float], points: ScalingPoints) -> Array:
    """Return the law's loss for each row; a law of repeated data uses the effective number of tokens."""
    tokens = points.tokens
    if method == "data-constrained" and points.unique_tokens is not None:
        tokens = effective_tokens(tokens, points.unique_tokens, values["R_D"])
    return np.array([law_loss(method, values, n, d) for n, d in zip(points.params, tokens, strict=True)])


def constant_exponent_losses(known: ScalingPoints, wanted: ScalingPoints) -> Array:
    """Return the losses of the baseline L = K·N^-p·D^-q, a plane through ln L, extrapolated."""

    def columns(points: ScalingPoints) -> Array:
        return np.stack([np.ones(len(points)), np.log(points.params), np.log(points.tokens)], axis=1)

    plane = np.linalg.lstsq(columns(known), np.log(known.loss), rcond=None)[0]
    return np.asarray(np.exp(columns(wanted) @ plane))


def _compare_published(data: SurfaceData | None, law: Surface | None, made: ScalingFit) -> tuple[Comparison, ...]:
    """Compare the fit with published laws; their losses are of other data unless the points are the same."""
    own_score = score_law(data, law) if data is not None and law is not None else None
    inside = made.derived["a"]
    comparisons = []
    for published in PUBLISHED:
        ratio = None
        if own_score and data is not None and published.surface is not None:
            ratio = score_law(data, published.surface) / own_score
        low, high = inside.low, inside.high
        side = "" if low is None or high is None else " inside" if low <= published.exponent <= high else " outside"
        text = (
            f"a = {published.exponent:.3f},{side} the interval of this fit" if side else f"a = {published.exponent:.3f}"
        )
        if ratio is not None:
            text += f"; Huber objective on these points {ratio:.3f}x this fit's"
            text += " (other data: losses do not compare)" if ratio > 5 else ""
        comparisons.append(
            Comparison(
                name=published.name,
                source=published.source,
                exponent=published.exponent,
                objective_ratio=ratio,
                sentence=text,
            )
        )
    return tuple(comparisons)


def _fit_warnings(points: ScalingPoints, made: ScalingFit) -> list[str]:
    """Return the warnings that a user should read before using the law."""
    warnings = []
    if points.params_counted == "unstated":
        warnings.append(
            "the table does not say which parameters it counts: add --params-counted; "
            "leaving out the head alone moved a from 0.70 to 0.83 (arXiv:2406.19146)"
        )
    ratio = float(np.median(points.flops / (6.0 * points.params * points.tokens)))
    if not 1.0 / FLOPS_OFF <= ratio <= FLOPS_OFF:
        warnings.append(
            f"the column flops is {ratio:.3g} times 6·N·D: is it in FLOPs, and are params and tokens counts? "
            "budgets below are in its unit"
        )
    for name, values, least in (("params", points.params, FEW_PARAMS), ("tokens", points.tokens, FEW_TOKENS)):
        if values.max() < least:
            warnings.append(
                f"{name} lie between {values.min():.3g} and {values.max():.3g}: are these millions or billions? A "
                f"law takes counts: --column '{name}=THEIRS*1e6'; N*, D* and FLOPs below are in the table's units"
            )
    if points.loss.min() > LARGE_LOSS:
        warnings.append(
            f"losses lie between {points.loss.min():.3g} and {points.loss.max():.3g}: a law is of nats per "
            "token, which is ln of the perplexity"
        )
    if points.weight is not None and made.method not in ("vpnls", "huber3", "overtrain"):
        warnings.append(f"{made.method} does not weigh rows: the column weight is not used, but for rows of weight 0")
    decades = float(np.log10(points.flops.max() / points.flops.min()))
    if decades < 1.0:
        warnings.append(f"the runs span {decades:.1f} decades of compute: exponents are hardly determined below one")
    agreeing = made.diagnostics.starts_agreeing
    # vpnls needs no random starts, as it searches a grid.
    if made.method == "huber3" and agreeing is not None and agreeing < 0.5:
        warnings.append(
            f"{agreeing:.0%} of {made.diagnostics.starts} random starts reach this optimum: one start, or a coarse "
            "grid of them, is not enough for this method"
        )
    best, _ = law_optimum(made.method, made.values(), float(points.flops.max()))
    for is_outside, side, edge in (
        (best < points.params.min() / OUTSIDE, "smaller", points.params.min()),
        (best > points.params.max() * OUTSIDE, "larger", points.params.max()),
    ):
        if is_outside:
            warnings.append(
                f"the best size at the largest budget, {format_count(best)}, is far {side} than every run here "
                f"({format_count(edge)}): losses of their sizes can be predicted, the optimum cannot; train {side} "
                "models"
            )
    outliers = [outlier for outlier in made.diagnostics.outliers if not outlier.is_left_out]
    if made.method == "vpnls" and outliers:
        warnings.append(
            f"least squares follows the {plural(len(outliers), 'outlier')} named above that it keeps: compare with "
            "--method huber3, which does not, or leave out with --drop the rows that you do not trust"
        )
    if is_open_exponent(a := made.derived["a"]):
        middle = "; the values are the middle of what they allow" if made.method == "vpnls" else ""
        warnings.append(
            f"the runs leave the exponent of the best size open: a is between {a.low:.2f} and {a.high:.2f}{middle}; N* "
            "and D* far beyond the data are guesses; train more sizes, more budgets, or less noisy runs"
        )
    irreducible = made.parameters.get("E")
    if irreducible is not None and made.method != "kaplan" and irreducible.value < 0.05 * points.loss.min():
        warnings.append("E is nearly 0: the runs do not reach far enough to see the irreducible loss")
    return warnings


def describe_points(points: ScalingPoints) -> DataNote:
    """Describe the data of a fit: source, digest, number of rows and ranges."""

    def span(values: Array) -> tuple[float, float]:
        return float(values.min()), float(values.max())

    return DataNote(
        source=points.source,
        sha256=points.digest,
        rows=len(points),
        params_counted=points.params_counted,
        flops_counted=points.flops_counted,
        params_range=span(points.params),
        tokens_range=span(points.tokens),
        flops_range=span(points.flops),
        loss_range=span(points.loss),
        tokenizer=points.tokenizer,
        data=points.data,
        left_out=points.left_out,
    )


def optimum_estimates(fit: ScalingFit, flops: float) -> dict[str, FitEstimate]:
    """Return N*, D*, D*/N* and the loss at a budget, with intervals from the resamples."""
    names = tuple(fit.parameters)

    def answer(values: dict[str, float]) -> tuple[float, float, float, float]:
        params, tokens = law_optimum(fit.method, values, flops)
        loss = law_loss(fit.method, values, params, tokens)
        return params, tokens, tokens / params, loss

    best = answer(fit.values())
    drawn = np.array([answer(dict(zip(names, row, strict=True))) for row in fit.draws]).reshape(len(fit.draws), 4)
    if drift := fit.drift_at(flops):
        # Beyond the data, losses get the held-out drift as additional uncertainty.
        drawn[:, 3] *= np.exp(drift * np.random.default_rng(fit.seed).normal(size=len(drawn)))
    keys = ("params", "tokens", "tokens_per_param", "loss")
    return {key: estimate_interval(best[column], drawn[:, column]) for column, key in enumerate(keys)}


def counted_text(note: DataNote) -> str:
    """Return a line that states how the parameters of the data are counted."""
    return f"N: {COUNTED[note.params_counted]}"
