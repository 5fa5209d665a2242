"""Check that the hosts can hold what a layout keeps in their memory instead of the devices'."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import Problem
from phalanx.plan.case_columns import build_cases, layout_columns
from phalanx.plan.cases import OFFLOAD, Cases, Floats
from phalanx.plan.compute import FULL
from phalanx.plan.layout import Layout
from phalanx.plan.memory import in_flight, layer_activations
from phalanx.plan.memory_profile import MemoryProfile, offloads_activations
from phalanx.plan.optimizer import owned_weights
from phalanx.plan.request import PlanRequest
from phalanx.plan.weights import rank_weights
from phalanx.units import format_bytes

GRADIENT_BYTES = 4.0  # per parameter: fp32, in buffers that the device copies into
SLACK = 1.2  # for everything else that runs on a host
STATE_KINDS = (OFFLOAD.index("optimizer"), OFFLOAD.index("parameters"))
HELD = {
    "optimizer": "optimizer in host memory: about {} of state and gradients",
    "parameters": "parameters in host memory: about {} of state and gradients",
    "activations": "activations in host memory: about {} of a step",
}


def host_bytes(c: Cases, f: MemoryProfile) -> Floats:
    """Return the bytes that a device keeps in host memory, as the mean over the stages of a pipeline.

    The master copy of parameters is part of the optimizer's bytes. State that ZeRO does not shard is held by every
    rank.
    """
    layers = c.layers / c.pp
    state = owned_weights(c, rank_weights(c, stage_layers=layers)) * (f.optimizer_bytes + GRADIENT_BYTES)
    kept_bytes, checkpoint_bytes = layer_activations(c, f)
    activations = in_flight(c) * layers * np.where(c.recompute == FULL, checkpoint_bytes, kept_bytes)
    state_held = np.where(np.isin(c.offload, STATE_KINDS), state, 0.0)
    return np.where(offloads_activations(c), activations, state_held)


def hosts_hold(request: PlanRequest, c: Cases) -> NDArray[np.bool_]:
    """Return True where the hosts have room for what the devices keep there."""
    available_bytes = request.cluster.host_memory_bytes * request.cluster.hosts / request.cluster.devices
    return host_bytes(c, request.memory) * SLACK <= available_bytes


def offload_problem(request: PlanRequest, layout: Layout) -> Problem | None:
    """Return the problem of hosts that cannot hold what a layout keeps there; None if they can."""
    if layout.offload == "none":
        return None
    cases = build_cases(request, layout_columns([layout]))
    if bool(np.all(hosts_hold(request, cases))):
        return None
    needed = SLACK * float(np.max(host_bytes(cases, request.memory))) * layout.devices
    available = request.cluster.host_memory_bytes * request.cluster.hosts
    return Problem(
        where=request.cluster.name,
        what=f"{HELD[layout.offload].format(format_bytes(needed))}, and the hosts have {format_bytes(available)}",
        fix="use more hosts, or hosts with more memory (host_memory_gib of a cluster file)",
    )
