"""What a simulation will cost, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.sim.packets.state import MOST_SLOTS

# One core of the machine of benchmarks/2026-11-15-packet-speed.md: packet hops per CPU-second, and the cost of looking
# at a link in a slot in which it does nothing.
HOPS_PER_S = 8e6
LOOK_S = 1.5e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a simulation may take."""

    cpu_s: float = 600.0
    memory_bytes: float = 4e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a simulation is expected to take: the time of traffic that nothing holds up."""

    packets: int
    hops: int
    slots: int
    cpu_s: float
    memory_bytes: float


def cost(*, packets: int, hops: int, slots: int, links: int, memory_bytes: float) -> Cost:
    """Expected cost of moving packets over hops while looking at every link in every slot."""
    cpu_s = hops / HOPS_PER_S + slots * links * LOOK_S
    return Cost(packets=packets, hops=hops, slots=slots, cpu_s=cpu_s, memory_bytes=memory_bytes)


def afford(name: str, expected: Cost, budget: Budget) -> None:
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
        fix=_fix(expected, budget),
    )


def _fix(expected: Cost, budget: Budget) -> str:
    if expected.memory_bytes > budget.memory_bytes:
        return "simulate fewer hosts or connections, or the fluid engine, which keeps no packets"
    share = budget.cpu_s / expected.cpu_s
    return f"send {share:.1%} of the bytes (completion grows in proportion), or use the fluid engine"
