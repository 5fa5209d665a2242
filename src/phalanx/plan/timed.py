"""Plan for this machine's own cores, and time the layout that is chosen before the plan is shown.

Cores differ more from each other than a formula knows, and a few seconds of the real step tell. Where the timing makes
another layout look better, that one is timed too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from phalanx.hardware.cpu_steps import CpuStep, cpu_times
from phalanx.hardware.step_probe import measure_first, time_layout
from phalanx.plan.ask import from_job
from phalanx.plan.cpu_step import step_columns
from phalanx.plan.plan import Plan
from phalanx.plan.score import price

ROUNDS = 3  # layouts timed for one plan at most
STEP_S = 0.6  # micro-batches are left out until a step is this short, five of which are timed
LONGEST_S = 12.0  # a step that takes longer with the fewest micro-batches is not timed


def plan_here(
    make: Callable[[], Plan], target: str, *, environ: Mapping[str, str], tell: Callable[[str], None]
) -> Plan:
    """What `make` plans, with this machine measured where `target` means its cores."""
    measure_first(target, environ=environ, tell=tell)
    made = make()
    for _ in range(ROUNDS):
        step = _timed_step(made)
        if step is None:
            break
        if not time_layout(step, made.to_json(), environ=environ, tell=tell, name=made.layout.name):
            break
        made = make()
    return made


def _timed_step(plan: Plan) -> CpuStep | None:
    """The step that stands for the plan's; None where it cannot be timed as it will be trained, or not in seconds."""
    rates = plan.cluster.cpu
    if rates is None or plan.job.model.module or plan.job.parallel.recompute_layers != "auto":
        return None
    ask, _ = from_job(plan.job, plan.cluster)
    columns, _, _ = price(ask, [plan.layout])
    one = step_columns(columns)
    whole = CpuStep(**{name: float(np.ravel(getattr(one, name))[0]) for name in CpuStep.__dataclass_fields__})
    count = int(whole.count)
    least = min(count, 2 * int(whole.pp) * max(1, int(whole.vpp)))  # a pipeline has to fill
    while count > least and float(cpu_times(replace(whole, count=float(count)), rates).step) > STEP_S:
        count = max(least, count // 2)
    step = replace(whole, count=float(count))
    return step if float(cpu_times(step, rates).step) <= LONGEST_S else None
