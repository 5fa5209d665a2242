"""The comparison of `compare.py`, packet by packet."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from phalanx.network.fabric.types import Fabric
from phalanx.sim.compare import Question, Run
from phalanx.sim.failures import denied_of, faults_of, too_late
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.roce import Roce
from phalanx.sim.packets.transport import in_slots
from phalanx.sim.simulate_packets import counts, course_of, expected_cpu_s, run_packets
from phalanx.sim.transports import AnyTransport, compared, paths_of, recovery_of, spread_of


def packet_runs(question: Question) -> Iterator[Run]:
    """Conventional transports and the edge."""
    faults = faults_of(question.broken)
    for transport in compared(question.fabric, paths=question.paths, converge_s=question.converge_s):
        found = run_packets(
            question.fabric,
            question.flows,
            transport,
            faults,
            denied_of(question.broken),
            seed=question.seed,
            budget=question.budget,
            each_plane=question.each_plane,
        )
        late = too_late(question.broken, faults, found.simulated_s)
        yield _run(question.fabric, transport, found, late)


def packet_cpu_s(question: Question) -> float:
    """Expected of all runs, with and without the failure."""
    faults = faults_of(question.broken)
    transports = compared(question.fabric, paths=question.paths, converge_s=question.converge_s)
    passes = ((), faults) if faults else ((),)
    alike = not (faults or question.broken.denied or question.each_plane)
    return sum(
        expected_cpu_s(question.fabric, question.flows, transport, one, alike=alike)
        for transport in transports
        for one in passes
    )


def _run(fabric: Fabric, transport: AnyTransport, found: PacketResult, late: list[str]) -> Run:
    return Run(
        name=transport.name,
        paths=paths_of(transport),
        recovery=recovery_of(transport),
        left_after_s=_left_after_s(fabric, transport),
        timeout_s=transport.timeout_s if isinstance(transport, Roce) else 0.0,
        times_s=np.where(np.isfinite(found.fct_s), found.fct_s, math.inf),
        course=course_of(found),
        lost=float(found.lost),
        touched=found.touched_by_loss,
        stopped=found.stopped if found.stopped in ("interrupted", "CPU budget") else "",
        more={
            "engine": "packets",
            "spread": spread_of(transport),
            "failed_too_late": late,
            "simulated_s": found.simulated_s,
            "cpu_s": found.cpu_s,
            **{key: value for key, value in counts(found).items() if key not in ("lost", "touched_flows")},
        },
    )


def _left_after_s(fabric: Fabric, transport: AnyTransport) -> float:
    """The clock of an MRC sender, or routing's."""
    if not isinstance(transport, Roce):
        slots = in_slots(fabric, transport, planes=fabric.planes)
        return slots.timeout * slots.slot_s
    return transport.converge_s
