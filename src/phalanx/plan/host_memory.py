"""Whether the hosts hold what a layout keeps in their memory instead of the devices'."""

from __future__ import annotations

import numpy as np

from phalanx.errors import Problem
from phalanx.job.parameter_counts import count_parameters
from phalanx.plan.request import PlanRequest
from phalanx.units import format_bytes

GRADIENT_BYTES = 4.0  # of a parameter: fp32, in buffers that the device copies into
SLACK = 1.2  # for everything else that runs on a host


def offload_problem(request: PlanRequest, offload: str) -> Problem | None:
    """Why the hosts cannot hold the state of the optimizer, or also the parameters; None where they can.

    The master copy of parameters is part of the optimizer's bytes.
    """
    if offload not in ("optimizer", "parameters"):
        return None
    per_parameter = float(np.max(request.memory.optimizer_bytes)) + GRADIENT_BYTES
    need = SLACK * count_parameters(request.model).total * per_parameter
    have = request.cluster.host_memory_bytes * request.cluster.hosts
    if need <= have:
        return None
    return Problem(
        where=request.cluster.name,
        what=f"{offload} in host memory: about {format_bytes(need)} of state and gradients, and the hosts have "
        f"{format_bytes(have)}",
        fix="use more hosts, or hosts with more memory (host_memory_gib of a cluster file)",
    )
