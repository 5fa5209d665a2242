"""Hardware of which nothing is published (the profile `custom`) is judged by measurements alone, never by tables."""

from __future__ import annotations

import math

from phalanx.plan import reliability
from phalanx.plan.plan import Plan
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, unknown


def unmeasured(evidence: Evidence, what: str) -> Outcome | None:
    """`unknown` where the verdict would rest on seconds that no probe, calibration or run has measured."""
    plan, log = evidence.plan, evidence.log
    if not evidence.profile.must_measure or plan is None:
        return None
    ran = log is not None and log.steps is not None and log.steps.duration_s is not None
    if ran or plan.calibration is not None or plan.cluster.matmul_flops > 0:
        return None
    return unknown(
        f"{what} is not judged by tables on {plan.cluster.accelerator.name}: the profile custom must be measured",
        fix="phalanx probe measures a machine, phalanx calibrate RUN a plan's seconds; --profile names a known kind",
    )


def unmeasured_rate(evidence: Evidence) -> Outcome | None:
    """`unknown` where the verdict would rest on a rate of failures that nobody gave."""
    plan = evidence.plan
    if not evidence.profile.must_measure or plan is None:
        return None
    if is_rate_given(plan):
        return None
    name = plan.cluster.accelerator.name
    return unknown(
        f"how often hosts of {name} fail is not published: the profile custom must be measured",
        fix="give your own rate: fault.failures_per_host_day, or failures_per_host_day in a cluster file",
        at="fault.failures_per_host_day",
    )


def is_rate_given(plan: Plan) -> bool:
    """Whether the job or the cluster's file names a rate of failures, so that it is not the table's."""
    own = plan.reliability.failures_per_host_day != plan.cluster.failures_per_host_day
    return own or reliability.is_rate_given(plan.cluster, plan.job.fault)


def site_interval(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """A range of sites that can be reckoned with, whatever a plan file says."""
    if interval is None or len(interval) != 2 or not all(math.isfinite(one) and one >= 0 for one in interval):
        return None
    return interval
