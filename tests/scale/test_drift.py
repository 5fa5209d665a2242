"""A law whose form is wrong says so: intervals beyond the data are as wide as the held-out budget was off."""

from __future__ import annotations

import numpy as np

from phalanx.scale.fit_points import fit_law, optimum_estimates
from phalanx.scale.judge_run import law_band
from phalanx.scale.points import ScalingPoints


def curves(*, bend: float, noise: float = 0.001) -> tuple[ScalingPoints, ScalingPoints]:
    """Five budgets of six sizes, and one ten times beyond; `bend` of ln L per decade from the third on is no law."""
    rng = np.random.default_rng(5)
    flops = np.repeat([*np.geomspace(1e17, 1e19, 5), 1e20], 6)
    params = np.sqrt(flops / 120) * np.tile(np.geomspace(1 / 4, 4, 6), 6)
    tokens = flops / (6 * params)
    loss = 1.7 + 400 * params**-0.34 + 400 * tokens**-0.28
    loss *= np.exp(bend * np.maximum(0.0, np.log10(flops / 1e18)) + noise * rng.normal(size=len(loss)))
    every = ScalingPoints(
        source="made", params=params, tokens=tokens, flops=flops, loss=loss, run=("",) * 36, line=tuple(range(36))
    )
    return every.take(flops < 5e19), every.take(flops > 5e19)


def test_intervals_beyond_the_data_hold_what_a_wrong_law_misses() -> None:
    known, larger = curves(bend=0.02)
    fit = fit_law(known, draws=100)
    tested = fit.diagnostics.left_out_budget
    assert tested is not None
    assert tested.drift > 0.004
    assert fit.drift_at(5e18) == 0.0, "within the data the residuals say how far it is off"
    assert fit.drift_at(1e23) == fit.drift_at(1e22), "a short step says nothing of very long ones"
    bare = fit_law(known, draws=100, leave_out=False)

    def holds(law: object) -> float:
        bands = [law_band(law, n, d) for n, d in zip(larger.params, larger.tokens, strict=True)]  # type: ignore[arg-type]
        return float(np.mean([low <= loss <= high for (_, low, high), loss in zip(bands, larger.loss, strict=True)]))

    assert holds(fit) > holds(bare)
    wide, narrow = (optimum_estimates(one, 1e20)["loss"] for one in (fit, bare))
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)  # type: ignore[operator]


def test_a_law_that_is_right_is_not_widened() -> None:
    known, _ = curves(bend=0.0)
    fit = fit_law(known, draws=60)
    assert fit.diagnostics.left_out_budget is not None
    assert fit.diagnostics.left_out_budget.drift == 0.0


def test_an_exponent_that_is_open_is_warned_of() -> None:
    exact, _ = curves(bend=0.0)
    noisy, _ = curves(bend=0.0, noise=0.08)
    assert not any("leave the exponent" in one for one in fit_law(exact, draws=60, leave_out=False).warnings)
    assert any("leave the exponent" in one for one in fit_law(noisy, draws=60, leave_out=False).warnings)


def test_three_noisy_isoflop_curves_are_fitted_with_wide_intervals() -> None:
    """Student's t of one degree of freedom draws lines whose G is no number: seen on a sweep of 30 small runs."""
    known, _ = curves(bend=0.0, noise=0.01)
    three = known.take(known.flops > 9e17)
    for seed in range(3):
        fit = fit_law(three, method="isoflop", draws=400, seed=seed, leave_out=False)
        assert np.isfinite(np.array(fit.draws)).all()
        best = optimum_estimates(fit, 1e21)["params"]
        assert best.low is not None
        assert best.low < best.value < best.high  # type: ignore[operator]
