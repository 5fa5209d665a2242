"""The 9,216 noisy surfaces over which VPNLS was published, draw by draw, fitted by `phalanx scale fit`.

    python benchmarks/scaling_published_draws.py [--seed 42] [--repeats 256] [--workers 2]

Open-Athena/scaling-law-analysis, experiment 7 (exp7_exponent_inference.py): E 1.69, A 406.4, B 410.7, α 0.465, β
0.155; 2, 3 or 4 budgets from 1e17 to 1e21 FLOP; 4, 8, 16 or 32 sizes within a factor of 8 of a centre that drifts to
a third of the optimum; normal noise of 0.05, 0.1 or 0.2 nats; 256 repeats. Repeat r draws its noise from
`default_rng(42 + r)`, one stream through the four numbers of sizes, the same for each noise and number of budgets.
The error is |a / 0.25 - 1| and |b / 0.75 - 1| of N* ∝ C^a and D* ∝ C^b, 18,432 in all; its table says a geometric
mean of 1.0889 % and a largest of 34.19 % (32.54, 29.59, 29.58, 28.55 next). With another --seed the draws are new
ones of the same kind.

Rows: least squares with constant noise, which is VPNLS; the same started at the truth (--from-truth); and ours, which
is not told that noise is constant. Below, what the Cramér-Rao bound allows an unbiased estimate.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from phalanx.io.tables import markdown_table
from phalanx.scale.stray_rows import residual_slopes
from phalanx.scale.surface import Array, Surface, SurfaceData, polish_surface, project_grid
from phalanx.scale.surface_fit import estimate_interval, fit_surface

LAW = Surface(E=1.69, A=406.4, B=410.7, alpha=0.465, beta=0.155)
NOISES, BUDGETS, SIZES = (0.05, 0.1, 0.2), (2, 3, 4), (4, 8, 16, 32)
Design = tuple[float, int, int]  # noise, budgets, sizes


def published_points(repeat: int, seed: int) -> Iterator[tuple[Design, Array, Array, Array]]:
    """Parameters, tokens and noisy losses of every design of one repeat."""
    for noise in NOISES:
        for count in BUDGETS:
            budgets = np.geomspace(1e17, 1e21, count)
            rng = np.random.default_rng(seed + repeat)
            for sizes in SIZES:
                params, tokens, losses = [], [], []
                for flops in budgets:
                    drift = math.log10(3.0) * (math.log10(flops) - 17.0) / 4.0
                    middle = math.log10(LAW.optimum(float(flops))[0]) - drift
                    n = np.logspace(middle - math.log10(8.0), middle + math.log10(8.0), sizes)
                    d = flops / (6.0 * n)
                    params.append(n)
                    tokens.append(d)
                    losses.append(
                        LAW.E + LAW.A * n**-LAW.alpha + LAW.B * d**-LAW.beta + rng.normal(0.0, noise, size=sizes)
                    )
                yield (noise, count, sizes), np.concatenate(params), np.concatenate(tokens), np.concatenate(losses)


def fit_repeat(repeat: int, *, seed: int, draws: int, from_truth: bool) -> list[tuple[float, float, float, bool]]:
    """For each design: a of least squares, of least squares from the truth, and ours; whether our interval holds it."""
    found = []
    for place, (_, params, tokens, loss) in enumerate(published_points(repeat, seed)):
        data = SurfaceData.of(params, tokens, loss, relative=False)
        tried, cost = polish_surface(data, project_grid(data))
        known = tried[[int(np.argmin(cost))]]
        if from_truth:
            known, _ = polish_surface(data, data.from_surface(LAW)[None, :], iterations=200)
        rng = np.random.default_rng([seed, repeat, place])
        fit = fit_surface(params, tokens, loss, method="vpnls", draws=draws, rng=rng, starts=0, profile=False)
        inside = estimate_interval(fit.law.exponent, np.array([one.exponent for one in fit.draws]))
        assert inside.low is not None
        assert inside.high is not None
        squares = data.to_surface(tried[int(np.argmin(cost))]).exponent
        is_inside = inside.low <= LAW.exponent <= inside.high
        found.append((squares, data.to_surface(known[0]).exponent, fit.law.exponent, is_inside))
    return found


def relative_bounds() -> Array:
    """The standard error of a over a that the Cramér-Rao bound gives each design."""
    found = []
    for (noise, _, _), params, tokens, loss in published_points(0, 0):
        data = replace(SurfaceData.of(params, tokens, loss), noise=np.ones_like(loss))
        _, slopes = residual_slopes(data, data.from_surface(LAW))
        # a = β / (α + β): its derivatives by ln α and ln β are -a·b and a·b.
        slope = np.array([0.0, 0.0, 0.0, -1.0, 1.0]) * LAW.exponent * (1.0 - LAW.exponent)
        found.append(noise * math.sqrt(slope @ np.linalg.inv(slopes.T @ slopes) @ slope) / LAW.exponent)
    return np.array(found)


def errors_of(exponents: Array) -> Array:
    """Relative errors of a and b."""
    a = LAW.exponent
    return np.concatenate([np.abs(exponents / a - 1.0), np.abs((1.0 - exponents) / (1.0 - a) - 1.0)])


def error_row(name: str, exponents: Array) -> list[str]:
    """Geometric mean with its error, and the five largest."""
    errors = errors_of(exponents)
    logs = np.log(np.maximum(errors, 1e-12))
    mean = math.exp(float(logs.mean()))
    # Both errors of a fit go together: as many independent ones as fits.
    doubt = mean * float(logs[: len(exponents)].std()) / math.sqrt(len(exponents))
    return [name, f"{mean:.3%} ± {doubt:.3%}", ", ".join(f"{one:.2%}" for one in np.sort(errors)[::-1][:5])]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=42, help="42: the published draws")
    parser.add_argument("--repeats", type=int, default=256)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--from-truth", action="store_true", help="also least squares that start at the truth")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    began_s = time.monotonic()
    work = partial(fit_repeat, seed=options.seed, draws=options.draws, from_truth=options.from_truth)
    every: list[tuple[float, float, float, bool]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for number, found in enumerate(pool.map(work, range(options.repeats)), start=1):
            every += found
            if number % 16 == 0:
                so_far = error_row("", np.array([one[2] for one in every]))
                print(f"{number} repeats: {so_far[1]}; {so_far[2]}", file=sys.stderr, flush=True)
    squares, known, ours = (np.array([one[place] for one in every]) for place in range(3))
    rows = [
        ["least squares, constant noise (VPNLS)", *error_row("", squares)[1:]],
        *([["the same from the truth", *error_row("", known)[1:]]] if options.from_truth else []),
        ["phalanx scale fit", *error_row("", ours)[1:]],
    ]
    print(f"seed {options.seed}, {len(every)} fits, {time.monotonic() - began_s:.0f} s")
    print(markdown_table(["estimate", "geometric mean", "largest errors"], rows))
    gap = np.log(errors_of(ours)[: len(ours)]) - np.log(np.maximum(errors_of(squares)[: len(ours)], 1e-12))
    print(
        f"ours against least squares, mean ln of the error: {gap.mean():+.4f} ± {gap.std() / math.sqrt(len(gap)):.4f}"
    )
    print(f"a in {np.mean([one[3] for one in every]):.3f} of 80 % intervals")
    bounds, rng = relative_bounds(), np.random.default_rng(0)
    largest = [np.abs(rng.normal(size=(options.repeats, len(bounds))) * bounds).max() for _ in range(2000)]
    low, middle, high = np.quantile(largest, [0.1, 0.5, 0.9])
    # E ln|z| of a normal z is -0.635; b's error is a third of a's.
    mean = math.exp(float(np.log(bounds).mean()) - 0.6352 + 0.5 * math.log(LAW.exponent / (1.0 - LAW.exponent)))
    print(f"Cramér-Rao: geometric mean {mean:.3%}, largest {middle:.1%} ({low:.1%} to {high:.1%} in 80 % of such sets)")


if __name__ == "__main__":
    main()
