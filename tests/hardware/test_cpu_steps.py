"""Steps on processor cores: what differs from a GPU, and constants found again from measured steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.hardware.cpu_steps import CpuRates, CpuStep, cpu_times, fit_rates

STEP = CpuStep(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, gated=1, vocab=512, seq=256, tokens=512, count=4,
    parameters=8.5e5,
)  # fmt: skip
PIPED = replace(STEP, pp=2, dp=2, shard=2, zero=2, parameters=4.3e5)
RATES = CpuRates(cores=2.0)


def seconds(step: CpuStep, rates: CpuRates) -> float:
    return float(cpu_times(step, rates).step)


def test_issuing_operations_adds_to_doing_them() -> None:
    """A GPU works while the host issues; a core does one after the other."""
    slower = replace(RATES, layer_s=RATES.layer_s + 1e-3)
    assert seconds(STEP, slower) - seconds(STEP, RATES) == pytest.approx(4 * 4 * 1e-3)


def test_a_pipeline_that_shares_cores_has_no_bubble() -> None:
    """Four ranks on two cores: while one stage waits, its core works for the other. On four cores it stands still."""
    assert float(cpu_times(PIPED, RATES).bubble) == pytest.approx(0.0, abs=1e-12)
    assert float(cpu_times(PIPED, replace(RATES, cores=4.0)).bubble) > 0.0


def test_ranks_beyond_the_cores_do_not_make_it_faster() -> None:
    two, four = replace(STEP, dp=2, count=2), replace(STEP, dp=4, count=1)
    assert seconds(four, RATES) > seconds(two, RATES)
    assert seconds(four, replace(RATES, cores=4.0)) < seconds(two, replace(RATES, cores=4.0))


def test_the_parts_add_up_and_grow_with_the_work() -> None:
    columns = replace(STEP, hidden=np.array([64.0, 128.0, 256.0]), recompute=np.array([0.0, 1.0, 2.0]))
    times = cpu_times(columns, RATES)
    assert times.step.shape == (3,)
    assert (np.diff(times.step) > 0).all()
    assert (np.asarray(times.recompute) > 0).tolist() == [False, True, True]


def test_constants_are_found_again() -> None:
    """A machine three times as fast in some things: its jobs are predicted within 5 %, and those of other shapes."""
    true = replace(RATES, matmul_s=RATES.matmul_s / 3, layer_s=RATES.layer_s / 2, logit_s=RATES.logit_s / 2)
    measured = [
        replace(STEP, layers=2, hidden=64, tokens=128, seq=64, count=1, dp=2),
        replace(STEP, layers=2, hidden=256, ffn=768, heads=4, head_dim=64, tokens=512, count=1, dp=2),
        replace(STEP, layers=1, tokens=1024, seq=1024, count=1, dp=2),
        replace(STEP, layers=1, hidden=64, tokens=1024, seq=128, count=1, vocab=8192, dp=2),
        replace(STEP, layers=3, tokens=256, seq=128, count=3, dp=2),
        replace(PIPED, tokens=256, seq=128),
        replace(STEP, layers=2, dp=4, shard=4, zero=3, count=1, tokens=256),
    ]
    found = fit_rates(measured, [seconds(one, true) for one in measured], 2)
    for step in (*measured, STEP, PIPED, replace(STEP, layers=6, dp=2, hidden=192)):
        assert seconds(step, found) == pytest.approx(seconds(step, true), rel=0.05)


def test_nothing_measured_gives_typical_constants() -> None:
    assert fit_rates([], [], 2) == RATES
