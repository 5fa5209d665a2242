"""A traffic pattern on a fabric packet by packet, in the words of `simulate.py`, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phalanx.errors import mistake
from phalanx.network.fabric.types import Fabric
from phalanx.sim.course import Course
from phalanx.sim.failures import UNBROKEN, Break, denied_of, faults_of, too_late
from phalanx.sim.links import Links
from phalanx.sim.matrices import Flows
from phalanx.sim.packets.budget import LOOK_S, Budget, Cost
from phalanx.sim.packets.build import sketch
from phalanx.sim.packets.faults import Fault
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.roce import Roce
from phalanx.sim.packets.roce_build import roce_sketch
from phalanx.sim.packets.run import BUDGET, REST_S, run
from phalanx.sim.packets.schedule import Schedule
from phalanx.sim.packets.state import MOST_SLOTS
from phalanx.sim.packets.transport import MRC
from phalanx.sim.simulate import asked_for
from phalanx.sim.transports import AnyTransport, converge_of, paths_of, recovery_of, spread_of

SOON = 100  # times the duration of unhindered traffic: a later failure meets nobody


def simulate_packets(
    fabric: Fabric,
    traffic_name: str,
    flows: Flows,
    *,
    transport: AnyTransport = MRC,
    broken: Break = UNBROKEN,
    seed: int = 0,
    budget: Budget = BUDGET,
    schedule: Schedule | None = None,
    each_plane: bool = False,
) -> dict[str, object]:
    """Completion times and losses; refuses before it starts what would exceed the budget."""
    faults = faults_of(broken)
    denied = denied_of(broken)
    found = run_packets(
        fabric, flows, transport, faults, denied, seed=seed, budget=budget, schedule=schedule, each_plane=each_plane
    )
    asked = asked_for("packets", fabric, traffic_name, flows, seed)
    chosen = {"transport": transport.name, "spread": spread_of(transport), "paths": paths_of(transport)}
    recovers = {"recovery": recovery_of(transport), "converge_s": converge_of(transport)}
    parts = {"failed": list(broken.failed), "left": broken.left, "loss": broken.loss, "denied": list(broken.denied)}
    late = {"failed_too_late": too_late(broken, faults, found.simulated_s)}
    course = {"throughput_over_time": course_of(found).series()}
    return {
        **asked,
        **chosen,
        **recovers,
        **parts,
        **late,
        **_times(found),
        "planes": fabric.planes,
        **counts(found),
        **course,
    }


def run_packets(
    fabric: Fabric,
    flows: Flows,
    transport: AnyTransport,
    faults: tuple[Fault, ...],
    denied: tuple[Fault, ...] = (),
    *,
    seed: int = 0,
    budget: Budget = BUDGET,
    schedule: Schedule | None = None,
    each_plane: bool = False,
) -> PacketResult:
    """One run, refused before it starts where even waiting would exceed the budget."""
    _afford_waiting(fabric, flows, transport, faults, budget, alike=not (faults or denied or each_plane))
    return run(
        fabric,
        flows,
        transport=transport,
        faults=faults,
        denied=denied,
        seed=seed,
        budget=budget,
        schedule=schedule,
        each_plane=each_plane,
    )


def course_of(found: PacketResult) -> Course:
    """Payload delivered in each sample."""
    taken_s = np.diff(found.time_s, prepend=0.0)
    return Course(end_s=found.time_s, bits=found.throughput_gbps * 1e9 * taken_s)


def _afford_waiting(
    fabric: Fabric, flows: Flows, transport: AnyTransport, faults: Sequence[Fault], budget: Budget, *, alike: bool
) -> None:
    """Refuse when waiting for routing, or for a part to return, would exceed the budget: every slot costs."""
    links, slot_s, expected = _expected(fabric, flows, transport, alike=alike)
    wait_s = _wait_s(transport, faults, SOON * expected.slots * slot_s)
    slots = wait_s / slot_s
    cpu_s = expected.cpu_s + slots * links.count * LOOK_S
    if slots <= MOST_SLOTS and (cpu_s <= budget.cpu_s or not wait_s):
        return  # without waiting, run() itself refuses with its own numbers
    most_s = min(MOST_SLOTS, budget.cpu_s / (links.count * LOOK_S)) * slot_s
    raise mistake(
        f"packets on {fabric.name}",
        f"{wait_s:g} s until the last failure is routed around or over are {slots:,.0f} slots of "
        f"{slot_s * 1e9:.0f} ns on {links.count:,} links: about {cpu_s:,.0f} s of CPU",
        why=f"the budget is {budget.cpu_s:,.0f} s, and the engine counts to {MOST_SLOTS:,} slots",
        fix=f"let it be below {0.9 * most_s:.2g} s (--converge, @TIME), simulate fewer hosts, raise --cpu, "
        "or use --engine fluid",
    )


def expected_cpu_s(
    fabric: Fabric, flows: Flows, transport: AnyTransport, faults: Sequence[Fault], *, alike: bool
) -> float:
    """Of a run, with what it waits; planes that are `alike` are simulated once."""
    links, slot_s, expected = _expected(fabric, flows, transport, alike=alike)
    return expected.cpu_s + _wait_s(transport, faults, SOON * expected.slots * slot_s) / slot_s * links.count * LOOK_S


def _wait_s(transport: AnyTransport, faults: Sequence[Fault], soon_s: float) -> float:
    """Simulated time in which connections only wait; the edge does not."""
    if recovery_of(transport) == "edge":
        return 0.0
    waits = (_until_s(fault, transport) for fault in faults if fault.left == fault.loss == 0 and fault.at_s <= soon_s)
    return max(waits, default=0.0)


def _expected(fabric: Fabric, flows: Flows, transport: AnyTransport, *, alike: bool) -> tuple[Links, float, Cost]:
    if isinstance(transport, Roce):
        pairs = roce_sketch(fabric, flows, transport)
        return pairs.links, pairs.slots.slot_s, pairs.cost
    plan = sketch(fabric, flows, transport, alike=alike)
    return plan.links, plan.slots.slot_s, plan.cost


def _until_s(fault: Fault, transport: AnyTransport) -> float:
    """When the connections on a dead part go on; where they never do, the engine gives up after a while."""
    wait_s = transport.converge_s if math.isfinite(transport.converge_s) else REST_S
    patience_s = transport.timeout_s if isinstance(transport, Roce) else 0.0
    return min(fault.at_s + wait_s, fault.until_s) + patience_s


def _times(found: PacketResult) -> dict[str, object]:
    done = found.fct_s[np.isfinite(found.fct_s)]
    return {
        "mean_s": float(done.mean()) if len(done) else math.inf,
        "p99_s": float(np.percentile(done, 99)) if len(done) else math.inf,
        "tail_s": found.tail_s,
        "finished_flows": found.finished,
        "simulated_s": found.simulated_s,
        "cpu_s": found.cpu_s,
        "stopped": found.stopped,
    }


def counts(found: PacketResult) -> dict[str, object]:
    """What only packets have."""
    return {
        "packets": found.packets,
        "sent": found.sent,
        "sent_by_plane": list(found.sent_by_plane),
        "delivered": found.delivered,
        "lost": found.lost,
        "trimmed": found.trimmed,
        "marked": found.marked,
        "touched_flows": found.touched,
        "touched_by_loss_flows": found.touched_by_loss,
        "retired_paths": found.retired_paths,
        "denied_paths": found.denied_paths,
        "dropped": found.dropped,
        "paused_share": found.paused_share,
        "planes_simulated": found.planes_simulated,
    }
