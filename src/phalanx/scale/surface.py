"""The loss surface L(N, D) = E + A/N^α + B/D^β, and its least-squares fit for many starts or resamples at once.

All five parameters are fitted as logarithms, with N and D measured from the middle of the data: this separates A from
α, which are nearly one number on raw axes (condition number about 1e11). `project_grid` is the variable projection:
for each pair of exponents the other three parameters are a linear least-squares problem without negative values, so
that only two numbers are searched (Open-Athena/scaling-law-analysis calls it VPNLS). `polish_surface` continues from
there by Levenberg-Marquardt, for a batch of problems in one array program.

    # K problems, P points, 5 parameters in the order of Surface
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_EXPONENT, MOST_EXPONENT = 0.01, 3.0
GRID_EXPONENTS = np.geomspace(0.03, 2.0, 28)  # values of α and of β that are tried
ITERATIONS = 60
# Relative: where two parameters cannot be told apart, undamped normal equations have no solution.
LEAST_DAMPING = 1e-14
_TINY = 1e-300
# Bounds of the five logarithms on the centred axes.
_LOWEST = np.array([-12.0, -30.0, -30.0, math.log(LEAST_EXPONENT), math.log(LEAST_EXPONENT)])
_HIGHEST = np.array([8.0, 12.0, 12.0, math.log(MOST_EXPONENT), math.log(MOST_EXPONENT)])


def bounded_optimum(log_params: float, log_compute: float) -> tuple[float, float]:
    """Return N* and D* for ln N* and ln N·D, with at least one parameter and one token.

    The bound is needed for laws that hardly depend on N, whose optimum may be anywhere.
    """
    size = min(max(log_params, 0.0), max(log_compute, 0.0))
    return math.exp(size), math.exp(log_compute - size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """L(N, D) = E + A/N^α + B/D^β: loss in nats per token, N parameters, D tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @property
    def exponent(self) -> float:
        """The exponent a of N* ∝ C^a.

        >>> round(Surface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28).exponent, 3)
        0.452
        """
        return self.beta / (self.alpha + self.beta)

    def loss(self, params: float, tokens: float) -> float:
        """Return the loss of a model with `params` parameters after `tokens` tokens."""
        return float(self.E + self.A * params**-self.alpha + self.B * tokens**-self.beta)

    def optimum(self, flops: float, flops_per_token: float = 6.0) -> tuple[float, float]:
        """Return N* and D* for C = `flops_per_token`·N·D."""
        compute = math.log(flops / flops_per_token)
        ratio = math.log(self.alpha / self.beta) + math.log(max(self.A, _TINY)) - math.log(max(self.B, _TINY))
        return bounded_optimum((ratio + self.beta * compute) / (self.alpha + self.beta), compute)


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceData:
    """Points on logarithmic axes, measured from their middle."""

    x: Array  # ln N - ln N0
    y: Array  # ln D - ln D0
    loss: Array
    middle: tuple[float, float]  # ln N0, ln D0
    noise: Array  # divisors of the residuals
    wider: float | Array = 1.0  # 1/√weight: the factor by which a row's weight widens its noise
    log_odds: float = 0.0  # ln of the prior odds of this kind of noise, up to a constant
    strays: int = 0  # number of rows that were removed
    # Their contribution to the sum of squares all the same: they show how large noise can be.
    stray_squares: float = 0.0

    @classmethod
    def of(
        cls, params: Array, tokens: Array, loss: Array, *, relative: bool = True, weight: Array | None = None
    ) -> SurfaceData:
        """Build the data from raw columns.

        Noise is proportional to the loss (`relative`) or the same everywhere, divided by the root of the weight.
        """
        log_n, log_d = np.log(params), np.log(tokens)
        middle = (float(log_n.mean()), float(log_d.mean()))
        noise = loss if relative else np.full_like(loss, math.exp(float(np.log(loss).mean())))
        wider = 1.0 if weight is None else 1.0 / np.sqrt(weight)
        return cls(x=log_n - middle[0], y=log_d - middle[1], loss=loss, middle=middle, noise=noise * wider, wider=wider)

    def with_fitted_noise(self, theta: Array) -> SurfaceData:
        """Return the data with noise proportional to the fitted instead of the measured losses.

        Otherwise a loss that is low by chance would have a larger weight.
        """
        level, term_n, term_d = surface_values(theta[None, :], self)
        fitted = np.log((level + term_n + term_d)[0] * self.wider)
        # The geometric mean stays the same, as sums of squares under both noises are compared.
        return replace(self, noise=np.exp(fitted - fitted.mean() + np.log(self.noise).mean()))

    def to_surface(self, theta: Array) -> Surface:
        """Return the surface of fitted logarithms."""
        e, a, b, log_alpha, log_beta = (float(value) for value in theta)
        alpha, beta = math.exp(log_alpha), math.exp(log_beta)
        return Surface(
            E=math.exp(e),
            A=math.exp(min(a + alpha * self.middle[0], 300.0)),
            B=math.exp(min(b + beta * self.middle[1], 300.0)),
            alpha=alpha,
            beta=beta,
        )

    def from_surface(self, law: Surface) -> Array:
        """Return the logarithms of a surface, which `to_surface` takes."""
        return np.array(
            [
                math.log(law.E),
                math.log(law.A) - law.alpha * self.middle[0],
                math.log(law.B) - law.beta * self.middle[1],
                math.log(law.alpha),
                math.log(law.beta),
            ]
        )


