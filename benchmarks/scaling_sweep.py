"""Does a law fitted to small budgets foretell the largest? A sweep on CPU cores, its largest budget left out.

    python benchmarks/scaling_sweep.py [--budgets 1.5e11..2.4e12] [--sizes 6] [--out FOLDER] [--write benchmarks]

Five budgets of six sizes, up to about 1M parameters, on the corpus of `make run`; 25 minutes on two idle cores. The law
is fitted to four budgets and asked for the losses of the fifth, with an 80 % interval: draws of the fit with the
scatter of the points about it.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

import phalanx
from phalanx.io.files import replace_text
from phalanx.io.tables import markdown_table

JOB = Path(__file__).parents[1] / "examples" / "scaling.toml"
OVERRIDES = ["data.sequence=128", "batch.global_tokens=2048"]


def law(parameters: np.ndarray, params: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """E + A / N^alpha + B / D^beta of each row of parameters (E, A, B, alpha, beta)."""
    e, a, b, alpha, beta = np.moveaxis(np.atleast_2d(parameters)[..., None], 1, 0)
    return e + a / params**alpha + b / tokens**beta


def foretell(table: Path, *, method: str) -> list[dict[str, float]]:
    """Each run of the largest budget: measured, foretold without it, and the 80 % interval."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "done"]
    largest = max(float(row["budget"]) for row in rows)
    known, asked = (
        [row for row in rows if (float(row["budget"]) == largest) == is_asked] for is_asked in (False, True)
    )
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "known.csv"
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(known)
        fitted = phalanx.scale.fit(part, method=method, params_counted="total", flops_counted="6nd").fit
    names = ("E", "A", "B", "alpha", "beta")
    values = np.array([fitted.values()[name] for name in names])
    order = [list(fitted.parameters).index(name) for name in names]
    draws = np.array(fitted.draws)[:, order]
    params, tokens, losses = (np.array([float(row[key]) for row in asked]) for key in ("params", "tokens", "loss"))
    middle = law(values, params, tokens)[0]
    scatter = np.random.default_rng(0).normal(0.0, fitted.diagnostics.residual_sd, (len(draws), len(asked)))
    low, high = np.quantile(law(draws, params, tokens) * np.exp(scatter), (0.1, 0.9), axis=0)
    keys = ("params", "tokens", "loss", "foretold", "low", "high")
    return [dict(zip(keys, one, strict=True)) for one in zip(params, tokens, losses, middle, low, high, strict=True)]


def main() -> None:
    """Sweep, leave the largest budget out, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budgets", default="1.5e11..2.4e12")
    parser.add_argument("--sizes", type=int, default=6)
    parser.add_argument("--tokens-per-parameter", type=float, default=10.0)
    parser.add_argument("--method", default="isoflop")
    parser.add_argument("--fit", default="vpnls")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("runs/scaling-benchmark"))
    parser.add_argument("--write", type=Path, help="folder for the result")
    options = parser.parse_args()
    began = time.monotonic()
    found = phalanx.scale.sweep(
        JOB,
        budgets=options.budgets,
        sizes=options.sizes,
        method=options.method,
        tokens_per_parameter=options.tokens_per_parameter,
        out=options.out,
        overrides=[*OVERRIDES, *options.set],
    )
    print(found)
    rows = foretell(Path(found.table), method=options.fit)
    table = [
        [
            f"{one['params']:,.0f}",
            f"{one['tokens']:,.0f}",
            f"{one['loss']:.4f}",
            f"{one['foretold']:.4f}",
            f"{one['low']:.4f} to {one['high']:.4f}",
            f"{one['foretold'] / one['loss'] - 1:+.2%}",
            "yes" if one["low"] <= one["loss"] <= one["high"] else "no",
        ]
        for one in rows
    ]
    head = ["N", "D", "loss", "foretold", "80 % interval", "error", "inside"]
    best = min(rows, key=lambda one: one["loss"])
    worst = max(abs(one["foretold"] / one["loss"] - 1) for one in rows)
    text = (
        "# A sweep whose largest budget is left out\n\n"
        f"`python benchmarks/scaling_sweep.py --budgets {options.budgets} --sizes {options.sizes}`, "
        f"{date.today()}, {time.monotonic() - began:.0f} s.\n\n"
        f"{markdown_table(head, table)}\n\n"
        f"Lowest loss of the largest budget: {best['foretold'] / best['loss'] - 1:+.2%}; largest error {worst:.2%}.\n"
    )
    print(text)
    if options.write:
        replace_text(options.write / f"{date.today()}-scaling-sweep.md", text)


if __name__ == "__main__":
    main()
