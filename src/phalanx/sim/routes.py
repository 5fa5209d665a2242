"""Paths of flows as arrays: the links of each sub-flow, chosen by a seeded hash.

Routing is by flow (ECMP), by QP (several hashed paths that each carry their part), or by packet (spraying over a set
of paths, equal per plane). There are three kinds of spraying: `oblivious` offers the same share to every path,
`adaptive` lets each path carry what it can (ECN skips a busy path; arXiv:2605.04333 section 2.1), and `all` is the
limit with many paths: every path of a plane is used and the cables between two tiers act as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import Floats, Ints, Links, links_of
from phalanx.sim.traffic_matrix import Flows

Hops = NDArray[np.int32]  # [sub-flow, hop]
Spread = Literal["flow", "qp", "oblivious", "adaptive", "all"]
Recovery = Literal["none", "conventional", "edge"]

# int32 links of a path of two tiers take 16 bytes; 34 million sub-flows are 0.5 GB, and as much again in the solver.
MOST_SUBFLOWS = 33_600_000
# New hashes before a sub-flow counts as cut off: 1 in 4 billion with half of the paths dead.
ATTEMPTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The way in which flows choose paths."""

    spread: Spread
    paths: int = 1  # per flow: QPs or entropy values; with `all` one for each plane
    # The plane of a path: any by hash, or in turn so that all planes get the same.
    planes: Literal["hash", "equal"] = "equal"
    # NVLink first moves data to the NIC on the receiver's rail (NCCL's PXN).
    rails: bool = False
    # Dead paths are kept, rehashed by switches, or left by senders.
    recovery: Recovery = "edge"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.paths < 1:
            raise mistake("routing", f"{self.paths} paths per flow", fix="use at least 1; MRC uses 128 to 256")
        if self.spread == "flow" and self.paths != 1:
            raise mistake("routing", f"{self.paths} paths for one flow", fix="by flow there is one: use qp or spray")


def by_flow(*, seed: int = 0, recovery: Recovery = "conventional") -> Routing:
    """Return ECMP routing: one hashed path per flow."""
    return Routing(spread="flow", planes="hash", seed=seed, recovery=recovery)


def by_qp(qps: int, *, seed: int = 0, recovery: Recovery = "conventional") -> Routing:
    """Return ECMP routing per QP: a message in `qps` equal parts, each on one hashed path."""
    return Routing(spread="qp", paths=qps, planes="hash", seed=seed, recovery=recovery)


def spray_routing(paths: int, *, adaptive: bool = True, seed: int = 0, recovery: Recovery = "edge") -> Routing:
    """Return a routing that sprays packets over `paths` entropy values, equally many in every plane."""
    return Routing(spread="adaptive" if adaptive else "oblivious", paths=paths, seed=seed, recovery=recovery)


