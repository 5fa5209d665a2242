"""Causes of failures and their rates: the causes of one published run, scaled to the failures a cluster expects.

`data/failures.csv` holds the 419 interruptions of Llama 3 405B by cause (arXiv 2407.21783, Table 5). Their mix is a
calibration: it is applied to any cluster, at the failure rate of the plan.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.io.files import shipped_text
from phalanx.network.fabric.fabric_bill import failure_loss
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.failure_budget import (
    CONVERGE_S,
    EDGE_RECOVERY_S,
    REMAP_S,
    SWITCH_BACK_S,
    can_spray,
    pace_with_loss,
    part_rates,
    ports_move,
    stall_s,
)
from phalanx.plan.plan import Plan
from phalanx.units import DAY_S

BLOCK = 4096  # failures drawn at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One kind of failure. `share` is its share of all failures; shares add up to 1."""

    name: str
    share: float
    unit: str  # the unit that fails: a device, a host, a link (one NIC per device)
    units: float = 0.0  # number of units; 0: as many as the job has devices, hosts or NICs
    takes_host: bool = False  # the host leaves the job until it is repaired
    outage_s: float = 0.0  # until the unit is back; 0 for a link: drawn at random
    # Seconds that the job stalls until other paths take over; None: the job fails.
    stall_s: float | None = None
    pace: float = 1.0  # pace of the job after the stall, until the unit is back
    silent: bool = False  # unnoticed until weights are compared
    source: str = ""  # of its rate


_TRAITS: dict[str, Callable[[float], Cause]] = {
    "device": lambda share: Cause(name="device", share=share, unit="device", takes_host=True),
    "memory": lambda share: Cause(name="memory", share=share, unit="device", takes_host=True),
    "corruption": lambda share: Cause(name="corruption", share=share, unit="device", takes_host=True, silent=True),
    "host": lambda share: Cause(name="host", share=share, unit="host", takes_host=True),
    "nic": lambda share: Cause(name="nic", share=share, unit="link", takes_host=True),
    "link": lambda share: Cause(name="link", share=share, unit="link", takes_host=True),
    "switch": lambda share: Cause(name="switch", share=share, unit="link", outage_s=SWITCH_BACK_S),
    "software": lambda share: Cause(name="software", share=share, unit="host"),
    "unknown": lambda share: Cause(name="unknown", share=share, unit="host"),
}


@functools.cache
def usual_mix() -> tuple[Cause, ...]:
    """Return the causes of Llama 3's interruptions with their shares.

    >>> {cause.name: round(419 * cause.share, 1) for cause in usual_mix()}["device"]  # 148 + 17 + 6
    171.0
    """
    text = shipped_text(__file__, "data/failures.csv")
    counts = dict.fromkeys(_TRAITS, 0.0)
    for row in csv.DictReader(io.StringIO(text)):
        counts[row["cause"]] += float(row["count"])
    total = sum(counts.values())
    return tuple(
        replace(
            trait(counts[name] / total),
            source=f"{counts[name]:g} of {total:g} interruptions of Llama 3 (arXiv 2407.21783 Table 5)",
        )
        for name, trait in _TRAITS.items()
    )


def failure_arrivals(
    mix: Sequence[Cause], *, mtbf_s: float, shape: float, random: np.random.Generator
) -> Iterator[tuple[float, Cause]]:
    """Yield the seconds to the job's next failure, and its cause, without end.

    `shape` 1 is a Poisson process. Below 1 the gaps are Weibull with the same mean: failures come in bursts, as in
    nine years of Los Alamos clusters (Schroeder and Gibson, DSN 2006: Weibull with decreasing hazard).
    """
    # Uniform numbers transformed by these formulas: numpy keeps uniform numbers the same from version to version, but
    # not its distributions (NEP 19), and a seed must give the same run everywhere.
    ends = np.cumsum([cause.share for cause in mix])[:-1]
    scale_s = mtbf_s / math.gamma(1.0 + 1.0 / shape)
    while True:
        gaps_s = scale_s * (-np.log1p(-random.random(BLOCK))) ** (1.0 / shape)
        indices = np.searchsorted(ends, random.random(BLOCK), side="right")
        yield from ((float(gap_s), mix[index]) for gap_s, index in zip(gaps_s, indices, strict=True))


def per_day(mtbf_s: float) -> float:
    """Return the failures per day; 0 when there are none."""
    return DAY_S / mtbf_s if math.isfinite(mtbf_s) else 0.0


# Links and switches as causes: those of a named fabric with published rates, and recovery at the edge.
# Without a fabric, network interruptions are Llama 3's share of all. With one, every kind of part has its own rate
# and its own consequence. A conventional network routes around failures above the T0s, and the job fails with a NIC's
# link or its T0. Recovery at the edge survives both while a NIC has another plane.