def surface_values(theta_K5: Array, data: SurfaceData) -> tuple[Array, Array, Array]:
    """Return the three terms of the law: E of shape (K, 1), and those of N and D of shape (K, P)."""
    alpha, beta = np.exp(theta_K5[:, 3:4]), np.exp(theta_K5[:, 4:5])
    term_n = np.exp(np.clip(theta_K5[:, 1:2] - alpha * data.x, -60.0, 60.0))
    term_d = np.exp(np.clip(theta_K5[:, 2:3] - beta * data.y, -60.0, 60.0))
    return np.exp(theta_K5[:, 0:1]), term_n, term_d


def project_grid(data: SurfaceData, *, tied: bool = False, keep: int = 8) -> Array:
    """Return the best `keep` pairs of exponents of a grid, each with its E, A and B: starts for `polish_surface`.

    `tied` searches only α = β.
    """
    alpha, beta = (
        (GRID_EXPONENTS, GRID_EXPONENTS)
        if tied
        else (axis.ravel() for axis in np.meshgrid(GRID_EXPONENTS, GRID_EXPONENTS))
    )
    linear, cost = project_pairs(data, alpha, beta)
    order = np.argsort(cost)[:keep]
    linear = np.maximum(linear[order], 1e-4)
    return np.column_stack([np.log(linear), np.log(alpha[order]), np.log(beta[order])])


def project_pairs(data: SurfaceData, alpha: Array, beta: Array, *, level: float | None = None) -> tuple[Array, Array]:
    """Return E, A and B (K, 3) of pairs of exponents, and the sums of squares, by non-negative least squares.

    It solves the 3x3 normal equations of all pairs at once. `level` fixes E.
    """
    shape = np.broadcast_shapes((len(alpha), 1), data.x.shape)
    columns = np.stack([np.ones(shape), np.exp(-alpha[:, None] * data.x), np.exp(-beta[:, None] * data.y)], axis=-1)
    columns /= data.noise[None, :, None]
    measured = (data.loss - (level or 0.0)) / data.noise
    normal = columns.transpose(0, 2, 1) @ columns
    right = np.einsum("kpi,p->ki", columns, measured)
    best = np.full(len(alpha), np.inf)
    linear = np.zeros((len(alpha), 3))
    # Exact for three unknowns: the best of the seven supports whose solution is not negative.
    for support in ([0, 1, 2], [1, 2], [0, 1], [0, 2], [0], [1], [2]):
        if level is not None and 0 in support:
            continue
        sub = normal[:, support][:, :, support] + 1e-14 * np.eye(len(support))
        solution = np.linalg.solve(sub, right[:, support, None])[..., 0]
        cost = measured @ measured - np.einsum("ki,ki->k", solution, right[:, support])
        better = (solution >= 0.0).all(axis=1) & (cost < best - 1e-15)
        best[better] = cost[better]
        linear[better] = 0.0
        rows = np.flatnonzero(better)
        linear[rows[:, None], support] = solution[better]
    if level is not None:
        linear[:, 0] = level
    return linear, best


