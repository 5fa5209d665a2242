"""Recompute per layer is priced between none and all."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.job.load import load
from phalanx.plan.make import make_plan

JOB = Path(__file__).parents[2] / "examples" / "llama-3-8b-64xH100.toml"
FIXED = ["parallel.mode=fixed", "parallel.zero=3", "parallel.shard=64", "batch.micro=1"]  # one layout, whatever fits


def priced(*overrides: str) -> tuple[float, float]:
    made = make_plan(load(JOB, overrides=[*FIXED, *overrides]))
    return made.prediction.step_s, made.memory.total_bytes


def test_half_the_layers_recompute_at_half_the_price_and_half_the_gain() -> None:
    none, every = priced("parallel.recompute=none"), priced("parallel.recompute=full")
    half = priced("parallel.recompute=full", "parallel.recompute_layers=16")  # of 32
    assert half[0] == pytest.approx((none[0] + every[0]) / 2, rel=1e-6)
    assert half[1] == pytest.approx((none[1] + every[1]) / 2, rel=1e-6)
    assert none[1] > half[1] > every[1]


def test_more_layers_than_there_are_is_all_of_them() -> None:
    every = priced("parallel.recompute=full")
    assert priced("parallel.recompute=full", "parallel.recompute_layers=99") == pytest.approx(every)
