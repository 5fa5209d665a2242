"""Compare recovery from a failure on a conventional fabric and at the edge, with the same traffic, in either engine.

Conventional is RoCE: one hashed path per plane, go-back-N, and switches that route around a dead part once routing
has converged; without or with PFC. Edge is MRC: packets over many paths, and a sender that leaves a dead path by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.failure_budget import CONVERGE_S, EDGE_RECOVERY_S, REMAP_S
from phalanx.sim.course import Course
from phalanx.sim.episode import Manner, run_episode, timer_s
from phalanx.sim.fabric_failures import UNBROKEN, FabricBreak, denied_of, faults_of, too_late
from phalanx.sim.fabric_links import Floats, links_of
from phalanx.sim.fluid import MRC, Wire, check_fluid_budget, fluid_cost
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import BUDGET
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.simulation_arrays import PacketBudget
from phalanx.sim.packets.transport import MRC as EDGE
from phalanx.sim.packets.transport import ROCE, Roce, in_slots
from phalanx.sim.routes import Routing, spray_routing
from phalanx.sim.simulate import (
    MOST_CONVERGE_S,
    ROWS,
    AnyTransport,
    asked_for,
    check_deny,
    compared_transports,
    course_of,
    expected_cpu_s,
    packet_counts,
    paths_of,
    recovery_of,
    routing_of,
    run_packets,
    spread_of,
    usual_paths,
)
from phalanx.sim.traffic_matrix import Flows
from phalanx.units import format_seconds

# Paths that a sender keeps, and the time after which it tries lost ones again, as in the packet engine.
SENDER: dict[str, Any] = {"least_paths": EDGE.least_paths, "probe_s": EDGE.probe_s}
# After a lost packet a RoCE queue pair sends all following ones again, and waits for its timer if that is lost again.
WAITS: dict[str, Any] = {"go_back": True, "timeout_s": ROCE.timeout_s}
# Factor over the estimate of settled rates: 0.7 to 1.1 was measured with 8,192 hosts; a T1 that stops under 131,072
# took 0.6 of it.
MARGIN = 1.2
PATHS = 256  # of MRC: 128 to 256 (arXiv:2605.04333 section 2.1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecoveryRun:
    """The result of one way of sending, from either engine."""

    name: str
    paths: int
    recovery: str
    # Time from a failure until senders leave paths over it, in the model; infinite: never.
    left_after_s: float
    # Time after which a sender that lost everything tries again; 0: it needs no timer.
    timeout_s: float
    times_s: Floats  # of each flow; infinite where it did not finish
    course: Course
    lost: float  # packets
    touched: int  # connections that lost a packet
    stopped: str = ""
    more: dict[str, object]  # values that only one engine has


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryQuestion:
    """The fabric, traffic and failure of a comparison."""

    fabric: Fabric
    flows: Flows
    traffic: str = "permutation"
    broken: FabricBreak = UNBROKEN
    # Paths at the edge; 0: 256, or fewer where that is too much for the fluid engine.
    paths: int = 0
    converge_s: float = CONVERGE_S
    watched: int | None = None  # a flow whose own rate is reported: the victim of an incast
    seed: int = 0
    budget: PacketBudget = BUDGET
    # Packets: simulate all planes even where they are alike, because the run is compared with one that does.
    each_plane: bool = False


def compare_recoveries(
    question: RecoveryQuestion,
    runs: Callable[[RecoveryQuestion], Iterator[RecoveryRun]],
    kept: list[RecoveryRun] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the values of each way of sending, with the failure compared with the same run without it.

    `kept` collects the runs without failure; those it already has are not simulated again.
    """
    faults_of(question.broken)
    finished_runs = kept if kept is not None else []
    healthy_runs = iter(tuple(finished_runs)) if finished_runs else runs(whole_of(question))
    failed_runs = runs(question) if question.broken.failed else None
    for healthy in healthy_runs:
        if healthy.stopped == "interrupted":
            # The runs before it are finished.
            raise KeyboardInterrupt
        run = next(failed_runs) if failed_runs is not None else healthy
        yield recovery_values(question, run, healthy)
        if run.stopped:
            return
        if healthy not in finished_runs:
            finished_runs.append(healthy)


