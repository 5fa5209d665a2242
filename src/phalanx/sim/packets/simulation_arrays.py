"""Allocate the arrays of a packet simulation from a fabric, connections and a transport, and check its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import Links, links_of
from phalanx.sim.packets.engine_state import (
    ACTIVE,
    BASE,
    LAST_ADD,
    LAST_CUT,
    MOST,
    MOST_FLOWS,
    MOST_SLOTS,
    PLANE,
    RANDOM,
    WINDOW,
    Calendar,
    Ints,
    Ints32,
    Knobs,
    Net,
    Shape,
    Traffic,
)
from phalanx.sim.packets.start_times import Schedule
from phalanx.sim.packets.transport import Slots, Transport, in_slots
from phalanx.sim.traffic_matrix import Flows

TOTALS = 10
SMOOTHING, FRESH_PACKETS = 0.0125, 8  # uet-htsim, public forks
# Paths per plane above which planes behave alike: 128 over 8 is MRC's smallest set. With few, a connection is as slow
# as its slowest plane.
LEAST_PATHS = 16
ROW = 16  # counters of a connection: one cache line
BYTES_PER_FLOW = 8 * 16 + 4 * ROW + 4 * 8  # window, counters, and the small columns
BYTES_PER_EVENT = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketWorld:
    """All data that the loop runs on."""

    fabric: Fabric  # of the simulated planes
    links: Links
    slots: Slots
    shape: Shape
    knobs: Knobs
    net: Net
    traffic: Traffic
    calendar: Calendar
    totals: Ints
    copies: int  # number of planes that each simulated plane represents


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """Sizes and cost of a simulation, computed before any large array is allocated."""

    fabric: Fabric
    links: Links
    slots: Slots
    packets: Ints
    hops: Ints32  # links of each connection's path
    paths: int
    copies: int
    pool: int  # events that may be pending at once
    cost: PacketCost


def sketch_run(fabric: Fabric, flows: Flows, transport: Transport, *, alike: bool, last_start_s: float = 0.0) -> Sketch:
    """Compute sizes and expected cost.

    `alike` planes are simulated once, as each carries an equal share of every connection.
    """
    # A transfer of less than a packet per plane would become one packet on each.
    fills_planes = flows.nbytes.min() > (fabric.planes - 1) * transport.payload_bytes
    copies = fabric.planes if alike and fills_planes and transport.paths >= LEAST_PATHS * fabric.planes else 1
    simulated = replace(fabric, planes=fabric.planes // copies, nic_gbps=fabric.nic_gbps / copies)
    links = links_of(simulated)
    _check_hosts(fabric, flows)
    slots = in_slots(simulated, transport, planes=simulated.planes)
    packets = np.ceil(np.minimum(flows.nbytes / transport.payload_bytes / copies, 2.0**62)).astype(np.int64)
    source_t0, target_t0 = links.host_t0(flows.source), links.host_t0(flows.target)
    same_pod = source_t0 // links.t0_per_pod == target_t0 // links.t0_per_pod
    hops = np.where(source_t0 == target_t0, 2, np.where(same_pod, 4, 6)).astype(np.int32)
    paths = max(1, transport.paths // copies)
    pool = int(min(len(flows) * math.ceil(slots.window), packets.sum(dtype=np.float64)) + 1024)
    return Sketch(
        fabric=simulated,
        links=links,
        slots=slots,
        packets=packets,
        hops=hops,
        paths=paths,
        copies=copies,
        pool=pool,
        cost=_packet_cost(links, flows, slots, packets, hops, paths, pool, last=round(last_start_s / slots.slot_s)),
    )


def _packet_cost(
    links: Links, flows: Flows, slots: Slots, packets: Ints, hops: Ints32, paths: int, pool: int, *, last: int
) -> PacketCost:
    per_host = np.bincount(flows.source, weights=packets, minlength=links.fabric.hosts)
    into_host = np.bincount(flows.target, weights=packets, minlength=links.fabric.hosts)
    busiest = max(per_host.max(), into_host.max()) / links.fabric.planes
    memory = links.count * (8 * slots.queue + 8 * slots.wire + 30) + len(flows) * (BYTES_PER_FLOW + paths)
    return packet_cost(
        packets=int(packets.sum(dtype=np.float64)),
        hops=int((packets * hops.astype(np.float64)).sum()),
        slots=int(busiest + slots.rtt) + last,
        links=links.count,
        memory_bytes=memory + pool * BYTES_PER_EVENT,
    )


def build_world(plan: Sketch, flows: Flows, transport: Transport, schedule: Schedule, *, seed: int) -> PacketWorld:
    """Allocate and fill the arrays."""
    links, slots = plan.links, plan.slots
    shape = _network_shape(links, slots)
    totals = np.zeros(TOTALS, dtype=np.int64)
    # The generator must not start at 0; the odd constant spreads neighbouring seeds.
    totals[RANDOM] = (seed * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1) & 0x7FFFFFFFFFFFFFFF or 1
    totals[ACTIVE] = len(flows)
    return PacketWorld(
        fabric=plan.fabric,
        links=links,
        slots=slots,
        shape=shape,
        knobs=_transport_knobs(plan, transport, seed),
        net=_network_arrays(links, shape),
        traffic=_traffic_arrays(plan, flows, schedule, seed, kept=_kept_paths(plan, transport)),
        calendar=calendar_of(shape.ring, plan.pool),
        totals=totals,
        copies=plan.copies,
    )


def _network_shape(links: Links, slots: Slots) -> Shape:
    f = links.fabric
    longest = max((f.hops + 2) * slots.back * 2 + slots.host, slots.timeout << 4) + 8
    return Shape(
        hosts=f.hosts,
        block=f.t0_down * f.rails,
        planes=f.planes,
        per_plane=links.per_plane,
        t0=f.t0,
        t0_up=f.t0_up if f.tiers > 1 else 0,
        t0_per_pod=links.t0_per_pod,
        t1_per_pod=links.t1_per_pod,
        t1_up=links.t1_up,
        wire=slots.wire,
        back=slots.back,
        host_slots=slots.host,
        queue=slots.queue,
        ring=longest,
        timeout=slots.timeout,
    )


def _transport_knobs(plan: Sketch, transport: Transport, seed: int) -> Knobs:
    """Convert the transport's settings to slots and packets."""
    slots, port_gbps = plan.slots, plan.fabric.port_gbps
    # uet-htsim, public forks: windows scale with the product over 12 µs at 100 Gb/s; the target is 3/4 of a round
    # trip where queues trim; the proportional gain is 4 at a target of 12 µs.
    reference = 12e-6 * 100e9 / (8 * transport.packet_bytes)
    target = 0.75 * slots.rtt
    scale = slots.product / reference
    low, high = (math.ceil(share * slots.rtt) for share in transport.marks)
    return Knobs(
        paths=plan.paths,
        seed=(12345 + seed * 0x9E3779B97F4A7C1) & 0x7FFFFFFFFFFFFFF,
        skip=int(transport.spray != "oblivious"),
        kept=_kept_paths(plan, transport),
        edge=int(transport.recovery == "edge"),
        mark_low=low,
        mark_high=max(high, low + 1),
        mark_last_hop=int(transport.mark_last_hop),
        ack_every=transport.ack_every,
        ack_share=transport.ack_bytes / transport.packet_bytes,
        controlled=int(transport.controlled),
        target=target,
        rtt=slots.rtt,
        idle=1e-6 / slots.slot_s,
        scale=scale,
        gain=4 * scale * target * slots.slot_s / 12e-6,
        # A sender receives acknowledgements of all its planes: where one plane represents several, each counts for
        # all.
        smoothing=1 - (1 - SMOOTHING) ** plan.copies,
        fresh=FRESH_PACKETS / plan.copies,
        least_paths=min(transport.least_paths, plan.paths),
        probe_slots=max(1, round(transport.probe_s / (8 * transport.packet_bytes / port_gbps / 1e9))),
    )


