"""Simulate a named traffic pattern on a fabric, in either engine, with plain values as result.

`phalanx fabric simulate` prints these values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim import fluid
from phalanx.sim.course import Course
from phalanx.sim.fabric_failures import UNBROKEN, FabricBreak, broken_of, denied_of, faults_of, too_late
from phalanx.sim.fabric_links import Links, links_of
from phalanx.sim.fluid import Completion, Rates, Wire, batch_of, check_fluid_budget, complete_flows, solve_rates
from phalanx.sim.packets.engine_state import MOST_SLOTS
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import BUDGET, REST_S, run_connections
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.roce_run import roce_sketch
from phalanx.sim.packets.simulation_arrays import LOOK_S, PacketBudget, PacketCost, sketch_run
from phalanx.sim.packets.start_times import Schedule
from phalanx.sim.packets.transport import ECMP, HTSIM, MRC, ROCE, ROCE_LOSSY, Dcqcn, Roce, Transport
from phalanx.sim.routes import Recovery, Routing
from phalanx.sim.traffic_matrix import Flows, named_traffic

ROUTINGS = ("flow", "qp", "oblivious", "adaptive", "all")
RECOVERIES = ("none", "conventional", "edge")
MOST_CONVERGE_S = 86400.0  # a longer time than a day is not a convergence
WIRES: dict[str, Wire] = {"mrc": fluid.MRC, "htsim": fluid.HTSIM, "ideal": fluid.IDEAL}
ROWS = 1 << 20  # sub-flows that are solved in about two seconds


def simulate(
    fabric: Fabric,
    traffic_name: str,
    *,
    nbytes: float = 2e6,
    spread: str = "all",
    paths: int = 0,
    failed: Sequence[str] = (),
    left: float = 0.0,
    denied: Sequence[str] = (),
    recovery: str = "",
    wire: str = "mrc",
    seed: int = 0,
    flows: Flows | None = None,
    watched: int | None = None,
    budget: PacketBudget = BUDGET,
) -> dict[str, object]:
    """Return rates and completion times by the fluid engine.

    `paths` 0 means one per flow, 8 QPs, or as many as a million rows allow. `flows`, when given, are the traffic, and
    `traffic_name` is only their name.
    """
    flows = named_traffic(traffic_name, fabric, nbytes, seed=seed) if flows is None else flows
    routing = routing_of(fabric, spread, paths or usual_paths(fabric, spread, len(flows)), recovery, seed)
    overheads = WIRES[check_choice("--wire", wire, tuple(WIRES))]
    links = links_of(fabric)
    check_fluid_budget(links, len(flows), routing, budget)
    if denied:
        check_deny(routing.recovery)
    broken = broken_of(links, FabricBreak(failed=tuple(failed), left=left, denied=tuple(denied)))
    rates = solve_rates(fabric, flows, routing=routing, broken=broken)
    batch = batch_of(len(flows) * routing.paths)
    completion = complete_flows(fabric, flows, routing=routing, broken=broken, wire=overheads, batch=batch)
    request = asked_for("fluid", fabric, traffic_name, flows, seed)
    chosen = {"spread": spread, "paths": routing.paths, "recovery": routing.recovery, "wire": wire}
    failures = {"failed": list(failed), "left": left, "denied": list(denied)}
    victim = {} if watched is None else {"victim_rate": float(rates.share[watched])}
    return {**request, **chosen, **failures, **_rate_summary(rates), **victim, **_time_summary(completion)}


def asked_for(engine: str, fabric: Fabric, traffic_name: str, flows: Flows, seed: int) -> dict[str, object]:
    """Return the first values of every result; `bytes_per_flow` is the mean."""
    total = float(flows.nbytes.sum())
    sizes = {"flows": len(flows), "bytes_per_flow": total / len(flows), "bytes_total": total}
    return {"engine": engine, "fabric": fabric.name, "traffic": traffic_name, **sizes, "seed": seed}


def usual_paths(fabric: Fabric, spread: str, flows: int) -> int:
    """Return the default paths per flow: equally many in each plane, 16 at most, and about a million rows in total."""
    if spread == "qp":
        return 8  # "little gain past 8 QPs" (arXiv:2605.04333 section 5.2.7)
    if spread == "all":
        return fabric.planes
    per_plane = max(1, min(16, ROWS // (flows * fabric.planes)))
    return 1 if spread == "flow" else per_plane * fabric.planes


def routing_of(fabric: Fabric, spread: str, paths: int, recovery: str, seed: int) -> Routing:
    """Return a routing from its option values; raises UserError."""
    check_choice("--routing", spread, ROUTINGS)
    if spread == "all" and (paths != fabric.planes or recovery not in ("", "edge")):
        raise mistake(
            "--routing all",
            f"--paths {paths} or --recovery {recovery or 'edge'} has no meaning when every working path is used",
            fix="leave both out, or use --routing adaptive",
        )
    by_packet = spread in ("oblivious", "adaptive", "all")
    chosen = check_choice("--recovery", recovery, RECOVERIES) if recovery else "edge" if by_packet else "conventional"
    return Routing(
        spread=spread,  # type: ignore[arg-type]  # check_choice() has checked it
        paths=paths,
        planes="equal" if by_packet else "hash",
        recovery=cast(Recovery, chosen),
        seed=seed,
    )


def check_deny(recovery: str) -> None:
    """Raise UserError if no sender or switch would choose other paths than the denied ones."""
    if recovery == "none":
        raise mistake("--deny", "with --recovery none nobody leaves a path", fix="use --recovery conventional or edge")


def check_choice(option: str, word: str, choices: tuple[str, ...]) -> str:
    """Return the word if it is one of the choices; raises UserError with the nearest one."""
    if word not in choices:
        guess = nearest(word, choices)
        fix = f"use {guess}" if guess else f"use {', '.join(choices)}"
        raise mistake(option, f'there is no "{word[:40]}"', fix=fix)
    return word


def _rate_summary(rates: Rates) -> dict[str, object]:
    low, middle = np.percentile(rates.share, [1, 50])
    return {
        "rate_mean": rates.mean,
        "rate_slowest": rates.slowest,
        "rate_p1": float(low),
        "rate_median": float(middle),
        "stalled_flows": rates.stalled,
        "full_links": int((rates.load >= 0.999).sum()),
        "idle_links": int((rates.load <= 0).sum()),
    }


def _time_summary(done: Completion) -> dict[str, object]:
    finite = done.times_s[np.isfinite(done.times_s)]
    return {
        "mean_s": done.mean_s,
        "p99_s": float(np.percentile(finite, 99)) if len(finite) else float("inf"),
        "tail_s": done.tail_s,
        "finished_flows": len(finite),
        "rounds": done.rounds,
        "stopped": done.stopped,
    }


# Transports of the packet engine by name.


AnyTransport = Transport | Roce
TRANSPORTS: dict[str, AnyTransport] = {"mrc": MRC, "ecmp": ECMP, "roce": ROCE, "htsim": HTSIM}
# A second of a small fabric is a minute of CPU, because every slot costs. Ten milliseconds show the same stall; each
# further second of convergence (CONVERGE_S of failure_budget.py is ten) lengthens it by a second.
SHORT_CONVERGE_S = 0.01
QPS = 8  # "little gain past 8 QPs" (arXiv:2605.04333 section 5.2.7)


def transport_of(
    name: str = "mrc",
    *,
    routing: str = "",
    paths: int = 0,
    recovery: str = "",
    converge_s: float | None = None,
    pfc: bool | None = None,
    dcqcn: bool | None = None,
) -> AnyTransport:
    """Return a transport from its option values; empty ones keep the transport's own settings. Raises UserError."""
    transport = TRANSPORTS[check_choice("--transport", name, tuple(TRANSPORTS))]
    if routing == "flow" and paths > 1:
        raise mistake("--paths", f"{paths} paths, but --routing flow is one", fix="use --routing qp")
    if isinstance(transport, Roce):
        transport = _with_roce(transport, routing, paths, pfc, dcqcn)
    elif pfc is not None or dcqcn is not None:
        option, feature = ("--pfc", "drops and trims packets") if pfc is not None else ("--dcqcn", "has a window")
        raise mistake(option, f"{transport.name} {feature}", fix="add --transport roce")
    else:
        transport = _with_routing(transport, routing)
        transport = replace(transport, paths=paths) if paths else transport
    return _with_convergence(_with_recovery(transport, recovery, converge_s), converge_s)


