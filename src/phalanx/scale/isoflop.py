"""Approach 2: the best size of each compute budget, and a power law through them.

A designed sweep (one point per size, equal FLOPs) is interpolated by Akima's spline in ln N and ln L, as in Porian et
al. (arXiv:2406.19146). Points that only lie near common budgets, such as those read off Chinchilla's figure, get a
parabola in ln N, with a slope in ln C for their distance from the budget. Both are computed; curves where they
disagree are reported as outliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.interpolate import Akima1DInterpolator

from phalanx.errors import mistake
from phalanx.scale.fit_result import CurveOptimum, Outlier
from phalanx.scale.points import ScalingPoints

Array = NDArray[np.float64]

# Kernel width of the density whose peaks are the budgets.
BANDWIDTH_DEX = 0.03
# Distance from a budget within which points belong to its curve.
REACH_DEX = 0.07
SAME = 0.01  # relative difference of FLOPs within a designed curve
LEAST_SIZES, LEAST_CURVES = 4, 3
DISAGREE = 1.35  # ratio of the two minima of a curve above which it is reported
# Distance in ln N, and three robust standard deviations: a curve beyond both is off the line of the others.
OFF_LINE = 0.25
NAMES = ("G", "a", "E", "K", "gamma", "curvature")
# Bounds of drawn lines in ln N: a draw beyond them means only that the value is unknown.
DRAWN_SLOPE, DRAWN_HEIGHT = 5.0, 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IsoflopFit:
    """N* = G·C^a, L* = E + K·C^-γ, and near N* ln(L - E) - ln(L* - E) = curvature·(ln N/N*)²."""

    values: dict[str, float]
    draws: Array  # (K, 6), in the order of NAMES
    curves: tuple[CurveOptimum, ...]
    outliers: tuple[Outlier, ...]
    residual_sd: float  # of ln N* around the line


def group_budgets(points: ScalingPoints) -> list[tuple[float, NDArray[np.intp]]]:
    """Return the budgets and the rows of their curves, smallest budget first.

    The budgets come from the column `budget`, from groups of equal FLOPs, or from the peaks of the density of ln
    FLOPs.
    """
    if points.budget is not None and np.isfinite(points.budget).all():
        return [(float(budget), np.flatnonzero(points.budget == budget)) for budget in np.unique(points.budget)]
    logs = np.log10(points.flops)
    order = np.argsort(logs)
    breaks = np.flatnonzero(np.diff(logs[order]) > math.log10(1.0 + 2 * SAME))
    # Budgets of a designed sweep: runs of points whose FLOPs are equal.
    exact = [rows for rows in np.split(order, breaks + 1) if len(rows) >= LEAST_SIZES and np.ptp(logs[rows]) < 0.02]
    if sum(map(len, exact)) >= 0.8 * len(points):
        return [(float(np.median(points.flops[rows])), rows) for rows in exact]
    grid = np.arange(logs.min() - 0.1, logs.max() + 0.1, 0.005)
    density = np.exp(-0.5 * ((grid[:, None] - logs) / BANDWIDTH_DEX) ** 2).sum(axis=1)
    peaks = [index for index in range(1, len(grid) - 1) if density[index - 1] < density[index] >= density[index + 1]]
    chosen: list[int] = []
    # The densest peak first; no two budgets share points.
    for peak in sorted(peaks, key=lambda place: -density[place]):
        if density[peak] >= LEAST_SIZES and all(abs(grid[peak] - grid[index]) > 2 * REACH_DEX for index in chosen):
            chosen.append(peak)
    budgets = []
    for peak in sorted(chosen):
        rows = np.flatnonzero(np.abs(logs - grid[peak]) < REACH_DEX)
        if len(np.unique(points.params[rows])) > LEAST_SIZES:
            budgets.append((float(10.0 ** np.median(logs[rows])), rows))
    return budgets


def fit_isoflop(points: ScalingPoints, *, draws: int, rng: np.random.Generator) -> IsoflopFit:
    """Fit the curves, their minima, and the power law; raises UserError with fewer than three usable curves."""
    curves, curvatures, outliers = [], [], []
    for flops, rows in group_budgets(points):
        curve, curvature, oddity = _fit_curve(points, flops, rows)
        curves.append(curve)
        curvatures.append(curvature)
        if oddity:
            outliers.append(Outlier(name=f"the {flops:.2g} FLOP curve", what=oddity, is_left_out=not curve.used))
    used = [curve for curve in curves if curve.used]
    if len(used) < LEAST_CURVES:
        raise mistake(
            points.source,
            f"has {len(used)} IsoFLOP curves with a minimum inside their sizes",
            why=f"a power law through them needs {LEAST_CURVES}; of {len(curves)} curves "
            f"{len(curves) - len(used)} have theirs at an edge or none",
            fix="add sizes around the optimum, name the curves in a column budget, or use --method vpnls",
        )
    x = np.log([curve.flops for curve in used])
    y = np.log([curve.params for curve in used])
    spreads = np.array([math.nan if curve.spread is None else curve.spread for curve in used])
    # Curves of scattered points differ in the sharpness of their minima; designed curves get equal weights, as in the
    # paper.
    weights = _curve_weights(x, y, spreads) if np.isfinite(spreads).all() else np.ones(len(used))
    slope, start, spread, covariance = _fit_line(x, y, weights / weights.mean())
    outliers += _off_line(used, x, y)
    loss = np.array([curve.loss for curve in used])
    level, scale, gamma = fit_offset_power(x, loss)
    bent = [
        (curve.flops, bend) for curve, bend in zip(curves, curvatures, strict=True) if bend is not None and bend > 0.0
    ]
    free = max(1, len(used) - 2)
    normal = rng.multivariate_normal([0.0, 0.0], covariance, size=draws, method="svd")
    student = normal / np.sqrt(rng.chisquare(free, size=(draws, 1)) / free)
    redrawn = _redraw_rows(x, loss, (level, scale, gamma), draws, rng)
    picks = rng.integers(max(len(bent), 1), size=(draws, len(bent)))
    rows_drawn = []
    for shift, drawn, pick in zip(student, redrawn, picks, strict=True):
        law = fit_offset_power(x, drawn)
        curvature = _reducible_curvature([bent[index] for index in pick], law)
        rows_drawn.append((*_drawn_line(start, slope, shift, float(x.mean())), *law, curvature))
    curvature = _reducible_curvature(bent, (level, scale, gamma))
    values = (math.exp(start), slope, level, scale, gamma, curvature)
    return IsoflopFit(
        values=dict(zip(NAMES, values, strict=True)),
        draws=np.array(rows_drawn).reshape(draws, len(NAMES)),
        curves=tuple(curves),
        outliers=tuple(outliers),
        residual_sd=spread,
    )


def _reducible_curvature(bent: list[tuple[float, float]], law: tuple[float, float, float]) -> float:
    """Return the curvature of ln(L - E), the median over FLOPs and curvatures of ln L.

    Only the reducible loss depends on the size, and it shrinks with compute.
    """
    level, scale, gamma = law
    if not bent:
        return 0.0
    reducible = [max(scale * flops**-gamma, np.finfo(float).tiny) for flops, _ in bent]
    return float(np.median([bend * (level + share) / share for (_, bend), share in zip(bent, reducible, strict=True)]))


def _fit_curve(points: ScalingPoints, flops: float, rows: NDArray[np.intp]) -> tuple[CurveOptimum, float | None, str]:
    """Return the minimum of one curve, its curvature (None without a minimum), and a note on its anomaly, if any."""
    x, y = np.log(points.params[rows]), np.log(points.loss[rows])
    log_excess = np.log(points.flops[rows] / flops)
    sizes = np.unique(x)
    exact = float(np.abs(log_excess).max()) < SAME
    middle = x.mean()
    # A parabola only holds near the minimum: use sizes within a factor of 8 of the lowest point, if there are enough.
    near = np.abs(x - x[int(np.argmin(y))]) < math.log(8.0)
    if len(np.unique(x[near])) < LEAST_SIZES:
        near = np.ones(len(x), dtype=bool)
    columns = [np.ones(int(near.sum())), x[near] - middle, (x[near] - middle) ** 2]
    # Points off the budget: a slope in ln C corrects their losses.
    if not exact and int(near.sum()) > 5:
        columns.append(log_excess[near])
    bent = np.linalg.lstsq(np.stack(columns, axis=1), y[near], rcond=None)[0]
    has_minimum = bent[2] > 0.0 and len(sizes) >= LEAST_SIZES
    parabola = middle - bent[1] / (2.0 * bent[2]) if has_minimum else math.nan
    spline, spline_loss, at_edge = _spline_minimum(sizes, np.array([y[x == size].mean() for size in sizes]))
    if exact and len(sizes) == len(x) and len(sizes) >= LEAST_SIZES:
        best, lowest, inside = spline, spline_loss, not at_edge
    else:
        best = parabola
        lowest = bent[0] - bent[1] ** 2 / (4.0 * bent[2]) if has_minimum else math.nan
        inside = has_minimum and sizes[0] < parabola < sizes[-1]
    note = "" if inside else "its minimum is at the edge of its sizes" if has_minimum else "has no minimum"
    oddity = ""
    if not inside:
        oddity = note
    elif abs(parabola - spline) > math.log(DISAGREE) and not (exact and len(sizes) == len(x)):
        ratio = flops / (6.0 * math.exp(2.0 * spline))
        smooth = flops / (6.0 * math.exp(2.0 * parabola))
        oddity = (
            f"its lowest points say D/N {ratio:.0f}, a smooth curve through all of them {smooth:.0f}: noise decides"
        )
    params = math.exp(best) if math.isfinite(best) else math.nan
    curve = CurveOptimum(
        spread=_vertex_spread(np.stack(columns, axis=1), y[near], bent) if has_minimum and not exact else None,
        flops=flops,
        rows=len(rows),
        params=params,
        tokens=float(np.median(points.tokens[rows] * points.params[rows])) / params,
        loss=math.exp(lowest) if math.isfinite(lowest) else math.nan,
        used=bool(inside),
        note=note,
    )
    return curve, float(bent[2]) if has_minimum else None, oddity


def _vertex_spread(columns: Array, y: Array, bent: Array) -> float | None:
    """Return the standard error of the parabola's minimum in ln N, by the delta method; None without spare points."""
    free = len(y) - columns.shape[1]
    if free < 1:
        return None
    residual = y - columns @ bent
    covariance = float(residual @ residual) / free * np.linalg.pinv(columns.T @ columns)
    slope = np.zeros(columns.shape[1])
    slope[1], slope[2] = -1.0 / (2.0 * bent[2]), bent[1] / (2.0 * bent[2] ** 2)
    return math.sqrt(max(0.0, float(slope @ covariance @ slope)))


