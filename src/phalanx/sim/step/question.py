"""A plan as its cost model sees it, asked again for what a Plan does not keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan import ask as asking
from phalanx.plan import traffic
from phalanx.plan.ask import Ask
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.plan import Plan
from phalanx.plan.score import price
from phalanx.plan.step import StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row of cases, the prediction without a calibration, and where the planner places each axis."""

    plan: Plan
    ask: Ask
    cases: Cases
    times: StepTimes
    groups: traffic.Groups

    def pace(self, part: str) -> float:
        """The plan's seconds of a part over those of the bare model: its calibration, or 1."""
        modelled = one(getattr(self.times, part))
        return self.plan.prediction.breakdown_s[part] / modelled if modelled > 0 else 1.0


def question(plan: Plan) -> Question:
    """The plan's own cost model."""
    ask, _ = asking.from_job(plan.job, plan.cluster)
    cases, times, _ = price(ask, [plan.layout])
    groups = traffic.groups(cases, ask.physics, ask.profile)
    return Question(plan=plan, ask=ask, cases=cases, times=times, groups=groups)


def one(value: Floats | float) -> float:
    """The single element of a column."""
    return float(np.max(value))
