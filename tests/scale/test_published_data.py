"""Fits of published tables: each number stands in the paper named, or was computed from the same file elsewhere."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from phalanx.scale.fit_points import fit_law, optimum_estimates, predicted_losses
from phalanx.scale.fit_result import ScalingFit
from phalanx.scale.huber import fit_huber
from phalanx.scale.isoflop import fit_isoflop
from phalanx.scale.points import ScalingPoints, TableOptions, read_points
from phalanx.scale.surface import SurfaceData, polish_surface, project_grid

DATA = Path(__file__).parents[1] / "data" / "scaling"
CHINCHILLA = DATA / "chinchilla_points_epoch.csv"


@pytest.fixture(scope="module")
def chinchilla() -> ScalingPoints:
    return read_points(CHINCHILLA, TableOptions(drop_highest=5))


@pytest.fixture(scope="module")
def approach_3(chinchilla: ScalingPoints) -> ScalingFit:
    return fit_law(chinchilla, method="huber3", draws=600)


def test_approach_3_is_epochs_replication(chinchilla: ScalingPoints, approach_3: ScalingFit) -> None:
    assert len(chinchilla) == 240
    assert approach_3.diagnostics.objective == pytest.approx(0.00101827, abs=1e-7)
    wanted = {"A": 478, "B": 2143, "E": 1.817, "alpha": 0.3473, "beta": 0.3672}
    assert approach_3.values() == {name: pytest.approx(value, rel=0.01) for name, value in wanted.items()}
    assert approach_3.derived["a"].value == pytest.approx(0.514, abs=0.001)


def test_its_bootstrap(approach_3: ScalingFit) -> None:
    errors = {name: one.standard_error for name, one in {**approach_3.parameters, **approach_3.derived}.items()}
    assert errors["E"] == pytest.approx(0.026, abs=0.003)
    assert errors["alpha"] == pytest.approx(0.015, abs=0.002)
    assert errors["beta"] == pytest.approx(0.0215, abs=0.003)
    assert errors["a"] == pytest.approx(0.020, abs=0.003)
    exponents = [row[4] / (row[3] + row[4]) for row in approach_3.draws]
    low, high = np.quantile(exponents, [0.025, 0.975])
    assert (low, high) == (pytest.approx(0.48, abs=0.01), pytest.approx(0.556, abs=0.01))


def test_chinchillas_own_budget(approach_3: ScalingFit) -> None:
    best = optimum_estimates(approach_3, 5.76e23)
    assert best["params"].value == pytest.approx(73e9, rel=0.01)
    ratio = best["tokens_per_param"]
    assert ratio.value == pytest.approx(17.9, abs=0.1)
    assert ratio.low == pytest.approx(10, abs=1.5)
    assert ratio.high == pytest.approx(29, abs=2.5)


def test_hoffmanns_numbers_are_scored_on_the_same_points(approach_3: ScalingFit) -> None:
    hoffmann = next(one for one in approach_3.comparisons if one.name.startswith("Hoffmann"))
    assert hoffmann.objective_ratio == pytest.approx(1.209, abs=0.002)
    assert "1.209x" in hoffmann.sentence


def test_the_mean_of_the_objective_gives_the_same_answer(chinchilla: ScalingPoints) -> None:
    """Hoffmann's optimizer stopped early on the mean: its tolerance was met by the small numbers."""
    data = SurfaceData.of(chinchilla.params, chinchilla.tokens, chinchilla.loss)
    start = polish_surface(data, project_grid(data, keep=1))[0]
    total, mean = (fit_huber(data, start, scale=scale)[0][0] for scale in (1.0, 1.0 / 240))
    assert total == pytest.approx(mean, abs=1e-6)


def test_few_random_starts_reach_the_optimum_and_the_page_says_so(approach_3: ScalingFit) -> None:
    assert approach_3.diagnostics.starts_agreeing is not None
    assert 0.0 < approach_3.diagnostics.starts_agreeing < 0.35
    assert any("random starts reach this optimum" in one for one in approach_3.warnings)


def test_isoflop_on_scattered_points() -> None:
    """a of the source is 0.513; the 1e20 curve is decided by noise: its lowest points say D/N 66."""
    fit = fit_law(read_points(CHINCHILLA), method="isoflop", leave_out=False)
    exponent = fit.derived["a"]
    assert exponent.value == pytest.approx(0.513, abs=0.002)
    assert exponent.low is not None
    assert exponent.high is not None
    assert exponent.low < 0.513 < exponent.high
    odd = [one for one in fit.diagnostics.outliers if one.name == "the 9.5e+19 FLOP curve"]
    assert odd
    assert "D/N 68" in odd[0].what