def _spline_minimum(x: Array, y: Array) -> tuple[float, float, bool]:
    """Return the place and value of the spline's minimum, and True if it is at the edge."""
    if len(x) < 3:
        best = int(np.argmin(y))
        return float(x[best]), float(y[best]), True
    grid = np.linspace(x[0], x[-1], 2001)
    values = Akima1DInterpolator(x, y)(grid)
    best = int(np.argmin(values))
    return float(grid[best]), float(values[best]), best in (0, len(grid) - 1)


def _fit_line(x: Array, y: Array, weights: Array) -> tuple[float, float, float, Array]:
    """Return slope and intercept of the least-squares line, the deviation around it, and their covariance.

    The covariance matrix is in the order (intercept, slope).
    """
    columns = np.stack([np.ones_like(x), x], axis=1)
    root = np.sqrt(weights)[:, None]
    start, slope = np.linalg.lstsq(columns * root, y * root[:, 0], rcond=None)[0]
    residual = y - columns @ (start, slope)
    variance = float(weights @ residual**2) / max(1, len(x) - 2)
    inverse = np.linalg.inv((columns * root).T @ (columns * root))
    return float(slope), float(start), math.sqrt(variance), variance * inverse


def _drawn_line(start: float, slope: float, shift: Array, middle: float) -> tuple[float, float]:
    """Return G and a of a drawn line.

    With three curves Student's t has tails that overflow floating point, so far draws are clipped.
    """
    a = float(np.clip(slope + shift[1], -DRAWN_SLOPE, DRAWN_SLOPE))
    height = start + slope * middle + float(np.clip(shift[0] + shift[1] * middle, -DRAWN_HEIGHT, DRAWN_HEIGHT))
    return math.exp(height - a * middle), a


