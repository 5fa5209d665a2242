"""Pictures of a fit: IsoFLOP curves, residuals, and the frontier with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from phalanx.io.svg import PLANNED_STYLE, LinePlot, PlotLine, standalone_svg
from phalanx.scale.fit_points import optimum_estimates, predicted_losses
from phalanx.scale.fit_result import ScalingFit
from phalanx.scale.isoflop import group_budgets
from phalanx.scale.laws import law_loss
from phalanx.scale.points import ScalingPoints
from phalanx.units import format_count

MOST_CURVES = 9
STYLES = ("1", "2", "3")


def fit_plots(fit: ScalingFit, points: ScalingPoints) -> Mapping[str, str]:
    """Return the pictures as SVG texts by file name, without empty ones."""
    return {f"{name}.svg": standalone_svg(plot.to_svg()) for name, plot in fit_pictures(fit, points).items()}


def fit_pictures(fit: ScalingFit, points: ScalingPoints) -> Mapping[str, LinePlot]:
    """Return the plots by name, without empty ones."""
    plots = {
        "isoflop": _isoflop_plot(fit, points),
        "residuals": _residual_plot(fit, points),
        "frontier": _frontier_plot(fit, points),
    }
    return {name: plot for name, plot in plots.items() if not plot.is_empty}


def _powers_of_ten(unit: str) -> Callable[[float], str]:
    """Return the label function of a logarithmic axis, such as 1e21 FLOP."""
    return lambda value: f"{10.0**value:.0e} {unit}".replace("e+", "e")


def _log_count(value: float) -> str:
    """Format a number of parameters from its logarithm: 18M."""
    return format_count(float(f"{10.0**value:.1e}"))


def _signed_percent(value: float) -> str:
    return f"{value:+.3g} %" if value else "0 %"


def _isoflop_plot(fit: ScalingFit, points: ScalingPoints) -> LinePlot:
    """Plot the loss over the size, for at most MOST_CURVES budgets: points, and the law dashed."""
    budgets = group_budgets(points)
    if len(budgets) > MOST_CURVES:
        budgets = [budgets[index] for index in np.linspace(0, len(budgets) - 1, MOST_CURVES).round().astype(int)]
    lines = []
    for index, (flops, rows) in enumerate(budgets):
        x = np.log10(points.params[rows])
        order = np.argsort(x)
        style = STYLES[index % len(STYLES)]
        name = f"{flops:.1e} FLOP"
        lines.append(
            PlotLine(label=name, x=x[order].tolist(), mean=points.loss[rows][order].tolist(), style=style, dots=True)
        )
        grid = np.linspace(x.min(), x.max(), 40)
        tokens = float(np.median(points.tokens[rows] * points.params[rows]))
        law = [law_loss(fit.method, fit.values(), 10.0**log_size, tokens / 10.0**log_size) for log_size in grid]
        lines.append(PlotLine(label=f"{name}, law", x=grid.tolist(), mean=law, style=PLANNED_STYLE))
    title = "loss over parameters, by budget"
    return LinePlot(title=title, lines=lines, show="{:.2f}".format, show_x=_log_count)


def _residual_plot(fit: ScalingFit, points: ScalingPoints) -> LinePlot:
    """Plot measured over predicted loss, by compute."""
    x = np.log10(points.flops)
    errors = 100.0 * (points.loss / predicted_losses(fit.method, fit.values(), points) - 1.0)
    order = np.argsort(x)
    zero = PlotLine(label="law", x=[float(x.min()), float(x.max())], mean=[0.0, 0.0], style=PLANNED_STYLE)
    dots = PlotLine(label="measured", x=x[order].tolist(), mean=errors[order].tolist(), style="1", dots=True)
    title = "residuals in per cent, by compute"
    return LinePlot(title=title, lines=[zero, dots], show=_signed_percent, show_x=_powers_of_ten("FLOP"))


def _frontier_plot(fit: ScalingFit, points: ScalingPoints) -> LinePlot:
    """Plot the loss of the best model of each budget, with its interval, up to two decades beyond the data."""
    low, high = np.log10(points.flops.min()), np.log10(points.flops.max()) + 2.0
    grid = np.linspace(low, high, 25)
    best = [optimum_estimates(fit, 10.0**log_flops)["loss"] for log_flops in grid]
    band = PlotLine(
        label="law",
        x=grid.tolist(),
        mean=[estimate.value for estimate in best],
        low=[estimate.low for estimate in best] if fit.draws else (),
        high=[estimate.high for estimate in best] if fit.draws else (),
        style="1",
    )
    x = np.log10(points.flops)
    order = np.argsort(x)
    dots = PlotLine(label="runs", x=x[order].tolist(), mean=points.loss[order].tolist(), style="2", dots=True)
    title = "frontier: loss over compute"
    return LinePlot(title=title, lines=[band, dots], show="{:.2f}".format, show_x=_powers_of_ten("FLOP"))