def _network_arrays(links: Links, shape: Shape) -> Net:
    count = links.count
    return Net(
        ring=np.zeros((count, shape.queue), dtype=np.int64),
        head=np.zeros(count, dtype=np.int16),
        waiting=np.zeros(count, dtype=np.int16),
        wire=np.zeros((shape.wire, count), dtype=np.int64),
        share=np.ones(count),
        room=np.ones(count),
        loss=np.zeros(count),
        avoided=np.zeros(count, dtype=np.uint8),
        trouble=np.zeros(count, dtype=np.uint8),
        owed=np.zeros(count),
        host_t0=links.host_t0(np.arange(links.fabric.hosts)).astype(np.int32),
        ready=np.zeros(links.fabric.planes, dtype=np.uint8),
        sent=np.zeros(links.fabric.planes, dtype=np.int64),
    )


def _kept_paths(plan: Sketch, transport: Transport) -> int:
    return math.ceil(plan.slots.window) if transport.spray == "recycle" else 0


def _traffic_arrays(plan: Sketch, flows: Flows, schedule: Schedule, seed: int, *, kept: int) -> Traffic:
    number, planes, hosts = len(flows), plan.fabric.planes, plan.fabric.hosts
    random = np.random.default_rng(seed)
    order = np.argsort(flows.source, kind="stable").astype(np.int32)
    first = np.searchsorted(flows.source[order], np.arange(hosts + 1)).astype(np.int32)
    offset = random.integers(0, max(1, plan.paths // planes), (number, planes))
    tally = np.zeros((number, ROW), dtype=np.int32)
    # Random, or short transfers would all start on the first plane.
    tally[:, PLANE] = random.integers(0, planes, number)
    waiting = np.argsort(schedule.waits_for, kind="stable")
    triggers = np.arange(len(schedule.needed) + 1)
    return Traffic(
        source=flows.source.astype(np.int32),
        target=flows.target.astype(np.int32),
        packets=plan.packets.astype(np.int32),
        done=np.full(number, -1, dtype=np.int32),
        links=plan.hops.astype(np.uint8),
        tally=tally,
        window=_first_windows(plan),
        path=np.zeros((number, plan.paths), dtype=np.uint8),
        turn=(offset << 16).astype(np.int32),
        kept=np.zeros((number, max(1, kept)), dtype=np.int16),
        mine=order,
        first=first,
        next=np.zeros(hosts, dtype=np.int32),
        debt=np.zeros(planes * hosts),
        began=np.full(number, -1, dtype=np.int32),
        fires=schedule.fires.astype(np.int32),
        needed=schedule.needed.astype(np.int32),
        waiting=waiting.astype(np.int32),
        first_waiting=np.searchsorted(schedule.waits_for[waiting], triggers).astype(np.int32),
    )


def _first_windows(plan: Sketch) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    slots = plan.slots
    window = np.zeros((len(plan.packets), 16))
    base = plan.hops * (slots.wire + slots.back) + slots.host
    window[:, WINDOW] = slots.window
    # 1.5 of the connection's own bandwidth-delay product: uet-htsim's bound.
    window[:, MOST] = np.maximum(1.5 * base * plan.fabric.planes, 1.0)
    window[:, BASE] = base
    window[:, LAST_CUT] = window[:, LAST_ADD] = 0.0
    return window


def calendar_of(ring: int, pool: int) -> Calendar:
    """Return an empty calendar of `ring` slots with places for `pool` events."""
    following = np.arange(1, pool + 1, dtype=np.int32)
    following[-1] = -1
    return Calendar(
        first=np.full(ring, -1, dtype=np.int32),
        word=np.zeros(pool, dtype=np.int64),
        next=following,
        free=np.zeros(1, dtype=np.int32),
    )


def _check_hosts(fabric: Fabric, flows: Flows) -> None:
    last = int(max(flows.source.max(), flows.target.max()))
    if last >= fabric.hosts or min(flows.source.min(), flows.target.min()) < 0:
        raise mistake(
            f"traffic on {fabric.name}",
            f"host {last:,} is named, but there are {fabric.hosts:,}",
            fix=f"hosts are numbered from 0 to {fabric.hosts - 1:,}",
        )
    if len(flows) > MOST_FLOWS:
        raise mistake(f"traffic on {fabric.name}", f"{len(flows):,} connections", fix=f"use at most {MOST_FLOWS:,}")


# The cost of a simulation, checked before it starts.


# On one core of the machine of benchmarks/2026-11-15-packet-speed.md: packet hops per CPU-second, and the cost of
# checking an idle link in a slot.
HOPS_PER_S = 8e6
LOOK_S = 1.5e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketBudget:
    """Limits of a simulation's CPU time and memory."""

    cpu_s: float = 600.0
    memory_bytes: float = 4e9


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketCost:
    """The expected cost of a simulation, for traffic without any delay."""

    packets: int
    hops: int
    slots: int
    cpu_s: float
    memory_bytes: float


def packet_cost(*, packets: int, hops: int, slots: int, links: int, memory_bytes: float) -> PacketCost:
    """Return the expected cost of moving packets over hops and checking every link in every slot."""
    cpu_s = hops / HOPS_PER_S + slots * links * LOOK_S
    return PacketCost(packets=packets, hops=hops, slots=slots, cpu_s=cpu_s, memory_bytes=memory_bytes)


def check_packet_budget(name: str, expected: PacketCost, budget: PacketBudget) -> None:
    """Raise UserError when a simulation would exceed its budget."""
    if expected.slots > MOST_SLOTS:
        raise mistake(
            f"packets on {name}",
            f"the busiest NIC sends or receives {expected.slots:,} packets, one per slot",
            why=f"the engine counts to {MOST_SLOTS:,} slots",
            fix="send fewer bytes, or use the fluid engine",
        )
    if expected.cpu_s <= budget.cpu_s and expected.memory_bytes <= budget.memory_bytes:
        return
    raise mistake(
        f"packets on {name}",
        f"{expected.packets:,} packets over {expected.hops:,} hops need about {expected.cpu_s:,.0f} s of CPU and "
        f"{expected.memory_bytes / 1e9:,.2f} GB; the budget is {budget.cpu_s:,.0f} s and "
        f"{budget.memory_bytes / 1e9:,.2f} GB",
        fix=_budget_fix(expected, budget),
    )


def _budget_fix(expected: PacketCost, budget: PacketBudget) -> str:
    if expected.memory_bytes > budget.memory_bytes:
        return "simulate fewer hosts or connections, or the fluid engine, which keeps no packets"
    share = budget.cpu_s / expected.cpu_s
    return f"send {share:.1%} of the bytes (completion grows in proportion), or use the fluid engine"
