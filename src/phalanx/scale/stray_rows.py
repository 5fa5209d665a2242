"""Find stray rows, which contradict all others: a broken run or a typing error must not tilt a law of thirty rows.

Externally studentized residuals: each row is compared with the law of all rows and the noise of the *other* rows, by
Student's t. In a table without strays, the chance that any row is called one is one per cent. Rows are removed one at
a time, since one stray can hide another, and only where both noise models (proportional to the loss, and constant)
call the row a stray.

Removed rows may show how large noise can be (heavy tails), or nothing (a broken run). Draws of the posterior count
each with half the square of the largest residual that would not be a stray: with none of it, 80 % intervals of the
exponent a held 75 % under heavy tails and 76 % with one broken run (400 and 200 surfaces), with all of it 77 and 87 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from phalanx.scale.surface import Array, SurfaceData, surface_values

CHANCE = 0.01  # that a table with normal noise loses a row
MOST_SHARE = 0.1  # of the rows, that may be removed
STRAY_SHARE = 0.5  # share of the squared limit that a removed row adds
LEAST_OFF = 1e-4  # share of the loss: digits that a table rounds away
LEAST_FREE = 4  # degrees of freedom below which the noise is not known well enough


def residual_slopes(data: SurfaceData, theta: Array, *, tied: bool = False) -> tuple[Array, Array]:
    """Return the fitted losses, and their relative derivatives by the free parameters, shape (P, 4 or 5)."""
    level, term_n, term_d = (term[0] for term in surface_values(theta[None, :], data))
    fitted = level + term_n + term_d
    alpha, beta = np.exp(theta[3]), np.exp(theta[4])
    columns = [np.broadcast_to(level, fitted.shape), term_n, term_d, -alpha * data.x * term_n, -beta * data.y * term_d]
    if tied:
        columns[3:] = [columns[3] + columns[4]]
    return fitted, np.stack(columns, axis=1) / data.noise[:, None]


def stray_limit(count: int, free: int) -> float:
    """Return the studentized residual above which one of `count` rows is a stray."""
    return float(stats.t.ppf(1.0 - CHANCE / (2 * count), free - 1))


def with_strays(data: SurfaceData, cost: float, strays: int) -> SurfaceData:
    """Return the data with a record of `strays` removed rows; `cost` is half the sum of squares of the others."""
    if not strays:
        return data
    count, free = len(data.loss), len(data.loss) - 5
    squares = STRAY_SHARE * strays * stray_limit(count, free) ** 2 * 2.0 * cost / free
    return replace(data, strays=strays, stray_squares=squares)


def find_stray_row(fits: Sequence[tuple[SurfaceData, Array]]) -> int | None:
    """Return the row that lies furthest outside under every noise model; None where all fit the law."""
    excess: Array = np.full(len(fits[0][0].loss), np.inf)
    for data, theta in fits:
        fitted, slopes = residual_slopes(data, theta)
        count, free = len(fitted), len(fitted) - slopes.shape[1]
        if free < LEAST_FREE:
            return None
        basis, _ = np.linalg.qr(slopes)
        leverage = np.minimum((basis**2).sum(axis=1), 1.0 - 1e-3)
        residual = (data.loss - fitted) / data.noise
        # Internally studentized residuals first, then the externally studentized ones by the usual identity.
        squared = residual**2 / (1.0 - leverage) / max(float(residual @ residual), np.finfo(float).tiny) * free
        studentized = np.sqrt(squared * (free - 1) / np.maximum(free - squared, 1e-9))
        limit = stray_limit(count, free)
        is_off = np.abs(data.loss / fitted - 1.0) > LEAST_OFF
        excess = np.minimum(excess, np.where(is_off, studentized / limit, 0.0))
    worst = int(np.argmax(excess))
    return worst if excess[worst] > 1.0 else None
