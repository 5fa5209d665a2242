"""A traffic pattern on a fabric packet by packet, in the words of `simulate.py`, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phalanx.errors import mistake
from phalanx.network.fabric.types import Fabric
from phalanx.sim.course import Course
from phalanx.sim.failures import UNBROKEN, Break, faults_of
from phalanx.sim.matrices import Flows
from phalanx.sim.packets.budget import LOOK_S, Budget
from phalanx.sim.packets.build import sketch
from phalanx.sim.packets.faults import Fault
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.run import BUDGET, REST_S, run
from phalanx.sim.packets.schedule import Schedule
from phalanx.sim.packets.state import MOST_SLOTS
from phalanx.sim.packets.transport import ECMP, HTSIM, MRC, Transport
from phalanx.sim.simulate import RECOVERIES, ROUTINGS, asked_for, choice

TRANSPORTS: dict[str, Transport] = {"mrc": MRC, "ecmp": ECMP, "htsim": HTSIM}
SOON = 100  # times the duration of unhindered traffic: a later failure meets nobody
QPS = 8  # "little gain past 8 QPs" (arXiv:2605.04333 section 5.2.7)


def simulate_packets(
    fabric: Fabric,
    traffic_name: str,
    flows: Flows,
    *,
    transport: Transport = MRC,
    broken: Break = UNBROKEN,
    seed: int = 0,
    budget: Budget = BUDGET,
    schedule: Schedule | None = None,
) -> dict[str, object]:
    """Completion times and losses; refuses before it starts what would exceed the budget."""
    faults = faults_of(broken)
    found = run_packets(fabric, flows, transport, faults, seed=seed, budget=budget, schedule=schedule)
    asked = asked_for("packets", fabric, traffic_name, flows, seed)
    chosen = {"transport": transport.name, "spread": transport.spray, "paths": transport.paths}
    recovers = {"recovery": recovery_of(transport), "converge_s": _converge_s(transport)}
    parts = {"failed": list(broken.failed), "left": broken.left, "loss": broken.loss}
    late = {"failed_too_late": too_late(broken, faults, found.simulated_s)}
    course = {"throughput_over_time": course_of(found).series()}
    return {**asked, **chosen, **recovers, **parts, **late, **_times(found), **counts(found), **course}


def run_packets(
    fabric: Fabric,
    flows: Flows,
    transport: Transport,
    faults: tuple[Fault, ...],
    *,
    seed: int = 0,
    budget: Budget = BUDGET,
    schedule: Schedule | None = None,
) -> PacketResult:
    """One run, refused before it starts where even waiting would exceed the budget."""
    _afford_waiting(fabric, flows, transport, faults, budget)
    return run(fabric, flows, transport=transport, faults=faults, seed=seed, budget=budget, schedule=schedule)


def course_of(found: PacketResult) -> Course:
    """Payload delivered in each sample."""
    taken_s = np.diff(found.time_s, prepend=0.0)
    return Course(end_s=found.time_s, bits=found.throughput_gbps * 1e9 * taken_s)


def too_late(broken: Break, faults: Sequence[Fault], simulated_s: float) -> list[str]:
    """Failures that came after the last packet."""
    return [text for text, fault in zip(broken.failed, faults, strict=True) if fault.at_s > simulated_s]


def transport_of(
    name: str = "mrc", *, routing: str = "", paths: int = 0, recovery: str = "", converge_s: float | None = None
) -> Transport:
    """A transport by its words; empty ones are its own settings."""
    made = TRANSPORTS[choice("--transport", name, tuple(TRANSPORTS))]
    made = _spread(made, routing)
    if paths:
        if routing == "flow" and paths != 1:
            raise mistake("--paths", f"{paths} paths, but --routing flow is one", fix="use --routing qp")
        made = replace(made, paths=paths)
    if recovery:
        chosen = choice("--recovery", recovery, RECOVERIES)
        made = replace(made, recovery="edge" if chosen == "edge" else "routing")
        if chosen == "none":
            if converge_s is not None:
                raise mistake("--converge", "nothing converges with --recovery none", fix="leave one of them out")
            return replace(made, converge_s=math.inf)
    if converge_s is None:
        return made
    if made.recovery == "edge":
        raise mistake("--converge", "recovery at the edge waits for no routing", fix="add --recovery conventional")
    if not 0 < converge_s < math.inf:
        raise mistake("--converge", f"{converge_s:g} seconds", fix="use 1, or 0.1")
    return replace(made, converge_s=converge_s)


def compared(fabric: Fabric, *, paths: int = 0, converge_s: float | None = None) -> tuple[Transport, Transport]:
    """A conventional transport, one hashed path per plane and routing that converges, and recovery at the edge.

    One path in all could use one plane only, and the difference would be that of planes, not of recovery.
    """
    return transport_of("ecmp", paths=fabric.planes, converge_s=converge_s), transport_of("mrc", paths=paths)


def _spread(transport: Transport, routing: str) -> Transport:
    """A routing of the fluid engine as paths and spraying: `qp` is here 8 paths taken in turn."""
    if not routing:
        return transport
    word = choice("--routing", routing, ROUTINGS)
    if word == "flow":
        return replace(transport, paths=1, spray="oblivious")
    if word == "qp":
        return replace(transport, paths=QPS, spray="oblivious")
    if word == "oblivious":
        return replace(transport, spray="oblivious")
    if word == "adaptive":
        return replace(transport, spray="skip" if transport.spray == "oblivious" else transport.spray)
    raise mistake(
        "--routing all",
        "every path at once is an idea of the fluid engine: packets take one path each",
        fix="use --routing adaptive with --paths 256",
    )


def _afford_waiting(
    fabric: Fabric, flows: Flows, transport: Transport, faults: Sequence[Fault], budget: Budget
) -> None:
    """Refuse when waiting for routing, or for a part to return, would exceed the budget: every slot costs."""
    if transport.recovery == "edge":
        return  # it does not wait
    plan = sketch(fabric, flows, transport, alike=not faults)
    soon_s = SOON * plan.cost.slots * plan.slots.slot_s
    waits = (_until_s(fault, transport) for fault in faults if fault.left == fault.loss == 0 and fault.at_s <= soon_s)
    wait_s = max(waits, default=0.0)
    slots = wait_s / plan.slots.slot_s
    cpu_s = plan.cost.cpu_s + slots * plan.links.count * LOOK_S
    if slots <= MOST_SLOTS and (cpu_s <= budget.cpu_s or not wait_s):
        return  # without waiting, run() itself refuses with its own numbers
    most_s = min(MOST_SLOTS, budget.cpu_s / (plan.links.count * LOOK_S)) * plan.slots.slot_s
    raise mistake(
        f"packets on {fabric.name}",
        f"{wait_s:g} s until the last failure is routed around or over are {slots:,.0f} slots of "
        f"{plan.slots.slot_s * 1e9:.0f} ns on {plan.links.count:,} links: about {cpu_s:,.0f} s of CPU",
        why=f"the budget is {budget.cpu_s:,.0f} s, and the engine counts to {MOST_SLOTS:,} slots",
        fix=f"let it be below {0.9 * most_s:.2g} s (--converge, @TIME), simulate fewer hosts, or raise --cpu",
    )


def _until_s(fault: Fault, transport: Transport) -> float:
    """When the connections on a dead part go on; where they never do, the engine gives up after a while."""
    wait_s = transport.converge_s if math.isfinite(transport.converge_s) else REST_S
    return min(fault.at_s + wait_s, fault.until_s)


def recovery_of(transport: Transport) -> str:
    """Who leaves dead paths, in the words of the fluid engine."""
    if transport.recovery == "edge":
        return "edge"
    return "conventional" if math.isfinite(transport.converge_s) else "none"


def _converge_s(transport: Transport) -> float | None:
    return transport.converge_s if recovery_of(transport) == "conventional" else None


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
        "delivered": found.delivered,
        "lost": found.lost,
        "trimmed": found.trimmed,
        "marked": found.marked,
        "touched_flows": found.touched,
        "touched_by_loss_flows": found.touched_by_loss,
        "retired_paths": found.retired_paths,
        "planes_simulated": found.planes_simulated,
    }
