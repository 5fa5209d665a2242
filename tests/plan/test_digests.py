"""How often replicas are compared: within an interval, within a hundred steps, and within the job."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rules.kit import evidence

from phalanx.plan.auto_settings import digest_every


@pytest.mark.parametrize(
    ("interval_s", "wall_s", "steps"),
    [(1e6, math.inf, 100), (250.0, math.inf, 25), (1e6, 400.0, 40), (250.0, 400.0, 25), (math.inf, 30.0, 3)],
)
def test_auto_is_no_longer_than_the_interval_or_the_job(interval_s: float, wall_s: float, steps: int) -> None:
    plan = evidence().the_plan
    reliability = replace(plan.reliability, interval_s=interval_s)
    prediction = replace(plan.prediction, step_s_high=10.0)
    assert digest_every(plan.job.fault, reliability, prediction, wall_s=wall_s) == steps
    own = replace(plan.job.fault, digest_every=7)
    assert digest_every(own, reliability, prediction, wall_s=wall_s) == 7
