"""What the fluid engine will take, before it starts."""

from __future__ import annotations

from phalanx.errors import mistake
from phalanx.sim.links import Links
from phalanx.sim.packets.budget import Budget
from phalanx.sim.routes import Routing

# One core of the machine of benchmarks/2026-11-15-fluid-speed.md. A row (one path of one flow) takes 1.2 to 1.5 µs each
# time rates are computed; rows that are done leave, so that all rounds together cost about twenty full ones where paths
# collide and eight where packets are sprayed.
ROW_S = 1.5e-6
ROUNDS = {"flow": 20, "qp": 20, "oblivious": 8, "adaptive": 8, "all": 4}
ROW_BYTES = 220  # path, table of links, heap and rates: 0.9 GB with 4.2 million rows
LINK_BYTES = 40


def expected(links: Links, flows: int, routing: Routing) -> tuple[float, float]:
    """CPU seconds and bytes."""
    rows = float(flows) * routing.paths
    return rows * ROW_S * (1 + ROUNDS[routing.spread]), rows * ROW_BYTES + links.count * LINK_BYTES


def afford(links: Links, flows: int, routing: Routing, budget: Budget) -> None:
    """Raise UserError when rates and completion times would exceed the budget."""
    cpu_s, nbytes = expected(links, flows, routing)
    if cpu_s <= budget.cpu_s and nbytes <= budget.memory_bytes:
        return
    share = min(budget.cpu_s / cpu_s, budget.memory_bytes / nbytes)
    raise mistake(
        f"fluid on {links.fabric.name}",
        f"{flows:,} flows on {routing.paths} paths each need about {cpu_s:,.0f} s of CPU and {nbytes / 1e9:,.1f} GB; "
        f"the budget is {budget.cpu_s:,.3g} s and {budget.memory_bytes / 1e9:,.1f} GB",
        why="every path of every flow is a row to be filled",
        fix=" or ".join(_ways(links, flows, routing, share, enough=nbytes <= budget.memory_bytes)),
    )


def _ways(links: Links, flows: int, routing: Routing, share: float, *, enough: bool) -> list[str]:
    """What would fit: fewer paths, cables as one, fewer flows, or more time where memory is enough."""
    planes = links.fabric.planes
    fewer = int(routing.paths * share) // planes * planes
    ways = [f"use --paths {fewer:,}".replace(",", "")] if fewer and routing.spread not in ("flow", "all") else []
    ways += ["--routing all"] if routing.spread not in ("flow", "all") and routing.paths * share >= planes else []
    return [*ways, f"simulate about {max(2, int(flows * share)):,} flows", *(["raise --cpu"] if enough else [])]
