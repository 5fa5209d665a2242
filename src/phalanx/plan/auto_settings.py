"""The meaning of "auto" for `fault.digest_every` and `train.timeout_s`, and a check of `parallel.compression`.

Replicas are compared at least once in a checkpoint interval, so that a damaged state is found while an intact
checkpoint still exists, and at least once in 100 steps (our choice). It costs little: 1 GB of parameters takes 3.4 ms
on an H200 (benchmarks/2026-11-15-in-memory-checkpoints.md), and a core does 2.6 GB/s.
"""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.errors import Problem
from phalanx.job.run_sections import FaultSettings
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.prediction import Prediction
from phalanx.plan.reliability import Reliability
from phalanx.plan.request import PlanRequest
from phalanx.plan.score import price_layouts
from phalanx.units import format_seconds

MOST_STEPS = 100


def digest_every(
    fault: FaultSettings, reliability: Reliability, prediction: Prediction, *, wall_s: float = math.inf
) -> int:
    """Return the steps between two comparisons of replicas; 0 is never, and only where the job sets it.

    `wall_s` is the duration of the whole job.
    """
    if not isinstance(fault.digest_every, str):
        return fault.digest_every
    return steps_within(min(reliability.interval_s, wall_s), prediction.step_s_high)


def steps_within(interval_s: float, step_s: float) -> int:
    """Return the number of steps in an interval, limited to 1 to 100.

    >>> steps_within(1800.0, 10.0), steps_within(60.0, 7.0), steps_within(1.0, 5.0), steps_within(float("inf"), 1.0)
    (100, 8, 1, 100)
    """
    if not (math.isfinite(interval_s) and math.isfinite(step_s)) or step_s <= 0:
        return MOST_STEPS
    return max(1, min(MOST_STEPS, math.floor(interval_s / step_s)))


# The time that a rank waits for another once steps are steady: the meaning of `train.timeout_s = "auto"`.
#
# Five steps, from 30 to 120 s. Five is NVIDIA's factor over the times it observed (NVIDIA/nvidia-resiliency-ext); a
# network card that flaps returns within seconds (MegaScale, arXiv:2402.15627), so below 30 s a healthy job would be
# ended; 120 s is near torchtitan's 100 s, where PyTorch's default for NCCL is 600 s. The last clause of
# `bounded_timeout_s`, at least one step, is our choice: pipeline ranks wait for a part of a step.


STEPS = 5.0
LEAST_S = 30.0
MOST_S = 120.0


def steady_timeout_s(job: Job, prediction: Prediction) -> float:
    """Return the seconds until a collective times out: the job's value, or five steps at the predicted slow end."""
    if not isinstance(job.train.timeout_s, str):
        return job.train.timeout_s
    return bounded_timeout_s(prediction.step_s_high)


def bounded_timeout_s(
    step_s: float, *, steps: float = STEPS, least_s: float = LEAST_S, most_s: float = MOST_S
) -> float:
    """Return the time of `steps` steps, limited to two bounds, but never less than one step.

    >>> [bounded_timeout_s(seconds) for seconds in (1.0, 10.0, 60.0, 200.0, float("nan"))]
    [30.0, 50.0, 120.0, 200.0, 120.0]
    """
    if not math.isfinite(step_s):
        return most_s
    return max(min(max(steps * step_s, least_s), most_s), step_s)


# The warning about compression of gradients that does not pay for its rounding.


# Least share of the step that compression must save: below it the plan cannot decide, because it does not count the
# packing.
WORTH = 0.02


def compression_pays(request: PlanRequest, layout: Layout, *, where: str = "parallel.compression") -> Problem | None:
    """Return a warning if the step is predicted to gain less than 2 % from its compression; None if it pays."""
    if layout.compression == "none":
        return None
    rows = [replace(layout, compression=kind) for kind in (layout.compression, "none")]
    _, times, _ = price_layouts(request, rows)
    with_s, without_s = (float(seconds) for seconds in times.step_s)
    saved_share = 1.0 - with_s / without_s
    if saved_share >= WORTH:
        return None
    return Problem(
        where=where,
        what=f"{layout.compression} gradients save {max(saved_share, 0.0):.1%} of the predicted step: "
        f"{format_seconds(with_s)} instead of {format_seconds(without_s)}",
        why="gradients travel behind the backward pass already, and rounding them is not free",
        fix='use compression = "none"',
    )
