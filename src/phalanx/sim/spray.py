"""How evenly spraying loads the links when nobody reacts: the load that senders at line rate offer to each link."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from phalanx.network.fabric.types import Fabric
from phalanx.sim.links import Floats, links_of
from phalanx.sim.matrices import Flows
from phalanx.sim.routes import Routing, route

CHUNK = 1 << 20  # sub-flows at a time: about 100 MB of temporary arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """Load offered to each link, as a share of its capacity."""

    load: Floats = field(repr=False)
    worst_fabric: float  # between switches
    worst_host: float  # between NIC and T0


def offered(fabric: Fabric, flows: Flows, *, routing: Routing) -> Offered:
    """The load map of flows that all send at line rate, in equal parts over their paths."""
    links = links_of(fabric)
    load = np.zeros(links.count)
    at_once = max(1, CHUNK // routing.paths)
    for number, first in enumerate(range(0, len(flows), at_once)):
        some = slice(first, first + at_once)
        part = Flows(source=flows.source[some], target=flows.target[some], nbytes=flows.nbytes[some])
        # Every chunk hashes its own numbers from zero: another seed keeps the choices independent.
        hops = route(links, part, replace(routing, seed=routing.seed + 7919 * number)).links
        load += np.bincount(hops[hops >= 0], minlength=links.count)
    load *= fabric.planes / routing.paths  # a path carries nic / paths, a link nic / planes
    host = np.arange(links.count) % links.per_plane < 2 * fabric.hosts
    between = load[~host]
    return Offered(
        load=load,
        worst_fabric=float(between.max()) if len(between) else 0.0,
        worst_host=float(load[host].max()),
    )
