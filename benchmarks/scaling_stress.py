"""Fits of known surfaces under trouble: other noise, missing cells, an outlier, few sizes, scattered points.

    python benchmarks/scaling_stress.py [--count 200] [--seed 301] [--method vpnls] [--write benchmarks]

Every case draws a surface (exponents 0.15 to 0.7, α / β from 1/3 to 3), budgets over 2 to 3.5 decades, sizes, reach,
centre and noise (0.1 to 2 % of the loss, log-uniform) anew. Intervals are those of `phalanx scale fit`, the loss of the
optimum at ten times the largest budget with the drift that its held-out budget showed. Errors are those of both
exponents of the optimum, a of N* and 1 - a of D*.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from phalanx.errors import UserError
from phalanx.io.files import replace_text
from phalanx.io.tables import markdown_table
from phalanx.scale.fit_points import fit_law, optimum_estimates
from phalanx.scale.fit_result import FitEstimate
from phalanx.scale.points import ScalingPoints
from phalanx.scale.surface import Surface

KINDS = (
    "plain",
    "constant noise",
    "three times off centre",
    "exponents 2 to 4 apart",
    "a third of the cells missing",
    "one outlier of 3 to 10 %",
    "three or four sizes, three budgets",
    "heavy tails (Student's t, 3)",
    "small runs twice as noisy",
    "scattered, no curves",
)
BEYOND = 10.0
NUMBERS = ("E", "alpha", "beta", "a", "N*", "loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class StressCase:
    """Noisy points of a known surface."""

    kind: str
    noise: float  # relative
    law: Surface
    points: ScalingPoints


def random_law(rng: np.random.Generator, *, middle: float, apart: tuple[float, float]) -> Surface:
    """A surface whose terms are a tenth to six tenths of E in the middle of the budgets."""
    alpha = math.exp(rng.uniform(math.log(0.15), math.log(0.7)))
    ratio = math.exp(rng.choice((-1, 1)) * rng.uniform(math.log(apart[0]), math.log(apart[1])))
    beta = min(max(alpha * ratio, 0.1), 0.9)
    level = rng.uniform(0.8, 3.0)
    params = math.sqrt(middle / 6.0 / math.exp(rng.uniform(math.log(5.0), math.log(80.0))))
    return Surface(
        E=level,
        A=level * rng.uniform(0.1, 0.6) * params**alpha,
        B=level * rng.uniform(0.1, 0.6) * (middle / 6.0 / params) ** beta,
        alpha=alpha,
        beta=beta,
    )


def stress_cases(kind: str, rng: np.random.Generator, count: int) -> Iterator[StressCase]:
    """Surfaces and sweeps of one kind."""
    for _ in range(count):
        low, decades = 10.0 ** rng.uniform(14, 20), rng.uniform(2.0, 3.5)
        few = kind.startswith("three or four")
        budgets = np.geomspace(low, low * 10.0**decades, 3 if few else rng.integers(4, 7))
        sizes = int(rng.integers(3, 5) if few else rng.integers(6, 10))
        apart = (2.0, 4.0) if kind.startswith("exponents") else (1.0, 3.0)
        law = random_law(rng, middle=math.sqrt(float(budgets[0] * budgets[-1])), apart=apart)
        reach = rng.uniform(3.0, 8.0)
        shift = rng.uniform(-0.7, 0.7) + rng.uniform(-0.4, 0.4) * np.linspace(0, 1, len(budgets))
        if kind.startswith("three times"):
            shift = np.full(len(budgets), rng.choice((-1, 1)) * math.log(3.0))
        centres = np.array([law.optimum(float(one))[0] for one in budgets]) * np.exp(shift)
        params = (centres[:, None] * np.geomspace(1 / reach, reach, sizes)).ravel()
        flops = np.repeat(budgets, sizes)
        if kind.startswith("scattered"):
            flops = np.exp(rng.uniform(math.log(budgets[0]), math.log(budgets[-1]), size=len(flops)))
            best = np.array([law.optimum(float(one))[0] for one in flops])
            params = best * np.exp(rng.uniform(-1, 1, size=len(flops)) * math.log(reach))
        tokens = flops / (6.0 * params)
        exact = law.E + law.A * params**-law.alpha + law.B * tokens**-law.beta
        size = 10.0 ** rng.uniform(-3.0, -1.7)
        random = rng.standard_t(3, size=len(exact)) / math.sqrt(3.0) if "tails" in kind else rng.normal(size=len(exact))
        spread = size * exact
        if kind.startswith("constant"):
            spread = np.full_like(exact, size * exact.mean())
        if kind.startswith("small runs"):
            spread = spread * 2.0 ** (1.0 - np.log(flops / flops.min()) / np.log(flops.max() / flops.min()))
        loss = exact + spread * random
        if "outlier" in kind:
            loss[rng.integers(len(loss))] *= 1.0 + rng.choice((-1, 1)) * rng.uniform(0.03, 0.1)
        points = ScalingPoints(
            source="made",
            params=params,
            tokens=tokens,
            flops=flops,
            loss=loss,
            run=("",) * len(loss),
            line=tuple(range(len(loss))),
        )
        if "missing" in kind:
            points = points.take(rng.random(len(loss)) > 1 / 3)
        yield StressCase(kind=kind, noise=size, law=law, points=points)


def known_numbers(law: Surface, flops: float) -> list[float]:
    """The true values of `NUMBERS`."""
    params, tokens = law.optimum(flops)
    return [law.E, law.alpha, law.beta, law.exponent, params, law.loss(params, tokens)]


def judge_case(case: StressCase, *, method: str, draws: int, seed: int) -> tuple[list[bool], list[float], float]:
    """Which true numbers lie in their intervals, the two errors of the exponents, and the error of the loss."""
    fit = fit_law(case.points, method=method, draws=draws, seed=seed, with_starts=False)
    flops = BEYOND * float(case.points.flops.max())
    best = optimum_estimates(fit, flops)
    found: list[FitEstimate] = [fit.parameters[name] for name in ("E", "alpha", "beta")]
    found += [fit.derived["a"], best["params"], best["loss"]]
    wanted = known_numbers(case.law, flops)
    hits = []
    for one, true in zip(found, wanted, strict=True):
        assert one.low is not None
        assert one.high is not None
        hits.append(one.low <= true <= one.high)
    a, true = fit.derived["a"].value, case.law.exponent
    return hits, [abs(a / true - 1.0), abs((1.0 - a) / (1.0 - true) - 1.0)], abs(best["loss"].value / wanted[-1] - 1.0)


def table_row(name: str, hits: list[list[bool]], errors: list[float], losses: list[float]) -> list[str]:
    """One row of the result."""
    return [
        name,
        str(len(hits)),
        *(f"{share:.3f}" for share in np.mean(hits, axis=0)),
        f"{math.sqrt(0.16 / len(hits)):.3f}",
        f"{np.exp(np.mean(np.log(np.maximum(errors, 1e-12)))):.2%}",
        f"{max(errors):.1%}",
        f"{np.mean(np.array(errors) > 0.34):.1%}",
        f"{np.median(losses):.2%}",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="surfaces of each kind")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=301)
    parser.add_argument("--method", default="vpnls")
    parser.add_argument("--write", type=Path, help="folder for the dated result")
    options = parser.parse_args()
    began_s = time.process_time()
    head = ["surfaces", "fits", "E", "α", "β", "a", "N* at 10x", "loss at 10x", "(±)"]
    head += ["geometric mean", "largest", "above 34 %", "loss at 10x off"]
    rows = []
    every: dict[str, tuple[list[list[bool]], list[float], list[float]]] = {}
    for place, kind in enumerate(KINDS):
        rng = np.random.default_rng([options.seed, place])
        refused = 0
        for number, case in enumerate(stress_cases(kind, rng, options.count)):
            try:
                hits, errors, loss = judge_case(case, method=options.method, draws=options.draws, seed=number)
            except UserError:
                refused += 1
                continue
            band = "0.1 to 0.3 %" if case.noise < 0.003 else "0.3 to 0.8 %" if case.noise < 0.008 else "0.8 to 2 %"
            for name in (kind, f"all, noise {band}", "all"):
                kept = every.setdefault(name, ([], [], []))
                kept[0].append(hits)
                kept[1].extend(errors)
                kept[2].append(loss)
        rows.append(table_row(kind + (f" ({refused} refused)" if refused else ""), *every[kind]))
        print(rows[-1], flush=True)
    rows += [table_row(name, *every[name]) for name in sorted(one for one in every if one.startswith("all, "))]
    rows.append(table_row("all", *every["all"]))
    table = markdown_table(head, rows)
    print(table)
    if options.write:
        text = (
            "# Fits of known surfaces under trouble\n\n"
            f"`python benchmarks/scaling_stress.py --count {options.count} --seed {options.seed} "
            f"--method {options.method}`, {date.today()}; {time.process_time() - began_s:.0f} s of processor time. "
            "Coverage of 80 % intervals (± its binomial error), geometric mean and largest relative error of the "
            "exponents a and 1 - a, share of them above 34 %, and median error of the loss of the optimum at ten times "
            f"the largest budget.\n\n{table}\n"
        )
        replace_text(options.write / f"{date.today()}-scaling-stress.md", text)


if __name__ == "__main__":
    main()