def _curve_weights(x: Array, y: Array, spreads: Array) -> Array:
    """Return the weights 1 / (spread² + τ²), with the variance τ² between curves of Paule and Mandel (1982).

    τ² makes the weighted residuals as large as expected: minima scatter more than their parabolas indicate.
    """
    low, high = 0.0, float(np.var(y))
    for _ in range(60):
        middle = 0.5 * (low + high)
        weights = 1.0 / (spreads**2 + middle)
        slope, start, _, _ = _fit_line(x, y, weights)
        too_small = float(weights @ (y - start - slope * x) ** 2) > len(x) - 2
        low, high = (middle, high) if too_small else (low, middle)
    return np.asarray(1.0 / (spreads**2 + high))


def _off_line(used: list[CurveOptimum], x: Array, y: Array) -> list[Outlier]:
    """Return the curves far from the line through the medians of all pairs (Theil and Sen)."""
    slope, start, _, _ = stats.theilslopes(y, x)
    residual = y - start - slope * x
    # 1.4826 times the median absolute deviation is the standard deviation of normal noise.
    spread = 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
    outliers = []
    for curve, distance in zip(used, residual, strict=True):
        if abs(distance) > max(OFF_LINE, 3.0 * spread):
            description = (
                f"D/N {curve.tokens / curve.params:.0f}, {math.exp(distance):.2f}x the size the other curves imply"
            )
            outliers.append(Outlier(name=f"the {curve.flops:.2g} FLOP curve", what=description))
    return outliers