def compared_transports(
    fabric: Fabric, *, paths: int = 0, converge_s: float = SHORT_CONVERGE_S
) -> tuple[Roce, Roce, Transport]:
    """Return the compared transports: RoCE without and with PFC, and recovery at the edge.

    RoCE has a queue pair on each plane and routing that converges. With a single path it could use one plane only,
    and the difference would come from planes, not from recovery.
    """
    lossy = replace(ROCE_LOSSY, name="RoCE, PFC off", qps=fabric.planes, converge_s=converge_s)
    lossless = replace(ROCE, name="RoCE, PFC on", qps=fabric.planes, converge_s=converge_s)
    return lossy, lossless, replace(MRC, name="MRC, edge", paths=paths or MRC.paths)


def paths_of(transport: AnyTransport) -> int:
    """Return the paths per connection."""
    return transport.qps if isinstance(transport, Roce) else transport.paths


def spread_of(transport: AnyTransport) -> str:
    """Return how packets are spread over paths, as an option value."""
    return "qp" if isinstance(transport, Roce) else transport.spray


def recovery_of(transport: AnyTransport) -> str:
    """Return the kind of recovery, in the words of the fluid engine."""
    if not isinstance(transport, Roce) and transport.recovery == "edge":
        return "edge"
    return "conventional" if math.isfinite(transport.converge_s) else "none"


