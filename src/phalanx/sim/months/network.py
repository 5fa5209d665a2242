"""Links and switches as causes: those of a named fabric with published rates, and what recovery at the edge bears.

Without a fabric, network interruptions are Llama 3's share of all. With one, every kind of part has its own rate and
its own answer: a conventional network routes around what lies above the T0s and loses the job with a NIC's link or its
T0; recovery at the edge bears both while a NIC has another plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.network.fabric.bill import loss
from phalanx.network.fabric.budget import part_rates
from phalanx.network.fabric.recovery import (
    CONVERGE_S,
    EDGE_RECOVERY_S,
    REMAP_S,
    SWITCH_BACK_S,
    pace,
    ports_move,
    sprays,
    stall_s,
)
from phalanx.network.fabric.types import Fabric
from phalanx.plan.plan import Plan
from phalanx.sim.months.causes import Cause, usual_mix
from phalanx.units import DAY_S

CABLES = "0.057 % of NIC-ToR links a month (Alibaba HPN, SIGCOMM'24), taken for all cables"
SWITCHES = "2 % of switches in three months (Singh et al., SIGCOMM CCR 51(2), 2021)"
NETWORK = ("link", "switch")  # causes of the usual mix that a named fabric replaces
ALL_NETWORK = (*NETWORK, "uplink", "T0 switch", "T1 switch")  # "T1 switch": and above
DEFAULT_PLANES = 8  # of a network without a name: 800 Gb/s as 8 x 100, arXiv:2605.04333 section 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Who recovers, and over how many ports a NIC is spread. Without a fabric, rates are Llama 3's."""

    edge: bool = False
    planes: int = DEFAULT_PLANES
    fabric: Fabric | None = None


def job_causes(plan: Plan, network: Network) -> tuple[tuple[Cause, ...], float]:
    """(causes with their shares, seconds between failures of the job)."""
    per_day, mtbf_s = plan.reliability.failures_per_day, plan.reliability.mtbf_s
    if network.fabric is None:
        return borne_at_the_edge(usual_mix(), plan, network), mtbf_s
    if not per_day:
        return usual_mix(), mtbf_s
    own = [(replace(one, share=0.0), one.share * per_day) for one in usual_mix() if one.name not in NETWORK]
    # A job inside one fast domain does not notice the network.
    rated = [*own, *(_parts(plan, network, network.fabric) if _leaves(plan) else ())]
    total = sum(rate for _, rate in rated)
    return tuple(replace(cause, share=rate / total) for cause, rate in rated), DAY_S / total


def _leaves(plan: Plan) -> bool:
    return any("NIC" in use.tier for use in plan.mapping)


def borne_at_the_edge(mix: tuple[Cause, ...], plan: Plan, network: Network) -> tuple[Cause, ...]:
    """The usual causes; at the edge a lost link or switch is one plane of a NIC until it is back."""
    if not network.edge:
        return mix
    narrow = slower(plan, 1.0 / network.planes)
    return tuple(replace(one, stall_s=REMAP_S, pace=narrow) if one.name in NETWORK else one for one in mix)


def _parts(plan: Plan, network: Network, fabric: Fabric) -> Iterator[tuple[Cause, float]]:
    """Every kind of part with its failures a day in the job's part of the fabric: its devices over all NICs."""
    mine = plan.layout.devices / fabric.hosts
    found: dict[str, tuple[float, float]] = {}  # name -> parts, failures a day
    for one in part_rates(fabric):
        name = _name(one.part)
        count, rate = found.get(name, (0.0, 0.0))
        found[name] = count + one.count * mine, rate + one.failures_per_day * mine
    for name, (count, rate) in found.items():
        yield _part(plan, network, fabric, name, count), rate


def _name(part: str) -> str:
    if part.endswith("cables"):
        return "link" if part.startswith("NIC") else "uplink"
    return "T0 switch" if part.startswith("T0") else "T1 switch"


def _part(plan: Plan, network: Network, fabric: Fabric, name: str, count: float) -> Cause:
    source, unit = (SWITCHES, "switch") if name.endswith("switch") else (CABLES, "cable")
    outage_s = SWITCH_BACK_S if unit == "switch" else 0.0
    cause = Cause(name=name, share=0.0, unit=unit, units=count, outage_s=outage_s, source=source)
    lost = loss(fabric)
    if name in ("link", "T0 switch"):
        if not network.edge or not ports_move(fabric):
            return replace(cause, takes_host=name == "link")
        return replace(cause, stall_s=REMAP_S, pace=slower(plan, lost.nic_link))
    share = lost.t0_t1_link / fabric.planes if name == "uplink" else lost.t1
    if not network.edge or not sprays(fabric):
        share *= fabric.planes  # a QP cannot leave its plane, and the message waits for it
    return replace(cause, stall_s=stall_s(fabric, _bypass_s(network)), pace=slower(plan, share))


def _bypass_s(network: Network) -> float:
    return EDGE_RECOVERY_S if network.edge else CONVERGE_S


def network_share(plan: Plan) -> float:
    """Share of a step that waits for the network between hosts."""
    shown_s = sum(use.shown_s for use in plan.mapping if "NIC" in use.tier)
    return min(1.0, shown_s / plan.prediction.step_s)


def slower(plan: Plan, lost: float) -> float:
    """Pace while one NIC lacks a share of its bandwidth: it is the slowest of all, so every network wait grows."""
    return pace(lost, waits=network_share(plan))
