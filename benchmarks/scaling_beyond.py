"""Do 80 % intervals hold larger runs? The largest one to three budgets of public tables, predicted from the others.

    python benchmarks/scaling_beyond.py [--method vpnls]

Each row of the result is one table: the share of its larger runs inside the interval that `phalanx scale predict`
gives, without and with what the law's own held-out budget showed of its drift. Two minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.errors import UserError
from phalanx.io.tables import markdown_table
from phalanx.scale.fit_points import fit_law
from phalanx.scale.fit_result import ScalingFit
from phalanx.scale.isoflop import group_budgets
from phalanx.scale.judge_run import law_band
from phalanx.scale.points import ScalingPoints, TableOptions, read_points

DATA = Path(__file__).parents[1] / "tests" / "data" / "scaling"
OWN = Path(__file__).parent / "data"


def public_tables() -> Iterator[tuple[str, ScalingPoints]]:
    """Chinchilla's points, Porian's 15 experiments, Gadre's three datasets, and our own sweeps."""
    yield "Chinchilla", read_points(DATA / "chinchilla_points_epoch.csv", TableOptions(drop_highest=5))
    names = ("file", "dataset", "hparams", "warmup", "decay", "flop_counting")
    with (DATA / "porian2024_isoflop.csv").open() as file:
        experiments = sorted({tuple(row[name] for name in names) for row in csv.DictReader(file)})
    for number, one in enumerate(experiments, start=1):
        where = dict(zip(names, one, strict=True))
        yield f"Porian {number}", read_points(DATA / "porian2024_isoflop.csv", TableOptions(where=where))
    for train_set in ("c4_original", "rpj", "rw_original"):
        options = TableOptions(where={"train_set": train_set}, columns={"loss": "loss_c4_val"})
        yield f"Gadre {train_set}", read_points(DATA / "gadre2024_overtraining.csv", options)
    for table in sorted(OWN.glob("scaling_*.csv")):
        yield table.stem, read_points(table)


def split_largest(points: ScalingPoints, count: int) -> tuple[ScalingPoints, ScalingPoints]:
    """All runs below the `count` largest budgets, and those; without budgets, so many times 15 % of the runs."""
    budgets = group_budgets(points)
    if len(budgets) >= 4 and sum(len(rows) for _, rows in budgets) > 0.8 * len(points):
        rows = np.concatenate([rows for _, rows in budgets[-count:]])
        larger = np.zeros(len(points), dtype=bool)
        larger[rows] = True
        return points.take(points.flops < points.flops[rows].min()), points.take(larger)
    least = np.sort(points.flops)[-max(1, round(0.15 * count * len(points)))]
    return points.take(points.flops < least), points.take(points.flops >= least)


def share_inside(fit: ScalingFit, larger: ScalingPoints) -> float:
    """Of runs whose loss lies in the interval."""
    bands = [law_band(fit, n, d) for n, d in zip(larger.params, larger.tokens, strict=True)]
    return float(np.mean([low <= loss <= high for (_, low, high), loss in zip(bands, larger.loss, strict=True)]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="vpnls")
    method: str = parser.parse_args().method
    rows, before, after = [], [], []
    for name, points in public_tables():
        shares: list[tuple[float, float]] = []
        for count in (1, 2, 3):
            known, larger = split_largest(points, count)
            try:
                fit = fit_law(known, method=method, draws=100)
            except UserError:
                continue
            bare = replace(fit, diagnostics=replace(fit.diagnostics, left_out_budget=None))
            shares.append((share_inside(bare, larger), share_inside(fit, larger)))
        before += [one for one, _ in shares]
        after += [one for _, one in shares]
        rows.append([name, *(f"{one:.2f} / {two:.2f}" for one, two in shares)])
        print(rows[-1], flush=True)
    print(
        markdown_table(
            ["table", *(f"{count} left out" for count in (1, 2, 3))], [r + [""] * (4 - len(r)) for r in rows]
        )
    )
    print(f"\nmean of {len(before)}: {np.mean(before):.3f} without the drift, {np.mean(after):.3f} with it")


if __name__ == "__main__":
    main()