def every_path(planes: int) -> Routing:
    """Return a routing that sprays packets evenly over all paths of all planes."""
    return Routing(spread="all", paths=planes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The links of every sub-flow, in the order of travel; -1 where a path is shorter."""

    flow: NDArray[np.int32]
    links: Hops
    cut: NDArray[np.bool_]  # True where no working path was found

    @property
    def hops(self) -> Ints:
        """The number of links on each path."""
        return np.asarray((self.links >= 0).sum(axis=1))


def route_flows(links: Links, flows: Flows, routing: Routing, left: Floats | None = None) -> Routes:
    """Return the paths of all sub-flows; `left` is the share of each link that works."""
    _check_routing(links, flows, routing)
    number = np.arange(len(flows) * routing.paths, dtype=np.int64)
    flow, turn = number // routing.paths, number % routing.paths
    source, target = flows.source[flow], flows.target[flow]
    if routing.rails and links.fabric.rails > 1:
        source = source // links.fabric.rails * links.fabric.rails + target % links.fabric.rails
    drawn = _hash_words(number, routing.seed)
    plane = _sub_planes(links, source, turn, drawn, routing)
    hops = _sub_paths(links, source, target, plane, drawn, routing)
    cut = np.zeros(len(number), dtype=bool)
    # With `all`, a bundle of cables with a dead one is slower, not cut.
    if left is not None and routing.spread != "all":
        hops, cut = _route_around(links, source, target, turn, number, plane, routing, hops, left)
    return Routes(flow=flow.astype(np.int32), links=hops, cut=cut)


def _sub_planes(links: Links, source: Ints, turn: Ints, drawn: NDArray[np.uint64], routing: Routing) -> Ints:
    """Return the plane of each sub-flow, chosen by its sender as the port it leaves by."""
    planes = links.fabric.planes
    return _hash_digit(drawn, 0, planes) if routing.planes == "hash" else (turn + source) % planes


def _sub_paths(
    links: Links, source: Ints, target: Ints, plane: Ints, drawn: NDArray[np.uint64], routing: Routing
) -> Hops:
    """Return the links of each sub-flow between its NICs, with hashed ports."""
    f = links.fabric
    if routing.spread == "all":
        drawn = np.zeros_like(drawn)  # the first cable represents all
    near, far = links.host_t0(source), links.host_t0(target)
    hops = [links.nic_up(plane, source)]
    if f.tiers > 1:
        port = _hash_digit(drawn, 1, f.t0_up)
        leaves = near != far
        hops.append(np.where(leaves, links.t0_up(plane, near, port), -1))
        if f.tiers == 3:
            hops += _top_hops(links, plane, near, far, port, _hash_digit(drawn, 2, links.t1_up))
        return_port = _back_port(port, f.t0_up, links.t1_per_pod, _hash_digit(drawn, 3, f.t0_up))
        hops.append(np.where(leaves, links.t0_down(plane, far, return_port), -1))
    hops.append(links.nic_down(plane, target))
    return np.stack(hops, axis=1).astype(np.int32)


def _top_hops(links: Links, plane: Ints, near: Ints, far: Ints, port: Ints, up: Ints) -> list[Ints]:
    """Return the links from T1 to T2 and back, -1 for pairs in the same pod.

    T2s join T1s at the same position in their pods.
    """
    leaves = near // links.t0_per_pod != far // links.t0_per_pod
    rises = links.t1_up_link(plane, links.t1_of(near, port), up)
    falls = links.t1_down_link(plane, links.t1_of(far, port), up)
    return [np.where(leaves, rises, -1), np.where(leaves, falls, -1)]


def _back_port(port: Ints, ports: int, switches: int, drawn: Ints) -> Ints:
    """Return one of a switch's cables to the far side by its own hash, where there are fewer switches than ports."""
    if ports <= switches:
        return port
    first = port % switches
    cables = (ports - first + switches - 1) // switches
    return first + drawn % cables * switches


def _route_around(
    links: Links,
    source: Ints,
    target: Ints,
    turn: Ints,
    number: Ints,
    plane: Ints,
    routing: Routing,
    taken: Hops,
    left: Floats,
) -> tuple[Hops, NDArray[np.bool_]]:
    """Redraw paths over a dead link.

    Switches and senders both do so, but only senders change the plane, since planes meet only in the NIC.
    """
    dead = _dead_paths(taken, left)
    for attempt in range(1, ATTEMPTS + 1):
        if routing.recovery == "none" or not dead.any():
            break
        redrawn = np.flatnonzero(dead)
        drawn = _hash_words(number[redrawn], routing.seed + attempt * 1_000_003)
        moved = plane[redrawn]
        if routing.recovery == "edge":
            moved = _sub_planes(links, source[redrawn], turn[redrawn] + attempt, drawn, routing)
        taken[redrawn] = _sub_paths(links, source[redrawn], target[redrawn], moved, drawn, routing)
        dead[redrawn] = _dead_paths(taken[redrawn], left)
    return taken, dead


def _dead_paths(taken: Hops, left: Floats) -> NDArray[np.bool_]:
    # -1, a missing hop, reads the last entry and works.
    works = np.append(left, 1.0)
    return np.asarray((works[taken] <= 0).any(axis=1))


def _hash_words(number: Ints, seed: int) -> NDArray[np.uint64]:
    """Return a well-mixed 64-bit word per number (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = number.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _hash_digit(drawn: NDArray[np.uint64], place: int, size: int) -> Ints:
    """Return a number below `size` from 16 bits of each word.

    Sizes are at most a few thousand, so the skew is below 1 %.
    """
    bits = (drawn >> np.uint64(16 * place)) & np.uint64(0xFFFF)
    return ((bits * np.uint64(max(size, 1))) >> np.uint64(16)).astype(np.int64)


def _check_routing(links: Links, flows: Flows, routing: Routing) -> None:
    f = links.fabric
    highest = int(max(flows.source.max(), flows.target.max()))
    if highest >= f.hosts or min(flows.source.min(), flows.target.min()) < 0:
        raise mistake("flows", f"host {highest:,} is not on {f.name}", fix=f"its hosts are 0 to {f.hosts - 1:,}")
    if routing.spread == "all" and routing.paths != f.planes:
        raise mistake("routing", f"{routing.paths} paths for all of {f.planes} planes", fix="use every_path(planes)")
    if len(flows) * routing.paths > MOST_SUBFLOWS:
        raise mistake(
            "routing",
            f"{len(flows):,} flows on {routing.paths} paths are more than the {MOST_SUBFLOWS:,} sub-flows of 2 GB",
            fix=f"use at most {max(MOST_SUBFLOWS // len(flows), 1):,} paths per flow, or one plane",
        )


# The evenness of spraying without any reaction: the load that senders at line rate offer to each link.


CHUNK = 1 << 20  # sub-flows at a time: about 100 MB of temporary arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """The load offered to each link, as a share of its capacity."""

    load: Floats = field(repr=False)
    worst_fabric: float  # between switches
    worst_host: float  # between NIC and T0


def offered_load(fabric: Fabric, flows: Flows, *, routing: Routing) -> Offered:
    """Return the load map of flows that all send at line rate, in equal parts over their paths."""
    links = links_of(fabric)
    load = np.zeros(links.count)
    at_once = max(1, CHUNK // routing.paths)
    for number, first in enumerate(range(0, len(flows), at_once)):
        chunk = slice(first, first + at_once)
        chunk_flows = Flows(source=flows.source[chunk], target=flows.target[chunk], nbytes=flows.nbytes[chunk])
        # Every chunk hashes its own numbers from zero: another seed keeps the choices independent.
        hops = route_flows(links, chunk_flows, replace(routing, seed=routing.seed + 7919 * number)).links
        load += np.bincount(hops[hops >= 0], minlength=links.count)
    load *= fabric.planes / routing.paths  # a path carries nic / paths, a link nic / planes
    host = np.arange(links.count) % links.per_plane < 2 * fabric.hosts
    between = load[~host]
    return Offered(
        load=load,
        worst_fabric=float(between.max()) if len(between) else 0.0,
        worst_host=float(load[host].max()),
    )
