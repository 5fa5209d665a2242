"""How many of the 4,500 published starts reach the optimum of approach 3 on Chinchilla's points: Epoch's way and ours.

    python benchmarks/scaling_starts.py [--every 1]

Epoch's notebook (github.com/epoch-research/analyzing-chinchilla, data_analysis.ipynb, "Replicate exactly") runs SciPy's
L-BFGS-B with its default tolerances and numerical gradients from each start on raw axes (ln A, ln B, ln E, α, β) and
keeps the best. It counts no share; here the same starts are run the same way and counted, beside `huber3` of
`phalanx scale fit` (BFGS, exact gradients, N and D measured from their middle) from the same starts.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
from scaling_laws import DATA
from scipy.optimize import minimize

from phalanx.io.tables import markdown_table
from phalanx.scale.huber import DELTA, GRID_STARTS, fit_huber
from phalanx.scale.points import TableOptions, read_points
from phalanx.scale.surface import Array, SurfaceData


def epoch_objective(params: Array, log_n: Array, log_d: Array, log_loss: Array) -> float:
    """The sum of Huber's losses of ln L."""
    a, b, e, alpha, beta = params
    with np.errstate(over="ignore", invalid="ignore"):
        residual = log_loss - np.log(np.exp(a - alpha * log_n) + np.exp(b - beta * log_d) + np.exp(e))
        size = np.abs(residual)
        return float(np.where(size <= DELTA, 0.5 * residual**2, DELTA * (size - 0.5 * DELTA)).sum())


def shares(objectives: Array, exponents: Array, best: tuple[float, Array]) -> list[str]:
    """Of starts: within 1e-6, 1e-3 and 1 % of the least objective, and with both exponents within 1 %."""
    ratio = objectives / best[0] - 1.0
    near = np.abs(np.log(np.maximum(exponents, 1e-9)) - np.log(best[1])).max(axis=1) < 0.01
    return [*(f"{np.mean(ratio < limit):.1%}" for limit in (1e-6, 1e-3, 1e-2)), f"{np.mean(near):.1%}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="take one of so many starts")
    options = parser.parse_args()
    points = read_points(DATA / "chinchilla_points_epoch.csv", TableOptions(drop_highest=5))
    data = SurfaceData.of(points.params, points.tokens, points.loss)
    starts = np.array(list(itertools.product(*GRID_STARTS)))[:: options.every]
    log_n, log_d, log_loss = np.log(points.params), np.log(points.tokens), np.log(points.loss)
    began_s = time.process_time()
    theirs = [
        minimize(epoch_objective, (a, b, e, alpha, beta), args=(log_n, log_d, log_loss), method="L-BFGS-B")
        for e, a, b, alpha, beta in starts
    ]
    theirs_s = time.process_time() - began_s
    raw = [data_axes(data, starts, least) for least in (0.02, 1e-3)]
    found = [fit_huber(data, one) for one in raw]
    ours_s = (time.process_time() - began_s - theirs_s) / 2
    objectives = np.array([np.nan_to_num(float(one.fun), nan=np.inf) for one in theirs])
    least = min(float(objectives.min()), *(float(cost.min()) for _, cost in found))
    place = int(np.argmin(found[0][1]))
    best = least, np.exp(found[0][0][place, 3:])
    rows = [
        [
            "L-BFGS-B as in Epoch's notebook",
            f"{theirs_s:.0f}",
            *shares(objectives, np.array([r.x[3:] for r in theirs]), best),
        ]
    ]
    for name, (theta, cost) in zip(("huber3", "huber3, exponents from 0.001"), found, strict=True):
        rows.append([name, f"{ours_s:.0f}", *shares(cost, np.exp(theta[:, 3:]), best)])
    print(f"{len(starts)} starts, least objective {least:.10f}, α {best[1][0]:.4f}, β {best[1][1]:.4f}")
    head = ["from the 4,500 starts", "s", "objective within 1e-6", "1e-3", "1 %", "exponents within 1 %"]
    print(markdown_table(head, rows))


def data_axes(data: SurfaceData, starts: Array, least: float) -> Array:
    """Starts on our axes; exponents are logarithms there, so that 0 becomes `least`."""
    alpha, beta = np.maximum(starts[:, 3], least), np.maximum(starts[:, 4], least)
    return np.column_stack(
        [
            starts[:, 0],
            starts[:, 1] - alpha * data.middle[0],
            starts[:, 2] - beta * data.middle[1],
            np.log(alpha),
            np.log(beta),
        ]
    )


if __name__ == "__main__":
    main()
