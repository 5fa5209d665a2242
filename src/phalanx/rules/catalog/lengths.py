"""How long a job is, for rules that hold an interval or a failure rate against it."""

from __future__ import annotations

import math

from phalanx.plan.plan import Plan


def job_s(plan: Plan) -> float:
    """Seconds of training, without failures.

    The expected wall clock is no measure: bad settings stretch it, without end where failures outrun them.
    """
    return plan.duration.training_s


def capped_s(plan: Plan) -> float:
    """The interval between checkpoints as it comes to pass: a job that ends before has only its last one."""
    return min(plan.reliability.interval_s, job_s(plan))


def failure_chance(plan: Plan) -> float:
    """The chance of at least one failure in the job; 0 where the plan does not say."""
    mtbf_s, length_s = plan.reliability.mtbf_s, job_s(plan)
    return -math.expm1(-length_s / mtbf_s) if mtbf_s > 0 and length_s >= 0 else 0.0