def fit_offset_power(log_x: Array, y: Array) -> tuple[float, float, float]:
    """Return E, K and γ of y = E + K·x^-γ by variable projection over γ; E is not negative."""
    gammas = np.geomspace(0.01, 1.0, 200)
    middle = float(log_x.mean())
    powers = np.exp(-gammas[:, None] * (log_x - middle))
    mean_p, mean_y = powers.mean(axis=1), y.mean()
    centred = powers - mean_p[:, None]
    slope = (centred @ (y - mean_y)) / (centred**2).sum(axis=1)
    level = mean_y - slope * mean_p
    negative = level < 0.0
    slope[negative] = (powers[negative] @ y) / (powers[negative] ** 2).sum(axis=1)
    level = np.maximum(level, 0.0)
    cost = ((y - level[:, None] - slope[:, None] * powers) ** 2).sum(axis=1)
    best = int(np.argmin(np.where(slope > 0.0, cost, np.inf)))
    return float(level[best]), float(slope[best] * math.exp(gammas[best] * middle)), float(gammas[best])


def _redraw_rows(x: Array, loss: Array, law: tuple[float, float, float], draws: int, rng: np.random.Generator) -> Array:
    """Return losses of the optima with residuals of the law in random sign, widened for three fitted numbers."""
    fitted = law[0] + law[1] * np.exp(-law[2] * x)
    free = max(1, len(x) - 3)
    wider = math.sqrt(len(x) / free) * float(stats.t.ppf(0.9, free) / stats.norm.ppf(0.9))
    return np.asarray(fitted + rng.choice((-1.0, 1.0), size=(draws, len(x))) * (loss - fitted) * min(wider, 5.0))
