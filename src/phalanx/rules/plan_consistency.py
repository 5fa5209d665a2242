"""Consistency check of a plan file, which may have been edited by hand: cheap arithmetic over redundant values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.errors import mistake
from phalanx.plan.peer_share import planned_share
from phalanx.plan.plan import Plan
from phalanx.plan.reliability import effective_time
from phalanx.units import DAY_S, plural

# Relative tolerance between two values of a plan that must agree. Values are written in full digits, but versions of
# Phalanx may differ in the order of a sum.
NEAR = 1e-3


def require_coherent(plan: Plan, where: str) -> Plan:
    """Return the plan; raises UserError when one part of it contradicts another."""
    contradiction = next(find_contradictions(plan), "")
    if contradiction:
        raise mistake(
            where,
            f"is not consistent: {contradiction}",
            why="it was edited or damaged after it was written: whatever were said of it would describe no plan",
            fix="write it again: phalanx plan JOB --out",
        )
    return plan


def find_contradictions(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each value that is not a number, out of range, or in contradiction to another."""
    yield from (f"{name} is not a number" for name in _nan_values(plan, ""))
    yield from _size_conflicts(plan)
    yield from _memory_conflicts(plan)
    yield from _reliability_conflicts(plan)
    wall_s, training_s = plan.duration.wall_s, plan.duration.training_s
    if wall_s < training_s:
        yield f"duration.wall_s is {wall_s:.4g} s, shorter than its training_s of {training_s:.4g} s"


def _nan_values(value: Any, name: str) -> Iterator[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _nan_values(getattr(value, item.name), f"{name}.{item.name}" if name else item.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nan_values(item, f"{name}.{key}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _nan_values(item, f"{name}[{index}]")
    elif isinstance(value, float) and math.isnan(value):
        yield name


def _size_conflicts(plan: Plan) -> Iterator[str]:
    layout, have = plan.layout, plan.cluster.devices
    degrees = ("tensor", "context", "pipeline", "data", "expert", "shard", "micro_batch", "accumulation")
    yield from (f"layout.{name} is {size}" for name in degrees if (size := getattr(layout, name)) < 1)
    if layout.devices > have:
        product = " × ".join(str(getattr(layout, name)) for name in degrees[:4])
        yield f"the layout takes {product} = {layout.devices:,} devices, and the cluster has {have:,}"
    hosts = max(1, math.ceil(layout.devices / max(1, plan.cluster.host_devices)))
    if hosts != plan.reliability.hosts:
        counted = plan.reliability.hosts
        needs = f"{plural(layout.devices, 'device')} on {plural(hosts, 'host')}"
        yield f"the layout takes {needs}, and failures are counted of {counted:,}"
    for name, value in (
        ("prediction.step_s", plan.prediction.step_s),
        ("duration.training_s", plan.duration.training_s),
    ):
        if not 0.0 < value < math.inf:
            yield f"{name} is {value:g}"
            return
    # Of a job over slow links, the share of one peer; of any other job, all of it.
    share = planned_share(plan.job, plan.cluster)
    tokens = share.batch.global_sequences * plan.job.data.sequence
    predicted_tokens = plan.prediction.tokens_per_s * plan.prediction.step_s
    # The prediction is of the first site, with its part of the batch.
    if plan.sites is not None:
        return
    if not _nearly_equal(predicted_tokens, tokens):
        yield f"a step has {tokens:,} tokens, and prediction.tokens_per_s × step_s is {predicted_tokens:,.0f}"


def _memory_conflicts(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if not 0.0 < memory.usable_bytes < math.inf:
        yield f"memory.usable_bytes is {memory.usable_bytes:g}"
    total = sum(memory.parts_bytes.values())
    if not _nearly_equal(total, memory.total_bytes):
        yield f"parts of the memory add up to {total:.4g} bytes, and memory.total_bytes says {memory.total_bytes:.4g}"


def _reliability_conflicts(plan: Plan) -> Iterator[str]:
    reliability, requested = plan.reliability, plan.job.checkpoint.interval_s
    interval_s = reliability.optimal_interval_s if requested == "auto" else float(requested)
    if not reliability.interval_s > 0.0 or not _nearly_equal(reliability.interval_s, interval_s):
        source = "the optimum" if requested == "auto" else "job.checkpoint.interval_s"
        yield f"reliability.interval_s is {reliability.interval_s:.4g} s, and {source} {interval_s:.4g} s"
        return
    if not 0.0 <= reliability.effective_time <= 1.0:
        yield f"reliability.effective_time is {reliability.effective_time:g}, and a share is between 0 and 1"
        return
    if not reliability.mtbf_s > 0.0 or not _nearly_equal(
        reliability.failures_per_day * reliability.mtbf_s, DAY_S, or_none=math.isinf(reliability.mtbf_s)
    ):
        yield f"reliability.mtbf_s is {reliability.mtbf_s:.4g} s at {reliability.failures_per_day:.4g} failures a day"
        return
    recomputed = effective_time(
        reliability.blocking_s, reliability.interval_s, reliability.mtbf_s, lost_s=reliability.lost_s
    )
    if not _nearly_equal(recomputed, reliability.effective_time):
        yield f"reliability.effective_time is {reliability.effective_time:.4g}, and its own parts give {recomputed:.4g}"


def _nearly_equal(one: float, other: float, *, or_none: bool = False) -> bool:
    return or_none or math.isclose(one, other, rel_tol=NEAR, abs_tol=1e-9)
