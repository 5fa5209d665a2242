"""Evaluate a fitted law: the loss of a model, and the best model for a budget, by the method that fitted it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.scale.surface import Surface, bounded_optimum

SURFACES = ("vpnls", "huber3", "overtrain", "data-constrained")
FORMULAS = {
    "vpnls": "L = E + A/N^α + B/D^β",
    "huber3": "L = E + A/N^α + B/D^β",
    "overtrain": "L = E + (a·M^η + b·M^-η)·C^-η with M = D/N",
    "data-constrained": "L = E + A/N^α + B/D'^β with D' = U + U·R*·(1 - e^(-R/R*)), R = D/U - 1",
    "isoflop": "N* = G·C^a,  L* = E + K·C^-γ",
    "kaplan": "L = ((Nc/N)^(αN/αD) + Dc/D)^αD",
}
Values = Mapping[str, float]
_TINY = 1e-300
# ln of a loss; above it a law of few points is only known to be large.
FARTHEST_LOSS = 300.0
# In ln (L - E): a curve has no meaning long before, and its exponential would overflow.
FARTHEST_BEND = 20.0


def as_surface(values: Values) -> Surface:
    """Return the Chinchilla surface of a law that has one."""
    return Surface(E=values["E"], A=values["A"], B=values["B"], alpha=values["alpha"], beta=values["beta"])


def law_loss(method: str, values: Values, params: float, tokens: float) -> float:
    """Return the loss in nats per token of a model with `params` parameters after `tokens` tokens.

    >>> chinchilla = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    >>> round(law_loss("vpnls", chinchilla, 70e9, 1.4e12), 3)
    1.937
    """
    if method in SURFACES:
        return as_surface(values).loss(params, tokens)
    if method == "kaplan":
        size = values["alpha_N"] / values["alpha_D"] * math.log(values["N_c"] / params)
        data = math.log(values["D_c"] / tokens)
        most = max(size, data)
        log_sum = most + math.log(math.exp(size - most) + math.exp(data - most))
        return math.exp(min(values["alpha_D"] * log_sum, FARTHEST_LOSS))
    if method == "isoflop":
        flops = 6.0 * params * tokens
        log_ratio = math.log(params / law_optimum(method, values, flops)[0])
        # Only the loss above E rises off the optimum, as cosh where α = β: with more compute the curve becomes
        # flatter.
        bend = min(math.sqrt(2.0 * max(values["curvature"], 0.0)) * abs(log_ratio), FARTHEST_BEND)
        return float(values["E"] + values["K"] * flops ** -values["gamma"] * math.cosh(bend))
    raise ValueError(f"no law is called {method!r}")


def law_optimum(method: str, values: Values, flops: float, *, flops_per_token: float = 6.0) -> tuple[float, float]:
    """Return N* and D* of a budget in FLOPs."""
    compute = math.log(flops / flops_per_token)
    if method == "isoflop":
        return bounded_optimum(math.log(max(values["G"], _TINY)) + values["a"] * math.log(flops), compute)
    if method == "kaplan":
        ratio = values["alpha_N"] / values["alpha_D"]
        best = math.log(ratio) + ratio * math.log(values["N_c"]) + compute - math.log(values["D_c"])
        return bounded_optimum(best / (1.0 + ratio), compute)
    return as_surface(values).optimum(flops, flops_per_token)


def size_exponent(method: str, values: Values) -> float:
    """Return a of N* ∝ C^a."""
    if method == "isoflop":
        return values["a"]
    if method == "kaplan":
        return values["alpha_D"] / (values["alpha_N"] + values["alpha_D"])
    return as_surface(values).exponent