def whole_of(question: RecoveryQuestion) -> RecoveryQuestion:
    """Return the question without the failure, simulated in the same way."""
    return replace(question, broken=question.broken.healthy, each_plane=bool(question.broken.failed))


def fluid_runs(question: RecoveryQuestion) -> Iterator[RecoveryRun]:
    """Yield RoCE without PFC, RoCE with PFC, and MRC, by the fluid engine: fair rates in stages of time."""
    links = links_of(question.fabric)
    manners = fluid_manners(question)
    for manner in manners:
        check_fluid_budget(links, len(question.flows), manner.routing, question.budget)
    for manner in manners:
        yield fluid_run(question, manner, MRC)


def fluid_cpu_s(question: RecoveryQuestion) -> float:
    """Return the expected CPU seconds of all runs, with and without the failure."""
    links, flows = links_of(question.fabric), len(question.flows)
    once = MARGIN * sum(fluid_cost(links, flows, manner.routing)[0] for manner in fluid_manners(question))
    return 2 * once if question.broken.failed else once


def fluid_run(question: RecoveryQuestion, manner: Manner, wire: Wire) -> RecoveryRun:
    """Simulate one way of sending with the fluid engine."""
    faults, denied = faults_of(question.broken), denied_of(question.broken)
    episode = run_episode(question.fabric, question.flows, manner=manner, faults=faults, denied=denied, wire=wire)
    over_s = float(episode.end_s[-1]) if len(episode.end_s) else 0.0
    return RecoveryRun(
        name=manner.name,
        paths=manner.routing.paths,
        recovery=manner.routing.recovery,
        left_after_s=manner.react_s,
        timeout_s=manner.timeout_s,
        times_s=episode.times_s,
        course=Course(end_s=episode.end_s, bits=episode.bits),
        lost=episode.lost_packets,
        touched=episode.touched,
        stopped=episode.stopped,
        more={
            "engine": "fluid",
            "spread": manner.routing.spread,
            "failed_too_late": too_late(question.broken, faults, over_s) if np.isfinite(episode.times_s).all() else [],
        },
    )


