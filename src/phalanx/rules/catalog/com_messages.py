"""The plan's collectives as evidence: their messages, and plans whose traffic is no traffic."""

from __future__ import annotations

import math

from phalanx.network.nccl_cluster import sane_rate as sane
from phalanx.plan.mapping import (
    BUCKET_MIB,
    MIB,
    REDUCING,
    Message,
    axis_messages,
    bucket_bytes,
    members_per_domain,
    message_system,
    message_time,
)
from phalanx.plan.plan import Plan
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, unknown

__all__ = (
    "BUCKET_MIB",
    "MIB",
    "Message",
    "bucket_bytes",
    "damaged_traffic",
    "gradient_messages",
    "members_per_domain",
    "message_system",
    "message_time",
    "plan_messages",
    "sane",
)


def damaged_traffic(plan: Plan) -> Outcome | None:
    """A plan file whose traffic is no traffic: edited by hand, or torn."""
    numbers = [n for one in plan.mapping for n in (one.bytes_per_step, one.wire_s, one.shown_s, plan.prediction.step_s)]
    if all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    return unknown("the plan's traffic has numbers that cannot be", fix="plan the job again: phalanx plan JOB --out")


def plan_messages(evidence: Evidence) -> tuple[Message, ...]:
    """Every sum, gather and scatter of a step that more than one rank takes part in, gradients first."""
    plan = evidence.the_plan
    return axis_messages(evidence.the_job, plan.cluster, plan.layout, plan.mapping)


def gradient_messages(evidence: Evidence) -> tuple[Message, ...]:
    """Those that sum gradients."""
    return tuple(one for one in plan_messages(evidence) if one.axis in REDUCING and one.operation != "all-gather")