def polish_surface(
    data: SurfaceData,
    theta_K5: Array,
    *,
    weights: Array | None = None,
    losses: Array | None = None,
    fixed: tuple[int, ...] = (),
    tied: bool = False,
    iterations: int = ITERATIONS,
) -> tuple[Array, Array]:
    """Minimise by Levenberg-Marquardt from K starts; returns parameters (K, 5) and half the sum of squares (K).

    `weights` (K, P) multiply squared residuals, and `losses` (K, P) replace the measured ones, for resamples. `fixed`
    parameters keep their start values. `tied` enforces α = β.
    """
    theta = np.array(theta_K5, dtype=float)
    measured = np.broadcast_to(data.loss if losses is None else losses, (len(theta), len(data.loss)))
    scales = np.broadcast_to(1.0 if weights is None else np.sqrt(weights), measured.shape) / data.noise
    free = [index for index in range(5) if index not in fixed and not (tied and index == 4)]
    if tied:
        theta[:, 4] = theta[:, 3]

    def residuals(at: Array, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        level, term_n, term_d = surface_values(at, data)
        scale = scales[rows]
        residual = (measured[rows] - level - term_n - term_d) * scale
        slopes = [
            np.broadcast_to(level, term_n.shape),
            term_n,
            term_d,
            -np.exp(at[:, 3:4]) * data.x * term_n,
            -np.exp(at[:, 4:5]) * data.y * term_d,
        ]
        if tied:
            slopes[3] = slopes[3] + slopes[4]
        return residual, np.stack([slopes[index] * scale for index in free], axis=-1)

    every = np.arange(len(theta))
    residual, slope = residuals(theta, every)
    cost = 0.5 * np.einsum("kp,kp->k", residual, residual)
    damping = np.full(len(theta), 1e-2)
    active = every
    for _ in range(iterations):
        normal = slope.transpose(0, 2, 1) @ slope
        down = np.einsum("kpi,kp->ki", slope, residual)
        size = np.einsum("kii->ki", normal)
        ridge = damping[active, None] * size + 1e-14
        step = np.linalg.solve(normal + np.einsum("ki,ij->kij", ridge, np.eye(len(free))), down[..., None])[..., 0]
        trial = theta[active].copy()
        trial[:, free] += np.clip(step, -1.5, 1.5)
        if tied:
            trial[:, 4] = trial[:, 3]
        trial = np.clip(trial, _LOWEST, _HIGHEST)
        new_residual, new_slope = residuals(trial, active)
        new_cost = 0.5 * np.einsum("kp,kp->k", new_residual, new_residual)
        better = new_cost < cost[active]
        gain = cost[active] - new_cost
        accepted = active[better]
        theta[accepted], cost[accepted] = trial[better], new_cost[better]
        residual[better], slope[better] = new_residual[better], new_slope[better]
        # A step that helps lowers the damping; a step that does not is dropped and raises it.
        damping[active] = np.where(better, np.maximum(damping[active] * 0.2, LEAST_DAMPING), damping[active] * 8.0)
        converged = (better & (gain < 1e-12 * (cost[active] + 1e-18))) | (damping[active] > 1e8)
        if converged.all():
            break
        if converged.any():
            active, residual, slope = active[~converged], residual[~converged], slope[~converged]
    return theta, cost