def fluid_manners(question: RecoveryQuestion) -> tuple[Manner, Manner, Manner]:
    """Return the ways of sending: RoCE without and with PFC, and MRC."""
    planes, seed = question.fabric.planes, question.seed
    hashed = Routing(spread="qp", paths=planes, planes="equal", recovery="conventional", seed=seed)
    roce = Manner(name="RoCE, PFC off", routing=hashed, react_s=question.converge_s, **WAITS)
    affordable = max(1, 4 * ROWS // (len(question.flows) * planes)) * planes
    paths = question.paths or max(planes, min(PATHS // planes * planes, affordable))
    edge = Manner(name="MRC, edge", routing=spray_routing(paths, seed=seed), react_s=EDGE_RECOVERY_S, **SENDER)
    return roce, replace(roce, name="RoCE, PFC on", pauses=True), edge


def one_fluid_run(
    question: RecoveryQuestion, *, spread: str, recovery: str, converges: bool, pauses: bool, wire: Wire
) -> dict[str, Any]:
    """Simulate one way of sending, given by the options of the command line, with and without the failure.

    Raises UserError for combinations that cannot be simulated.
    """
    if spread == "all":
        problem = "cables that act as one cannot fail one by one in time"
        raise mistake("--routing all", problem, fix="use --routing adaptive")
    flows, fabric = question.flows, question.fabric
    paths = question.paths or usual_paths(fabric, spread, len(flows))
    routing = routing_of(fabric, spread, paths, recovery, question.seed)
    if converges and routing.recovery != "conventional":
        raise mistake("--converge", f"recovery {routing.recovery} waits for no routing", fix="--recovery conventional")
    if pauses and spread not in ("flow", "qp"):
        problem = "pauses stop a whole queue, which spraying over many paths does not survive"
        raise mistake("--pfc", problem, fix="use --routing qp, or flow")
    if question.broken.denied:
        check_deny(routing.recovery)
    react_s = {"none": math.inf, "conventional": question.converge_s, "edge": EDGE_RECOVERY_S}[routing.recovery]
    by_qp = spread in ("flow", "qp")
    manner = Manner(name=spread, routing=routing, react_s=react_s, pauses=pauses, **(WAITS if by_qp else SENDER))
    check_fluid_budget(links_of(fabric), len(flows), routing, question.budget)
    healthy = fluid_run(replace(question, broken=question.broken.healthy), manner, wire)
    return recovery_values(question, fluid_run(question, manner, wire) if question.broken.failed else healthy, healthy)


def recovery_values(question: RecoveryQuestion, run: RecoveryRun, healthy: RecoveryRun) -> dict[str, Any]:
    """Return the values of a run, compared with the same run without the failure."""
    late = run.more.get("failed_too_late") or ()
    words = zip(question.broken.failed, faults_of(question.broken), strict=True)
    faults = [fault for word, fault in words if word not in cast(Sequence[str], late)]
    at_s = min((fault.at_s for fault in faults), default=math.inf)
    back_s = at_s + _recovered_s(run, faults) if faults else math.inf
    finished_s = run.times_s[np.isfinite(run.times_s)]
    # The largest delay of any flow; infinite where a flow does not finish.
    finishes_healthy = np.isfinite(healthy.times_s)
    return {
        **asked_for(str(run.more["engine"]), question.fabric, question.traffic, question.flows, question.seed),
        "transport": run.name,
        "paths": run.paths,
        "recovery": run.recovery,
        "converge_s": question.converge_s if run.recovery == "conventional" else None,
        "recovered_after_s": _recovered_s(run, faults) if faults else None,
        "failed": list(question.broken.failed),
        "denied": list(question.broken.denied),
        "left": question.broken.left,
        "loss": question.broken.loss,
        "before_gbps": run.course.gbps(0.0, at_s),
        # Only while there is something to send without the failure: the wait for the last flow would hide the effect.
        "during_gbps": run.course.gbps(at_s, min(back_s, float(healthy.times_s.max()))) if faults else None,
        "after_gbps": run.course.gbps(back_s, math.inf) if faults else None,
        "mean_s": float(finished_s.mean()) if len(finished_s) else math.inf,
        "p99_s": float(np.percentile(finished_s, 99)) if len(finished_s) else math.inf,
        "tail_s": float(run.times_s.max()),
        "healthy_tail_s": float(healthy.times_s.max()),
        "healthy_lost": round(healthy.lost),
        "healthy_touched_flows": healthy.touched,
        "later_s": float(np.max(run.times_s[finishes_healthy] - healthy.times_s[finishes_healthy]))
        if finishes_healthy.any()
        else math.nan,
        "finished_flows": len(finished_s),
        "lost": round(run.lost),
        "touched_flows": run.touched,
        **_watched_rates(question, run),
        "bars": run.course.bars(),
        "throughput_over_time": run.course.series(),
        "stopped": run.stopped,
        **run.more,
    }


def _watched_rates(question: RecoveryQuestion, run: RecoveryRun) -> dict[str, float]:
    """Return the mean rate of the watched flow, and its share of the rate the flow would have alone."""
    if question.watched is None:
        return {}
    source, target = (int(side[question.watched]) for side in (question.flows.source, question.flows.target))
    rate = 8.0 * float(question.flows.nbytes[question.watched]) / float(run.times_s[question.watched])
    size, hops = question.flows.nbytes[question.watched : question.watched + 1], np.array([question.fabric.hops + 1])
    late_s = MRC.latency_s(size, hops, question.fabric.port_gbps, np.array([False]))
    alone_s = float((8.0 * MRC.wire_bytes(size) / (question.fabric.nic_gbps * 1e9) + late_s)[0])
    share = alone_s / float(run.times_s[question.watched])
    return {"victim_source": source, "victim_target": target, "victim_gbps": rate / 1e9, "victim_share": share}


def _recovered_s(run: RecoveryRun, faults: Sequence[FabricFault]) -> float:
    """Return the seconds until senders have left the failed paths, or the part is back, and a sender tries again.

    Infinite where that never happens.
    """
    # Routing does not avoid a port that is up, and no sender can avoid all paths.
    stays = [fault.loss > 0 and (run.recovery != "edge" or fault.part == "traffic") for fault in faults]
    lasts = [fault.until_s - fault.at_s for fault in faults]
    works = [last_s if stay else min(run.left_after_s, last_s) for last_s, stay in zip(lasts, stays, strict=True)]
    return max(float(timer_s(0.0, work_s, run.timeout_s)) for work_s in works)


def effects_left_out(broken: FabricBreak, found: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return remarks on effects that these runs leave out and other commands count."""
    faults = [fault for fault in faults_of(broken) if fault.loss == fault.left == 0]
    converge_s = min(
        (values["converge_s"] for values in found if values.get("converge_s") is not None), default=math.inf
    )
    lines = []
    if converge_s < CONVERGE_S and any(fault.until_s - fault.at_s > converge_s for fault in faults):
        lines.append(
            f"routing knows after {format_seconds(converge_s)} here; a conventional fabric takes seconds or tens of "
            f"seconds ({format_seconds(CONVERGE_S)} in other commands), and what waits for it waits so much longer"
        )
    if any(fault.part in ("nic", "t0") for fault in faults) and any(values["recovery"] == "edge" for values in found):
        lines.append(
            "edge: packets leave a dead port at once; moving all queue pairs of a NIC off it takes a few seconds "
            f"({format_seconds(REMAP_S)} in `phalanx sim`) and is not simulated here"
        )
    return tuple(lines)


def checked_converge_s(converge_s: float | None, usual_s: float) -> float:
    """Return the seconds until routing converges; raises UserError for values out of range."""
    if converge_s is None:
        return usual_s
    if not 0 < converge_s <= MOST_CONVERGE_S:
        raise mistake("--converge", f"{converge_s:g} seconds", fix="use 1, or 30")
    return converge_s


# The comparison, packet by packet.


def packet_runs(question: RecoveryQuestion) -> Iterator[RecoveryRun]:
    """Yield the runs of conventional transports and the edge, by the packet engine."""
    faults = faults_of(question.broken)
    for transport in compared_transports(question.fabric, paths=question.paths, converge_s=question.converge_s):
        result = run_packets(
            question.fabric,
            question.flows,
            transport,
            faults,
            denied_of(question.broken),
            seed=question.seed,
            budget=question.budget,
            each_plane=question.each_plane,
        )
        late = too_late(question.broken, faults, result.simulated_s)
        yield _recovery_run(question.fabric, transport, result, late)


def packet_cpu_s(question: RecoveryQuestion) -> float:
    """Return the expected CPU seconds of all runs, with and without the failure."""
    faults = faults_of(question.broken)
    transports = compared_transports(question.fabric, paths=question.paths, converge_s=question.converge_s)
    passes = ((), faults) if faults else ((),)
    alike = not (faults or question.broken.denied or question.each_plane)
    return sum(
        expected_cpu_s(question.fabric, question.flows, transport, faults_of_pass, alike=alike)
        for transport in transports
        for faults_of_pass in passes
    )


def _recovery_run(fabric: Fabric, transport: AnyTransport, found: PacketResult, late: list[str]) -> RecoveryRun:
    return RecoveryRun(
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
            **{key: value for key, value in packet_counts(found).items() if key not in ("lost", "touched_flows")},
        },
    )


def _left_after_s(fabric: Fabric, transport: AnyTransport) -> float:
    """Return the seconds until a failed path is left: the timeout of an MRC sender, or routing's convergence."""
    if not isinstance(transport, Roce):
        slots = in_slots(fabric, transport, planes=fabric.planes)
        return slots.timeout * slots.slot_s
    return transport.converge_s
