"""The wait for another rank, as plan and trainer both compute it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rules.kit import evidence

from phalanx.plan.auto_settings import bounded_timeout_s, steady_timeout_s


@pytest.mark.parametrize(
    ("step_s", "timeout_s"),
    [(0.1, 30), (6.0, 30), (6.1, 30.5), (24.0, 120), (119.0, 120), (121.0, 121), (float("inf"), 120), (0.0, 30)],
)
def test_five_steps_between_two_bounds(step_s: float, timeout_s: float) -> None:
    assert bounded_timeout_s(step_s) == pytest.approx(timeout_s)


def test_auto_is_computed_from_the_slow_end_and_a_number_stands() -> None:
    found = evidence()
    prediction = replace(found.the_plan.prediction, step_s=1.0, step_s_high=10.0)
    assert steady_timeout_s(found.the_job, prediction) == 50.0
    assert steady_timeout_s(evidence("train.timeout_s=77").the_job, prediction) == 77.0