def converge_of(transport: AnyTransport) -> float | None:
    """Return the seconds until routing converges; None where the transport does not wait for it."""
    return transport.converge_s if recovery_of(transport) == "conventional" else None


def _with_roce(made: Roce, routing: str, paths: int, pfc: bool | None, dcqcn: bool | None) -> Roce:
    """Apply routing, paths, PFC and DCQCN options to a RoCE transport; raises UserError."""
    if routing not in ("", "flow", "qp"):
        check_choice("--routing", routing, ROUTINGS)
        raise mistake("--routing", f"RoCE does not send by {routing}: a queue pair has one path", fix="use flow or qp")
    qps = paths or (1 if routing == "flow" else QPS if routing == "qp" else made.qps)
    rate = made.dcqcn if dcqcn is None else Dcqcn() if dcqcn else None
    paused = made.pfc if pfc is None else pfc
    features = [word for word, is_on in (("PFC", paused), ("DCQCN", rate is not None)) if is_on]
    name = f"RoCE, {' and '.join(features)}" if features else "RoCE"
    return replace(made, name=name, qps=qps, pfc=paused, dcqcn=rate)


def _with_routing(transport: Transport, routing: str) -> Transport:
    """Apply a routing of the fluid engine as paths and spraying: `qp` means 8 paths in turn here."""
    if not routing:
        return transport
    word = check_choice("--routing", routing, ROUTINGS)
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


def _with_recovery(made: AnyTransport, recovery: str, converge_s: float | None) -> AnyTransport:
    """Apply the recovery option to a transport; raises UserError for impossible combinations."""
    if not recovery:
        return made
    chosen = check_choice("--recovery", recovery, RECOVERIES)
    if isinstance(made, Roce):
        if chosen == "edge":
            problem = "a queue pair of RoCE has one path and cannot leave it"
            raise mistake("--recovery", problem, fix="use --recovery conventional, or --transport mrc")
    else:
        made = replace(made, recovery="edge" if chosen == "edge" else "routing")
    if chosen == "none":
        if converge_s is not None:
            raise mistake("--converge", "nothing converges with --recovery none", fix="leave one of them out")
        return replace(made, converge_s=math.inf)
    return made


def _with_convergence(made: AnyTransport, converge_s: float | None) -> AnyTransport:
    if converge_s is None:
        return replace(made, converge_s=SHORT_CONVERGE_S) if recovery_of(made) == "conventional" else made
    if recovery_of(made) == "edge":
        raise mistake("--converge", "recovery at the edge waits for no routing", fix="add --recovery conventional")
    if not 0 < converge_s <= MOST_CONVERGE_S:
        raise mistake("--converge", f"{converge_s:g} seconds", fix="use 1, or 0.1")
    return replace(made, converge_s=converge_s)


# The packet engine, with the same option values and results.


# Multiple of the duration of unhindered traffic after which a failure meets no connection.
SOON = 100


def simulate_packets(
    fabric: Fabric,
    traffic_name: str,
    flows: Flows,
    *,
    transport: AnyTransport = MRC,
    broken: FabricBreak = UNBROKEN,
    seed: int = 0,
    budget: PacketBudget = BUDGET,
    schedule: Schedule | None = None,
    each_plane: bool = False,
) -> dict[str, object]:
    """Return completion times and losses; raises UserError before the start where the budget would be exceeded."""
    faults = faults_of(broken)
    denied = denied_of(broken)
    result = run_packets(
        fabric, flows, transport, faults, denied, seed=seed, budget=budget, schedule=schedule, each_plane=each_plane
    )
    request = asked_for("packets", fabric, traffic_name, flows, seed)
    chosen = {"transport": transport.name, "spread": spread_of(transport), "paths": paths_of(transport)}
    recovery = {"recovery": recovery_of(transport), "converge_s": converge_of(transport)}
    failures = {"failed": list(broken.failed), "left": broken.left, "loss": broken.loss, "denied": list(broken.denied)}
    late = {"failed_too_late": too_late(broken, faults, result.simulated_s)}
    course = {"throughput_over_time": course_of(result).series()}
    return {
        **request,
        **chosen,
        **recovery,
        **failures,
        **late,
        **_packet_times(result),
        "planes": fabric.planes,
        **packet_counts(result),
        **course,
    }


