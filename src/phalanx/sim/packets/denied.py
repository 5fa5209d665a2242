"""A controller's denylist: paths that senders never use, whatever probes say."""

from __future__ import annotations

import numpy as np

from phalanx.errors import mistake
from phalanx.sim.packets.build import World
from phalanx.sim.packets.faults import Fault, denied_links
from phalanx.sim.packets.state import DENIED


def deny_paths(world: World, denied: tuple[Fault, ...]) -> None:
    """Deny every path over the links of the parts; raises UserError where a connection has no other."""
    from phalanx.sim.packets import kernel

    share = np.ones(world.links.count)
    share[denied_links(world.links, denied)] = 0.0
    net = world.net._replace(share=share, loss=np.zeros(world.links.count))
    kernel.deny(world.shape, world.knobs, net, world.traffic, world.totals)
    none = np.flatnonzero((world.traffic.path == DENIED).all(axis=1))
    if len(none):
        source, target = (int(column[none[0]]) for column in (world.traffic.source, world.traffic.target))
        raise mistake(
            "denied parts",
            f"connections without a path: {len(none):,}, the first from host {source:,} to host {target:,}",
            why="a denied path is never used, and all of theirs are",
            fix="deny fewer parts, or give connections more paths",
        )
