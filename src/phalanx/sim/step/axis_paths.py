"""The network path of each axis of a plan: the share of line rate of its slowest flow, and switches on the way.

Ranks are NICs in rank order. An axis whose group spans several fast domains sends from every NIC to the same position
in the group's next domain (a ring per position, like NCCL's channels); all groups of the axis do so at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import mistake
from phalanx.network.collectives import Group
from phalanx.network.fabric.fabric_types import Fabric, Switch
from phalanx.network.fabric.failure_budget import can_spray
from phalanx.plan.layout import Layout
from phalanx.plan.traffic import Groups
from phalanx.sim.fabric_links import NOTHING, BrokenParts, Floats, Ints, links_of
from phalanx.sim.fabric_links import link_shares as working
from phalanx.sim.fluid import solve_rates
from phalanx.sim.plan_flows import phase_pairs
from phalanx.sim.routes import Routing, route_flows
from phalanx.sim.traffic_matrix import make_flows

AXES = ("tensor", "context", "data", "shard", "replica", "expert", "expert_data", "pipeline")
# Entropy values per connection, over all planes (arXiv:2605.04333 section 2.1).
SPRAYED_PATHS = 256
# QPs per connection of the conventional fabric the paper compares with (section 5.2.7).
HASHED_QPS = 16
# Sub-flows of one solution: about 5 s and 0.5 GB. Larger jobs get fewer paths per flow, which underestimates the rate
# of the slowest flow.
MOST_ROWS = 4_200_000
# Switches between neighbours that the planner's latency per network step assumes: the published runs it was fitted on
# have two and three tiers. An assumption; it moves a step of a ring by (hops - 3) times 0.73 µs.
PLANNED_HOPS = 3
FIRST_T0 = 0  # every failure is of the first T0, or below it


@dataclass(frozen=True, kw_only=True, slots=True)
class PathTransport:
    """The choice of paths: senders that spray packets and leave dead paths, or a hash per QP that switches redo."""

    edge: bool = True
    broken: BrokenParts = NOTHING
    every_plane: bool = False  # the failure is in all planes, not in one


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPath:
    """The traffic of one axis on the fabric. `share` is of a NIC's line rate, of the slowest flow; 0 is cut off."""

    axis: str
    share: float
    hops: int  # switches between the farthest neighbours
    flows: int
    crossing: int  # flows that leave their T0
    touched: int  # flows with a path over a failed part
    stalled: int  # flows without any working path


def derived_fabric(devices: int, nic_bytes_per_s: float) -> Fabric:
    """Return one switch that carries every NIC: the assumption for a cluster without a named fabric."""
    gbps = nic_bytes_per_s * 8 / 1e9
    switch = Switch(name="ideal", box="ideal", radix=devices, port_gbps=gbps, watts=0.0, usd=None)
    return Fabric(
        name="non-blocking",
        hosts=devices,
        nic_gbps=gbps,
        planes=1,
        tiers=1,
        switch=switch,
        oversubscription=1.0,
        rails=1,
        t0_down=devices,
        t0_up=0,
        t0=1,
        t1=0,
        hop_s=0.0,  # keeps the planner's latency
    )


def check_size(fabric: Fabric, devices: int) -> None:
    """Raise UserError if the fabric has fewer NICs than devices."""
    if fabric.hosts < devices:
        raise mistake(
            f"fabric {fabric.name}",
            f"it has {fabric.hosts:,} NICs, and the plan has {devices:,} devices with one each",
            fix=f"name a fabric of {devices:,} NICs or more, or a cluster of at most {fabric.hosts:,} devices",
        )


def used_axes(layout: Layout, *, experts: bool) -> tuple[str, ...]:
    """Return the axes that carry traffic under a layout."""
    sharers = ("data",) if layout.zero == 0 else ("shard", "replica")
    return ("tensor", "context", *sharers, "pipeline", *(("expert", "expert_data") if experts else ()))


def axis_paths(
    fabric: Fabric, groups: Groups, axes: tuple[str, ...], devices: int, transport: PathTransport
) -> dict[str, AxisPath]:
    """Return the path of every axis that leaves its fast domain."""
    stride = _axis_strides(groups)
    paths = {}
    for axis in axes:
        group: Group = getattr(groups, axis)
        ranks, inside = int(np.max(group.ranks)), int(np.max(group.per_domain))
        if ranks > 1 and crosses_network(group, axis):
            pairs = phase_pairs(axis, size=ranks, stride=stride[axis], inside=inside, ranks=devices)
            paths[axis] = _axis_path(fabric, axis, *pairs, transport)
    return paths


def crosses_network(group: Group, axis: str) -> bool:
    """Return True if an axis leaves the fast domain; for a pipeline, if neighbours are in different domains."""
    if axis == "pipeline":
        return bool(np.max(group.per_domain) <= 1)
    return bool(np.max(group.domains) > 1)