CABLES = "0.057 % of NIC-ToR links a month (Alibaba HPN, SIGCOMM'24), taken for all cables"
SWITCHES = "2 % of switches in three months (Singh et al., SIGCOMM CCR 51(2), 2021)"
NETWORK = ("link", "switch")  # causes of the usual mix that a named fabric replaces
ALL_NETWORK = (*NETWORK, "uplink", "T0 switch", "T1 switch")  # "T1 switch" includes the tiers above
# Planes of an unnamed network: 800 Gb/s as 8 x 100, arXiv:2605.04333 section 2.
DEFAULT_PLANES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCauses:
    """The network for the causes: recovery at the edge or conventional, planes, and the fabric if it is named.

    Without a fabric, rates are Llama 3's.
    """

    edge: bool = False
    planes: int = DEFAULT_PLANES
    fabric: Fabric | None = None


def job_causes(plan: Plan, network: NetworkCauses) -> tuple[tuple[Cause, ...], float]:
    """Return (causes with their shares, seconds between failures of the job)."""
    per_day, mtbf_s = plan.reliability.failures_per_day, plan.reliability.mtbf_s
    if network.fabric is None:
        return borne_at_the_edge(usual_mix(), plan, network), mtbf_s
    if not per_day:
        return usual_mix(), mtbf_s
    other_rates = [
        (replace(cause, share=0.0), cause.share * per_day) for cause in usual_mix() if cause.name not in NETWORK
    ]
    # A job inside one fast domain does not use the network.
    rated = [
        *other_rates,
        *(_network_parts(plan, network, network.fabric) if any("NIC" in use.tier for use in plan.mapping) else ()),
    ]
    total = sum(rate for _, rate in rated)
    return tuple(replace(cause, share=rate / total) for cause, rate in rated), DAY_S / total


def borne_at_the_edge(mix: tuple[Cause, ...], plan: Plan, network: NetworkCauses) -> tuple[Cause, ...]:
    """Return the usual causes; at the edge a lost link or switch costs one plane of a NIC until it is back."""
    if not network.edge:
        return mix
    narrow = pace_without_nic(plan, 1.0 / network.planes)
    return tuple(replace(cause, stall_s=REMAP_S, pace=narrow) if cause.name in NETWORK else cause for cause in mix)


def _network_parts(plan: Plan, network: NetworkCauses, fabric: Fabric) -> Iterator[tuple[Cause, float]]:
    """Yield every kind of part with its failures per day in the job's share of the fabric.

    The share is the job's devices over all NICs.
    """
    job_share = plan.layout.devices / fabric.hosts
    # By name: the number of parts, and failures a day.
    totals: dict[str, tuple[float, float]] = {}
    for part in part_rates(fabric):
        name = _part_name(part.part)
        count, rate = totals.get(name, (0.0, 0.0))
        totals[name] = count + part.count * job_share, rate + part.failures_per_day * job_share
    for name, (count, rate) in totals.items():
        yield _part_cause(plan, network, fabric, name, count), rate


def _part_name(part: str) -> str:
    if part.endswith("cables"):
        return "link" if part.startswith("NIC") else "uplink"
    return "T0 switch" if part.startswith("T0") else "T1 switch"


def _part_cause(plan: Plan, network: NetworkCauses, fabric: Fabric, name: str, count: float) -> Cause:
    """Return the cause for one kind of part, with its consequence under conventional or edge recovery."""
    source, unit = (SWITCHES, "switch") if name.endswith("switch") else (CABLES, "cable")
    outage_s = SWITCH_BACK_S if unit == "switch" else 0.0
    cause = Cause(name=name, share=0.0, unit=unit, units=count, outage_s=outage_s, source=source)
    lost = failure_loss(fabric)
    if name in ("link", "T0 switch"):
        if not network.edge or not ports_move(fabric):
            return replace(cause, takes_host=name == "link")
        return replace(cause, stall_s=REMAP_S, pace=pace_without_nic(plan, lost.nic_link))
    share = lost.t0_t1_link / fabric.planes if name == "uplink" else lost.t1
    if not network.edge or not can_spray(fabric):
        # A QP cannot leave its plane, and the message waits for it.
        share *= fabric.planes
    return replace(
        cause,
        stall_s=stall_s(fabric, EDGE_RECOVERY_S if network.edge else CONVERGE_S),
        pace=pace_without_nic(plan, share),
    )


def network_share(plan: Plan) -> float:
    """Return the share of a step that waits for the network between hosts."""
    shown_s = sum(use.shown_s for use in plan.mapping if "NIC" in use.tier)
    return min(1.0, shown_s / plan.prediction.step_s)


def pace_without_nic(plan: Plan, lost: float) -> float:
    """Return the pace while one NIC lacks the share `lost` of its bandwidth.

    That NIC is the slowest of all, so every wait for the network grows.
    """
    return pace_with_loss(lost, waits=network_share(plan))