def run_packets(
    fabric: Fabric,
    flows: Flows,
    transport: AnyTransport,
    faults: tuple[FabricFault, ...],
    denied: tuple[FabricFault, ...] = (),
    *,
    seed: int = 0,
    budget: PacketBudget = BUDGET,
    schedule: Schedule | None = None,
    each_plane: bool = False,
) -> PacketResult:
    """Run the packet engine; raises UserError before the start where even waiting would exceed the budget."""
    _afford_waiting(fabric, flows, transport, faults, budget, alike=not (faults or denied or each_plane))
    return run_connections(
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
    """Return the payload delivered in each sample."""
    lengths_s = np.diff(found.time_s, prepend=0.0)
    return Course(end_s=found.time_s, bits=found.throughput_gbps * 1e9 * lengths_s)


def _afford_waiting(
    fabric: Fabric,
    flows: Flows,
    transport: AnyTransport,
    faults: Sequence[FabricFault],
    budget: PacketBudget,
    *,
    alike: bool,
) -> None:
    """Raise UserError if waiting for routing, or for a part to return, would exceed the budget: every slot costs."""
    links, slot_s, expected = _expected_cost(fabric, flows, transport, alike=alike)
    wait_s = _wait_s(transport, faults, SOON * expected.slots * slot_s)
    slots = wait_s / slot_s
    cpu_s = expected.cpu_s + slots * links.count * LOOK_S
    if slots <= MOST_SLOTS and (cpu_s <= budget.cpu_s or not wait_s):
        # Without waiting, the engine checks the budget itself with its own numbers.
        return
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
    fabric: Fabric, flows: Flows, transport: AnyTransport, faults: Sequence[FabricFault], *, alike: bool
) -> float:
    """Return the CPU seconds of a run, with its waiting time; planes that are `alike` are simulated once."""
    links, slot_s, expected = _expected_cost(fabric, flows, transport, alike=alike)
    return expected.cpu_s + _wait_s(transport, faults, SOON * expected.slots * slot_s) / slot_s * links.count * LOOK_S


def _wait_s(transport: AnyTransport, faults: Sequence[FabricFault], soon_s: float) -> float:
    """Return the simulated time in which connections only wait; with recovery at the edge they do not."""
    if recovery_of(transport) == "edge":
        return 0.0
    waits = (_until_s(fault, transport) for fault in faults if fault.left == fault.loss == 0 and fault.at_s <= soon_s)
    return max(waits, default=0.0)


def _expected_cost(
    fabric: Fabric, flows: Flows, transport: AnyTransport, *, alike: bool
) -> tuple[Links, float, PacketCost]:
    if isinstance(transport, Roce):
        pairs = roce_sketch(fabric, flows, transport)
        return pairs.links, pairs.slots.slot_s, pairs.cost
    plan = sketch_run(fabric, flows, transport, alike=alike)
    return plan.links, plan.slots.slot_s, plan.cost


def _until_s(fault: FabricFault, transport: AnyTransport) -> float:
    """Return when the connections on a dead part continue; where they never do, the engine stops after REST_S."""
    wait_s = transport.converge_s if math.isfinite(transport.converge_s) else REST_S
    patience_s = transport.timeout_s if isinstance(transport, Roce) else 0.0
    return min(fault.at_s + wait_s, fault.until_s) + patience_s


def _packet_times(found: PacketResult) -> dict[str, object]:
    finished_s = found.fct_s[np.isfinite(found.fct_s)]
    return {
        "mean_s": float(finished_s.mean()) if len(finished_s) else math.inf,
        "p99_s": float(np.percentile(finished_s, 99)) if len(finished_s) else math.inf,
        "tail_s": found.tail_s,
        "finished_flows": found.finished,
        "simulated_s": found.simulated_s,
        "cpu_s": found.cpu_s,
        "stopped": found.stopped,
    }


def packet_counts(found: PacketResult) -> dict[str, object]:
    """Return the values that only the packet engine has."""
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