# Published least-squares exponents of N* (arXiv:2406.19146; porian2024_optima.csv of its repository).
PORIAN = {
    ("summary_df", "rw", "base", "long", "kaplan", "kaplan"): 0.8338,
    ("summary_df", "rw", "base", "long", "kaplan", "standard"): 0.7009,
    ("summary_df", "rw", "base", "short", "kaplan", "standard"): 0.6035,
    ("summary_df", "rw", "base", "short", "chinchilla", "standard"): 0.5714,
    ("summary_df", "rw", "tuned", "short", "const", "standard"): 0.4970,
    ("summary_df_att", "rw", "base", "long", "kaplan", "attention"): 0.7159,
    ("summary_df_att", "rw", "base", "short", "kaplan", "attention"): 0.6240,
    ("summary_df_att", "rw", "base", "short", "chinchilla", "attention"): 0.5778,
    ("summary_df_att", "rw", "tuned", "short", "const", "attention"): 0.5041,
    ("summary_df_owt2", "owt2", "base", "long", "kaplan", "kaplan"): 0.8700,
    ("summary_df_owt2", "owt2", "base", "long", "kaplan", "standard"): 0.7000,
    ("summary_df_owt2", "owt2", "base", "short", "kaplan", "standard"): 0.6016,
    ("summary_df_owt2", "owt2", "base", "short", "chinchilla", "standard"): 0.5689,
    ("summary_df_owt2", "owt2", "tuned", "short", "const", "standard"): 0.5184,
    ("summary_df_kaplan_tuned_hparams", "rw", "tuned", "long", "const", "kaplan"): 0.7081,
}


@pytest.mark.parametrize("experiment", PORIAN, ids="-".join)
def test_porians_exponents(experiment: tuple[str, ...]) -> None:
    names = ("file", "dataset", "hparams", "warmup", "decay", "flop_counting")
    points = read_points(DATA / "porian2024_isoflop.csv", TableOptions(where=dict(zip(names, experiment, strict=True))))
    found = fit_isoflop(points, draws=2, rng=np.random.default_rng(0))
    assert found.values["a"] == pytest.approx(PORIAN[experiment], abs=0.004)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ("rpj", {"open_lm_1b-32.0": 0.71, "open_lm_7b-1.0": 0.73}),
        ("rw_original", {"open_lm_1b-16.0": -0.01, "open_lm_7b-1.0": -1.6}),
        ("c4_original", {"open_lm_7b-1.0": -4.3}),  # the honest failure
    ],
)
def test_gadres_extrapolations(tmp_path: Path, data: str, wanted: dict[str, float]) -> None:
    """Four sizes at 20 tokens per parameter and the smallest at 320; then 280 to 390 times the compute."""
    with (DATA / "gadre2024_overtraining.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train_set"] == data]
    small = [row for row in rows if float(row["params"]) < 1e9]
    picked = [
        row for row in small if row["multiplier"] == "1.0" or (row["multiplier"] == "16.0" and "d=96" in row["name"])
    ]
    table = tmp_path / "small.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(picked[0]))
        writer.writeheader()
        writer.writerows(picked)
    fit = fit_law(
        read_points(table, TableOptions(columns={"loss": "loss_c4_val"})), method="overtrain", draws=20, leave_out=False
    )
    assert fit.data.rows == 5
    from phalanx.scale.laws import law_loss

    for name, percent in wanted.items():
        row = next(row for row in rows if row["name"] == f"{data}-{name}")
        predicted = law_loss("overtrain", fit.values(), float(row["params"]), float(row["tokens"]))
        assert 100 * (predicted / float(row["loss_c4_val"]) - 1) == pytest.approx(percent, abs=0.06)


def test_our_own_sweep_predicts_runs_of_four_times_the_budget() -> None:
    """30 runs of 10M to 90M parameters on an H200, and three of a budget four times as large: within 1 %."""
    table = Path(__file__).parents[2] / "benchmarks" / "data" / "scaling_h200_2026-11-18.csv"
    points = read_points(table, TableOptions(params_counted="total"))
    large = points.flops > 4e15
    assert (len(points), large.sum()) == (33, 3)
    fit = fit_law(points.take(~large), draws=100, leave_out=False)
    test = points.take(large)
    errors = predicted_losses("vpnls", fit.values(), test) / test.loss - 1.0
    assert np.abs(errors).max() < 0.01
    assert any("far smaller than every run here" in one for one in fit.warnings)
