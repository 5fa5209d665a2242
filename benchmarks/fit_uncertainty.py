"""Fit the widths of the 80 % interval to a table of published runs; prints the coverage per source.

    python benchmarks/fit_uncertainty.py TABLE.csv [MORE.csv ...] [--write]

Two quantile regressions (pinball loss at 10 % and 90 %) with non-negative weights, then one factor per framework and
side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from phalanx.plan.prediction import FEATURES, interval_features
from phalanx.validate.throughput_rows import predict_rows
from phalanx.validate.throughput_table import number, read_table

Floats = NDArray[np.float64]
LEAST_BASE = 0.03  # two teams never agree better than this (planner.md, noise floor)
# Of an unseen framework the bias is unknown as well: leave-one-source-out errors are about twice those in sample.
UNSEEN_SCALE = 2.0
# A new source of a known framework scatters more than the sources the constants were fitted to.
NEW_SOURCE_SCALE = 1.06
# nanotron's sweep has whole regions of pathological runs (5 % of them over 10x slower than their neighbours): it gets
# its own scale, and does not widen everybody else's interval.
APART = "nanotron"


def quantile_fit(table: Floats, error: Floats, share: float, weight: Floats) -> Floats:
    """Non-negative weights w with `share` of `error` below `table @ w`."""
    rows, columns = table.shape
    cost = np.concatenate([np.zeros(columns), weight * share, weight * (1.0 - share)])
    equal = np.hstack([table, np.eye(rows), -np.eye(rows)])
    bounds = [(LEAST_BASE, None)] + [(0.0, None)] * (columns - 1 + 2 * rows)
    found = linprog(cost, A_eq=equal, b_eq=error, bounds=bounds, method="highs")
    return found.x[:columns]


def main() -> None:
    """Fit, print coverage, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = tuple(
        row for path in args.tables for row in read_table(path).rows
        if row.get("status") == "ok" and row.get("tier") in ("A", "B") and number(row, "step_s")
        and row.get("task") in ("", "pretrain")
    )  # fmt: skip
    found = predict_rows(rows)
    seconds = np.array([number(rows[index], "step_s") or np.nan for index in found.priced])
    source = np.array([rows[index]["source"] for index in found.priced])
    framework = np.array(found.frameworks)
    table = interval_features(found.cases, found.times)
    error = np.log(seconds / found.times.step_s)
    common = framework != APART
    below, above = fit(table[common], error[common], source[common])
    scales = {name: scale(table, error, below, above, framework == name) for name in sorted(set(framework))}
    inside = np.zeros(error.size, dtype=bool)
    for name, (low, high) in scales.items():
        part = framework == name
        inside[part] = (error[part] >= -low * (table[part] @ below)) & (error[part] <= high * (table[part] @ above))
    for name in sorted(set(source)):
        print(f"{name:22} {(source == name).sum():5d}  covered {inside[source == name].mean():6.1%}")
    print(f"all rows covered {inside.mean():.1%}")
    if args.write:
        target = Path(__file__).parent.parent / "src/phalanx/plan/uncertainty.toml"
        target.write_text(render(below, above, scales), encoding="utf-8")


def fit(table: Floats, error: Floats, source: NDArray[np.str_]) -> tuple[Floats, Floats]:
    """(below, above), every source weighing the same up to a hundred rows."""
    names, counts = np.unique(source, return_counts=True)
    share = dict(zip(names, counts, strict=True))
    weight = np.array([min(1.0, 100.0 / share[name]) for name in source])
    return quantile_fit(table, -error, 0.9, weight), quantile_fit(table, error, 0.9, weight)


def scale(table: Floats, error: Floats, below: Floats, above: Floats, part: NDArray[np.bool_]) -> tuple[float, float]:
    """The factors on both widths with which a tenth of a framework's runs falls out on each side."""
    low = np.quantile(-error[part] / (table[part] @ below), 0.9)
    high = np.quantile(error[part] / (table[part] @ above), 0.9)
    # Shrink towards 1 where few runs speak.
    trust = part.sum() / (part.sum() + 10.0)
    return float(NEW_SOURCE_SCALE * max(0.5, low) ** trust), float(NEW_SOURCE_SCALE * max(0.5, high) ** trust)


def render(below: Floats, above: Floats, scales: dict[str, tuple[float, float]]) -> str:
    """uncertainty.toml, as the package ships it."""
    lines = ["# Widths of the 80 % interval, written by benchmarks/fit_uncertainty.py; meaning: prediction.py.", ""]
    for side, weights in (("below", below), ("above", above)):
        lines += [f"[{side}]", *(f"{n} = {float(w):.4f}" for n, w in zip(FEATURES, weights, strict=True)), ""]
    for name, (low, high) in {**scales, "default": (UNSEEN_SCALE, UNSEEN_SCALE)}.items():
        lines += [f"[scale.{name}]", f"below = {low:.4f}", f"above = {high:.4f}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
