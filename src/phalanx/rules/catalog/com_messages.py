"""The messages of the plan's collectives as evidence, and detection of plans with damaged traffic numbers."""

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
    """Return an outcome for a plan file whose traffic has impossible numbers (edited or truncated); else None."""
    numbers = [
        number
        for group in plan.mapping
        for number in (group.bytes_per_step, group.wire_s, group.shown_s, plan.prediction.step_s)
    ]
    if all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    return unknown("the plan's traffic has numbers that cannot be", fix="plan the job again: phalanx plan JOB --out")


def plan_messages(evidence: Evidence) -> tuple[Message, ...]:
    """Return every sum, gather and scatter of a step between two or more ranks, gradients first."""
    plan = evidence.the_plan
    return axis_messages(evidence.the_job, plan.cluster, plan.layout, plan.mapping)


def gradient_messages(evidence: Evidence) -> tuple[Message, ...]:
    """Return the messages that sum gradients."""
    return tuple(
        message for message in plan_messages(evidence) if message.axis in REDUCING and message.operation != "all-gather"
    )
