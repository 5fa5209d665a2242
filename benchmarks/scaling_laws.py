"""Fits of surfaces that are known, and of published tables: coverage, errors of exponents, and the published numbers.

    python benchmarks/scaling_laws.py [--count 288] [--seed 1] [--write benchmarks]

`Published design` is that of Open-Athena/scaling-law-analysis (experiment 7, March 2026): one surface with α = 3β, two
to four budgets from 1e17 to 1e21 FLOP, 4 to 32 sizes within a factor of 8 of a centre that drifts to a third of the
optimum, the same normal noise of 0.05, 0.1 or 0.2 nats everywhere. Over 9,216 fits its own VPNLS has a geometric mean
of 1.09 % and a largest error of 34 %, over both exponents of the optimum, a of N* and 1 - a of D*. `Random surfaces`
draws everything: exponents 0.15 to 0.75, E, both terms, three to six budgets over 1.5 to 4 decades, five to nine sizes,
centres up to 3 times off, noise of 0.1 to 2 % that is proportional or constant. `Known surfaces` are five of the
literature, five budgets of seven sizes 3 times off centre.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from phalanx.io.files import replace_text
from phalanx.io.tables import markdown_table
from phalanx.scale.fit_points import constant_exponent_losses, fit_law, optimum_estimates
from phalanx.scale.isoflop import fit_isoflop
from phalanx.scale.laws import law_loss
from phalanx.scale.points import ScalingPoints, TableOptions, read_points
from phalanx.scale.surface import Array, Surface
from phalanx.scale.surface_fit import estimate_interval, fit_surface

DATA = Path(__file__).parents[1] / "tests" / "data" / "scaling"
BEYOND = 10.0  # times the largest budget, where the loss of the optimum is asked for
KNOWN = (
    Surface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28),
    Surface(E=3.169, A=215886.0, B=4750.0, alpha=0.684, beta=0.439),
    Surface(E=2.158, A=381773.0, B=4659.0, alpha=0.710, beta=0.372),
    Surface(E=1.69, A=406.4, B=410.7, alpha=0.155, beta=0.465),
    Surface(E=1.69, A=406.4, B=410.7, alpha=0.558, beta=0.062),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPoints:
    """Noisy points of a known surface."""

    law: Surface
    noise: str  # how the table calls it
    params: Array
    tokens: Array
    loss: Array


def make_points(
    law: Surface, budgets: Array, sizes: int, *, reach: float, shift: Array, noise: Callable[[Array], Array], name: str
) -> KnownPoints:
    """IsoFLOP curves: `sizes` from 1/reach to reach times a centre that is exp(shift) times the optimum."""
    centres = np.array([law.optimum(one)[0] for one in budgets]) * np.exp(shift)
    params = (centres[:, None] * np.geomspace(1 / reach, reach, sizes)).ravel()
    tokens = np.repeat(budgets, sizes) / (6.0 * params)
    exact = law.E + law.A * params**-law.alpha + law.B * tokens**-law.beta
    return KnownPoints(law=law, noise=name, params=params, tokens=tokens, loss=exact + noise(exact))


def published_design(rng: np.random.Generator, count: int) -> Iterator[KnownPoints]:
    """The cases over which VPNLS was published."""
    law = Surface(E=1.69, A=406.4, B=410.7, alpha=0.465, beta=0.155)
    for place in range(count):
        budgets = np.geomspace(1e17, 1e21, (2, 3, 4)[place % 3])
        size = (0.05, 0.1, 0.2)[place // 12 % 3]
        shift = -math.log(3.0) * np.log(budgets / budgets[0]) / math.log(budgets[-1] / budgets[0])
        yield make_points(
            law,
            budgets,
            (4, 8, 16, 32)[place // 3 % 4],
            reach=8.0,
            shift=shift,
            noise=lambda exact, size=size: size * rng.normal(size=len(exact)),
            name=f"{size:g} nats",
        )


def random_surfaces(rng: np.random.Generator, count: int) -> Iterator[KnownPoints]:
    """Everything drawn anew."""
    for _ in range(count):
        alpha = rng.uniform(0.2, 0.75)
        beta = float(np.clip(alpha * math.exp(rng.uniform(-1.1, 1.1)), 0.15, 0.75))
        low = 10.0 ** rng.uniform(14, 19)
        budgets = np.geomspace(low, low * 10.0 ** rng.uniform(1.5, 4.0), rng.integers(3, 7))
        middle = math.sqrt(float(budgets[0] * budgets[-1]))
        params = math.sqrt(middle / 120.0)
        level = rng.uniform(1.2, 3.0)
        law = Surface(
            E=level,
            A=level * rng.uniform(0.1, 0.6) * params**alpha,
            B=level * rng.uniform(0.1, 0.6) * (middle / 6.0 / params) ** beta,
            alpha=alpha,
            beta=beta,
        )
        size, proportional = 10.0 ** rng.uniform(-3.0, -1.7), bool(rng.integers(2))
        shift = rng.uniform(-math.log(3.0), math.log(3.0)) + rng.uniform(-0.55, 0.55) * np.linspace(0, 1, len(budgets))

        def noise(exact: Array, size: float = size, proportional: bool = proportional) -> Array:
            return size * (exact if proportional else exact.mean()) * rng.normal(size=len(exact))

        name = "below 0.3 %" if size < 0.003 else "0.3 to 0.8 %" if size < 0.008 else "0.8 to 2 %"
        sizes = int(rng.integers(5, 10))
        yield make_points(law, budgets, sizes, reach=rng.uniform(2.5, 8.0), shift=shift, noise=noise, name=name)


def known_surfaces(rng: np.random.Generator, count: int) -> Iterator[KnownPoints]:
    """Surfaces of the literature, off centre, proportional noise."""
    budgets = np.geomspace(1e18, 1e21, 5)
    for place in range(count):
        size = (0.002, 0.005, 0.01)[place // len(KNOWN) % 3]
        yield make_points(
            KNOWN[place % len(KNOWN)],
            budgets,
            7,
            reach=6.0,
            shift=np.full(5, (1.0, -1.0)[place % 2] * math.log(3.0)),
            noise=lambda exact, size=size: exact * np.expm1(size * rng.normal(size=len(exact))),
            name=f"{size:.1%}",
        )


def judge_fits(cases: Iterator[KnownPoints], rng: np.random.Generator, *, draws: int) -> list[list[str]]:
    """Rows by noise: coverage of each number, geometric mean and largest error of the exponents of the optimum."""
    keys = ("E", "alpha", "beta", "a", "loss")
    found: dict[str, tuple[list[list[bool]], list[float]]] = {}
    for case in cases:
        made = fit_surface(
            case.params, case.tokens, case.loss, method="vpnls", draws=draws, rng=rng, starts=0, profile=False
        )
        flops = BEYOND * 6.0 * float((case.params * case.tokens).max())

        def numbers(law: Surface, flops: float = flops) -> list[float]:
            return [law.E, law.alpha, law.beta, law.exponent, law.loss(*law.optimum(flops))]

        wanted, got = numbers(case.law), numbers(made.law)
        drawn = np.array([numbers(one) for one in made.draws])
        hits = []
        for place, value in enumerate(wanted):
            inside = estimate_interval(got[place], drawn[:, place])
            assert inside.low is not None
            assert inside.high is not None
            hits.append(inside.low <= value <= inside.high)
        a, true = made.law.exponent, case.law.exponent
        for name in (case.noise, "all"):
            all_hits, errors = found.setdefault(name, ([], []))
            all_hits.append(hits)
            errors += [abs(a / true - 1.0), abs((1.0 - a) / (1.0 - true) - 1.0)]
    rows = []
    for name in (*sorted(one for one in found if one != "all"), "all"):
        all_hits, errors = found[name]
        shares = np.mean(all_hits, axis=0)
        rows.append(
            [
                name,
                str(len(all_hits)),
                *(f"{share:.3f}" for share in shares),
                f"{math.sqrt(0.16 / len(all_hits)):.3f}",
                f"{np.exp(np.mean(np.log(np.maximum(errors, 1e-12)))):.2%}",
                f"{max(errors):.1%}",
            ]
        )
    assert len(keys) == len(rows[0]) - 5
    return rows


def published_rows() -> list[list[str]]:
    """Each row of the table of published numbers: what it is, what was published, what comes out here."""
    points = read_points(DATA / "chinchilla_points_epoch.csv", TableOptions(drop_highest=5))
    fit = fit_law(points, method="huber3", draws=600)
    value, errors = fit.values(), {key: one.standard_error for key, one in {**fit.parameters, **fit.derived}.items()}
    names = ("A", "B", "E", "alpha", "beta")
    best = optimum_estimates(fit, 5.76e23)
    ratio = best["tokens_per_param"]
    hoffmann = next(one for one in fit.comparisons if one.name.startswith("Hoffmann"))
    iso = fit_law(read_points(DATA / "chinchilla_points_epoch.csv"), method="isoflop", leave_out=False)
    a = iso.derived["a"]
    rows = [
        [
            "huber3, Chinchilla's points",
            "0.00101827; A 478, B 2143, E 1.817, α 0.3473, β 0.3672",
            f"{fit.diagnostics.objective:.8f}; " + ", ".join(f"{value[name]:.4g}" for name in names),
        ],
        [
            "bootstrap errors of E, α, β, a",
            "0.026, 0.014–0.015, 0.021–0.022, 0.020",
            ", ".join(f"{errors[name]:.4f}" for name in ("E", "alpha", "beta", "a")),
        ],
        [
            "N*, D/N at 5.76e23",
            "73B, 17.9 (10 to 29)",
            f"{best['params'].value / 1e9:.1f}B, {ratio.value:.1f} ({ratio.low:.1f} to {ratio.high:.1f})",
        ],
        ["Hoffmann's numbers, objective", "1.209x", f"{hoffmann.objective_ratio:.3f}x"],
        ["random starts that reach the optimum", "19 %", f"{fit.diagnostics.starts_agreeing:.0%}"],
        [
            "isoflop, Chinchilla's points",
            "a 0.513, the 1e20 curve odd (D/N 66)",
            f"a {a.value:.3f} ({a.low:.3f} to {a.high:.3f}); "
            + "; ".join(f"{one.name}: {one.what}" for one in iso.diagnostics.outliers)[:120],
        ],
    ]
    return [*rows, *porian_rows(), *gadre_rows(), *gemstone_rows()]


def porian_rows() -> list[list[str]]:
    """The fifteen exponents of arXiv:2406.19146."""
    with (DATA / "porian2024_isoflop.csv").open() as file:
        names = ("file", "dataset", "hparams", "warmup", "decay", "flop_counting")
        experiments = sorted({tuple(row[name] for name in names) for row in csv.DictReader(file)})
    found = []
    for one in experiments:
        points = read_points(DATA / "porian2024_isoflop.csv", TableOptions(where=dict(zip(names, one, strict=True))))
        found.append(fit_isoflop(points, draws=2, rng=np.random.default_rng(0)).values["a"])
    text = ", ".join(f"{value:.3f}" for value in sorted(found))
    published = (
        "0.497, 0.504, 0.518, 0.569, 0.571, 0.578, 0.602, 0.604, 0.624, 0.700, 0.701, 0.708, 0.716, 0.834, 0.870"
    )
    return [["isoflop, Porian's experiments", published, text]]


def gadre_rows() -> list[list[str]]:
    """Five small runs, then 280 to 390 times their compute."""
    rows = []
    published = {
        ("rpj", "open_lm_1b-32.0"): "+0.71 %",
        ("rpj", "open_lm_7b-1.0"): "+0.73 %",
        ("rw_original", "open_lm_1b-16.0"): "-0.01 %",
        ("rw_original", "open_lm_7b-1.0"): "-1.6 %",
        ("c4_original", "open_lm_7b-1.0"): "-4.3 %",
    }
    with (DATA / "gadre2024_overtraining.csv").open() as file:
        every = list(csv.DictReader(file))
    for (data, name), wanted in published.items():
        small = [row for row in every if row["train_set"] == data and float(row["params"]) < 1e9]
        picked = [row for row in small if row["multiplier"] == "1.0"]
        picked += [row for row in small if row["multiplier"] == "16.0" and "d=96" in row["name"]]
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "small.csv"
            with table.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(picked[0]))
                writer.writeheader()
                writer.writerows(picked)
            points = read_points(table, TableOptions(columns={"loss": "loss_c4_val"}))
        fit = fit_law(points, method="overtrain", draws=0, leave_out=False)
        large = next(row for row in every if row["name"] == f"{data}-{name}")
        loss = law_loss("overtrain", fit.values(), float(large["params"]), float(large["tokens"]))
        rows.append([f"overtrain, {data}, {name}", wanted, f"{loss / float(large['loss_c4_val']) - 1:+.2%}"])
    return rows


def gemstone_rows() -> list[list[str]]:
    """The smaller half of the models fitted, the larger half predicted, beside a law with constant exponents."""
    path = DATA / "gemstones2025.csv"
    if not path.is_file():
        return []
    points: ScalingPoints = read_points(path, TableOptions(repeated=True))
    sizes = np.unique(points.params)
    small = points.params <= sizes[len(sizes) // 2 - 1]
    rows = []
    for method in ("vpnls", "huber3"):
        values = fit_law(points.take(small), method=method, draws=0, leave_out=False).values()
        test = points.take(~small)
        predicted = np.array([law_loss(method, values, n, d) for n, d in zip(test.params, test.tokens, strict=True)])
        baseline = constant_exponent_losses(points.take(small), test)
        errors = [float(np.abs(one / test.loss - 1.0).mean()) for one in (predicted, baseline)]
        rows.append([f"Gemstones, large half, {method}", f"baseline {errors[1]:.2%}", f"{errors[0]:.2%}"])
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=288, help="surfaces of each kind")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="folder for the dated result")
    options = parser.parse_args()
    began_s = time.process_time()
    head = ["noise", "fits", "E", "α", "β", "a", "loss at 10x", "(±)", "geometric mean", "largest"]
    parts = []
    kinds = (("Published design", published_design), ("Random surfaces", random_surfaces))
    for place, (name, make) in enumerate((*kinds, ("Known surfaces", known_surfaces))):
        rng = np.random.default_rng([options.seed, place])
        rows = judge_fits(make(rng, options.count), rng, draws=options.draws)
        parts.append(f"## {name}\n\n{markdown_table(head, rows)}\n")
        print(parts[-1], flush=True)
    fits_s = time.process_time() - began_s
    table = markdown_table(["fit", "published", "here"], published_rows())
    text = (
        "# Fits of known surfaces and of published tables\n\n"
        f"`python benchmarks/scaling_laws.py --count {options.count} --seed {options.seed}`, {date.today()}; "
        f"{fits_s:.0f} s of processor time for the surfaces, {time.process_time() - began_s - fits_s:.0f} s for the "
        "published tables. Coverage of 80 % intervals (± its binomial error), then geometric mean and largest relative "
        "error of the exponents a and 1 - a of the optimum.\n\n"
        + "\n".join(parts)
        + f"\n## Published tables\n\n{table}\n"
    )
    print(table)
    if options.write:
        replace_text(options.write / f"{date.today()}-scaling-laws.md", text)


if __name__ == "__main__":
    main()