def _axis_strides(groups: Groups) -> dict[str, int]:
    """Return the ranks between neighbours of each axis, as placed by plan.traffic.axis_groups."""

    def ranks(name: str) -> int:
        return int(np.max(getattr(groups, name).ranks))

    tensor = ranks("tensor")
    return {
        "tensor": 1,
        "context": tensor,
        "data": tensor,
        "shard": tensor,
        "replica": tensor * ranks("shard"),
        "expert": 1,
        "expert_data": ranks("expert") if ranks("expert") > 1 else tensor,
        "pipeline": tensor * ranks("data"),
    }


def _axis_path(fabric: Fabric, axis: str, source: Ints, target: Ints, transport: PathTransport) -> AxisPath:
    """Solve the rates of an axis's flows in one plane, and describe the axis on the fabric."""
    # Planes behave alike: one is solved, and a second time with the failure in it.
    plane = replace(fabric, planes=1, nic_gbps=fabric.port_gbps)
    links = links_of(plane)
    near, far = links.host_t0(source), links.host_t0(target)
    # Under one T0 every NIC has one flow in and one out, so none is slowed: only a failure there can affect it.
    counts = near != far
    # The same flows in both solutions, so that they hash alike.
    if counts.any() or not transport.broken.nothing:
        counts |= (near == FIRST_T0) | (far == FIRST_T0)
    shares, touched = np.ones(1), 0
    if counts.any():
        shares, touched = _flow_shares(plane, fabric.planes, source[counts], target[counts], transport)
    return AxisPath(
        axis=axis,
        share=float(shares.min()),
        hops=5 if (near // links.t0_per_pod != far // links.t0_per_pod).any() else 3 if (near != far).any() else 1,
        flows=len(source),
        crossing=int((near != far).sum()),
        touched=touched,
        stalled=int((shares <= 0).sum()),
    )


def _flow_shares(
    plane: Fabric, planes: int, source: Ints, target: Ints, transport: PathTransport
) -> tuple[Floats, int]:
    """Return the share of line rate of each flow, over all planes, and how many flows had a path over a failed part."""
    parts, routing = _plane_routing(len(source), planes, edge=transport.edge)
    traffic = make_flows(np.repeat(source, parts), np.repeat(target, parts), 1e6)

    def solved(broken: BrokenParts) -> Floats:
        # A message in equal parts on hashed paths arrives with its slowest part.
        rates = solve_rates(plane, traffic, routing=routing, broken=broken).share
        return np.asarray(parts * rates.reshape(-1, parts).min(axis=1))

    healthy = solved(NOTHING)
    if transport.broken.nothing:
        return healthy, 0
    degraded = solved(transport.broken)
    links = links_of(plane)
    # As if dead, since a part that only loses packets affects as many flows.
    lost = replace(transport.broken, left=0.0)
    before = route_flows(links, traffic, replace(routing, recovery="none"), working(links, lost))
    touched = len(np.unique(before.flow[before.cut] // parts))
    # Senders at the edge leave a plane as far as they must. A QP stays on its port, and the message waits for it, as
    # on InfiniBand, where switches spray inside a plane.
    healthy_planes = 0 if transport.every_plane else planes - 1
    mixed = (healthy_planes * healthy + degraded) / (healthy_planes + 1)
    return (mixed if transport.edge and can_spray(plane) else np.minimum(healthy, degraded)), touched


def _plane_routing(count: int, planes: int, *, edge: bool) -> tuple[int, Routing]:
    """Return (parts of a message with separate hashes, routing of each part), in one plane."""
    most = max(MOST_ROWS // count, 1)
    if edge:
        return 1, Routing(spread="adaptive", paths=min(max(SPRAYED_PATHS // planes, 1), most), recovery="edge")
    return min(max(HASHED_QPS // planes, 1), most), Routing(spread="flow", recovery="conventional")


def on_fabric(groups: Groups, paths: dict[str, AxisPath], fabric: Fabric, *, nic: float) -> Groups:
    """Return the plan's communicators with the fabric's rates and latencies.

    `nic` is the share of the NIC's rate that a collective reaches. A stalled axis keeps a rate, as its step is never
    run.
    """
    line_bytes_per_s = fabric.nic_gbps * 1e9 / 8.0 * nic

    def placed(axis: str) -> Group:
        group: Group = getattr(groups, axis)
        path = paths.get(axis)
        if path is None:
            return group
        latency_s = group.nic_latency_s + (path.hops - PLANNED_HOPS) * fabric.hop_s
        return replace(
            group,
            # A ring of keys and values moves at the pace of its slowest hop, and one hop leaves the domain. The
            # planner models the hops inside.
            per_domain=np.ones_like(group.ranks) if axis == "context" else group.per_domain,
            nic_bytes_per_s=np.full_like(group.ranks, line_bytes_per_s * (path.share or 1.0)),
            nic_latency_s=np.maximum(latency_s, fabric.hop_s),
            loss=0.0,
        )

    return Groups(**{axis: placed(axis) for axis in AXES})
