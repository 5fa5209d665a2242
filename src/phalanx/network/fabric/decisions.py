"""The three decisions behind a large training fabric, each with its arithmetic.

1. Planes and radix: splitting a NIC over P planes multiplies the ports of a switch by P, and hosts grow as (k/2)^L.

2. Packets instead of flows: random choices load links unevenly; the more and the smaller the units, the less.

3. Recovery at the edge: a step waits for its slowest transfer, so rare delays decide, and each failure costs its
stall.

Sources: arXiv:2605.04333 section 2; formulas below, in failure_budget.py and in sizing.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake
from phalanx.io.limits import MAX_SECONDS
from phalanx.network.fabric.fabric_bill import failure_loss, tier_links
from phalanx.network.fabric.fabric_types import Fabric, Switch
from phalanx.network.fabric.failure_budget import (
    EDGE_RECOVERY_S,
    GIVE_UP_S,
    RESTART_S,
    FailureAnswer,
    FailureBudget,
    bypass_cost,
    failure_budget,
    flap_share,
)
from phalanx.network.fabric.sizing import (
    LEAST_RADIX,
    MOST_TIERS,
    ClosShape,
    check_fabric,
    most_hosts,
    size_fabric,
    split_t0,
)
from phalanx.network.fabric.switch_catalogue import find_switches, known_switches, unnamed_switch
from phalanx.units import plural

WHERE = "phalanx fabric decisions"
BOX = "Spectrum-5"  # 51.2 Tb/s, from 64x800G to 512x100G
# Queue pairs per connection that operators of RoCE settle at; the paper saw little gain beyond 8.
QPS = 16
# Units per link when every packet takes a new path: 16 MB of 4 KB packets per port.
PACKETS = 4096
LATE = (1e-7, 1e-6, 1e-5, 1e-4)
# From one round trip to a slow convergence of routing: "seconds or tens of seconds" for a conventional fabric.
RECOVERIES_S = (10e-6, 30e-6, 1e-3, 0.1, 1.0, 10.0, 30.0, 60.0)
EULER = 0.5772156649015329
MOST_PATHS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneRow:
    """The fabric that one number of planes makes of the same box, or an existing fabric."""

    planes: int
    switch: str
    radix: int
    oversubscription: float
    most_hosts: tuple[int, ...]  # with 2, 3 and 4 tiers
    # The fewest that join the hosts; 0 where even four are too few, and then the counts below are 0 too.
    tiers: int
    hops: int
    switches: int
    switches_per_host: float
    optics_per_host: float  # 800G-class module per NIC-wide link end
    full_switches_per_host: float  # by the formula: full bisection, every port in use
    hosts_one_switch_away: int
    lost_per_nic_link: float
    lost_per_t0_t1_link: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRow:
    """The unevenness of uplink loads when units of one kind choose links at random."""

    what: str
    units_per_link: float
    idle_share: float  # links that carry nothing
    max_to_mean: float  # expected, over the uplinks of one T0 in one plane
    worst_of_fabric: float  # expected, over all T0s and planes


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRow:
    """The chance that a step is late, for one chance that a transfer is late."""

    transfer: float
    step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryRow:
    """The cost of failures when each is bypassed after `recovery_s`."""

    recovery_s: float
    seconds_per_event: float
    lost_share: float  # of the cluster, to cables that fail
    lost_gpu_hours_per_day: float
    # At most as much again, to links that flap; None where a flap restarts the job.
    flap_share: float | None
    restarts: bool  # the connection gives up first, and the job restarts


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """The numbers of all three decisions, for one number of GPUs."""

    gpus: int
    nic_gbps: float
    fabric: Fabric
    paths: int
    recovery_s: float
    planes: tuple[PlaneRow, ...]  # at full bisection, with the fewest tiers
    own: PlaneRow  # the row of `fabric`
    # By the formula, both at full bisection: `fabric`'s planes and tiers against the widest ports in three tiers.
    switch_ratio: str
    optics_ratio: str
    # Switches of `fabric` over those of the first of `planes`; None where that one cannot join the hosts.
    counted_switch_ratio: float | None
    counted_optics_ratio: float | None
    loads: tuple[LoadRow, ...]
    # E[max]/mean of as many exponential delays as GPUs: the harmonic number.
    slowest_to_mean: float
    late: tuple[LateRow, ...]
    budget: FailureBudget
    recoveries: tuple[RecoveryRow, ...]


def fabric_decisions(
    gpus: int,
    *,
    nic_gbps: float = 800.0,
    box: str = BOX,
    planes: int | None = None,
    paths: int = 256,
    recovery_s: float = EDGE_RECOVERY_S,
    restart_s: float = RESTART_S[0],
) -> Decisions:
    """Return the numbers of the three decisions; `planes` None takes the most that the box allows."""
    check_fabric(gpus, nic_gbps, ClosShape(planes=1, tiers=2), where=WHERE)
    _check_inputs(paths, recovery_s, restart_s)
    choices = _plane_choices(box, nic_gbps)
    chosen = planes if planes is not None else max(choices)
    if chosen not in choices:
        choices_text = ", ".join(map(str, sorted(choices)))
        why = f"{box} splits a {nic_gbps:g} Gb/s NIC only into whole ports"
        raise mistake(WHERE, plural(chosen, "plane"), why=why, fix=f"use one of {choices_text}")
    switch = choices[chosen]
    tiers = _fewest_tiers(gpus, switch.radix, chosen) or MOST_TIERS
    fabric = size_fabric(gpus, nic_gbps, switch, ClosShape(planes=chosen, tiers=tiers), where=WHERE)
    return _make_decisions(fabric, choices, paths, recovery_s, restart_s)


def decisions_of(
    fabric: Fabric, *, paths: int = 256, recovery_s: float = EDGE_RECOVERY_S, restart_s: float = RESTART_S[0]
) -> Decisions:
    """Return the three decisions for an existing fabric, compared with other splits of the same box."""
    _check_inputs(paths, recovery_s, restart_s)
    if fabric.tiers < 2:
        raise mistake(
            WHERE, f"{fabric.name} has one tier: there is no path to choose", fix="name one of 2 tiers or more"
        )
    shipped = any(switch.box == fabric.switch.box for switch in known_switches())
    choices = _plane_choices(fabric.switch.box, fabric.nic_gbps) if shipped else _plane_splits(fabric)
    return _make_decisions(fabric, {**choices, fabric.planes: fabric.switch}, paths, recovery_s, restart_s)


def _plane_splits(fabric: Fabric) -> dict[int, Switch]:
    """Return splits into fewer planes of a box that only this fabric defines, with fewer but faster ports."""
    radix, planes = fabric.switch.radix, fabric.planes
    plane_counts = [count for count in range(1, planes) if planes % count == 0 and radix * count % planes == 0]
    wide = {count: unnamed_switch(radix * count // planes, fabric.nic_gbps / count) for count in plane_counts}
    return {count: switch for count, switch in wide.items() if switch.radix >= LEAST_RADIX}


def _make_decisions(
    fabric: Fabric, choices: Mapping[int, Switch], paths: int, recovery_s: float, restart_s: float
) -> Decisions:
    """Assemble all numbers of the three decisions for a fabric and the alternative splits of its box."""
    gpus, nic_gbps = fabric.hosts, fabric.nic_gbps
    rows = tuple(_plane_row(gpus, nic_gbps, choices[count], count) for count in sorted(choices))
    # Against the conventional three tiers of the widest ports, both full.
    switch_share = _switches_per_host(fabric.switch.radix, ClosShape(planes=fabric.planes, tiers=fabric.tiers))
    flat_share = _switches_per_host(choices[min(choices)].radix, ClosShape(planes=min(choices), tiers=3))
    switch_ratio, optics_ratio = str(switch_share / flat_share), str(Fraction(fabric.tiers, 3))
    own, flat = _row_of(fabric), rows[0]
    slow = max(RESTART_S[1], restart_s)
    return Decisions(
        gpus=gpus,
        nic_gbps=nic_gbps,
        fabric=fabric,
        paths=paths,
        recovery_s=recovery_s,
        planes=rows,
        own=own,
        switch_ratio=switch_ratio,
        optics_ratio=optics_ratio,
        counted_switch_ratio=own.switches / flat.switches if flat.tiers else None,
        counted_optics_ratio=own.optics_per_host / flat.optics_per_host if flat.tiers else None,
        loads=_load_rows(fabric, paths),
        slowest_to_mean=harmonic_number(gpus),
        late=tuple(LateRow(transfer=chance, step=late_step(chance, gpus)) for chance in LATE),
        budget=failure_budget(fabric, recovery_s=recovery_s, restart_s=(restart_s, slow)),
        recoveries=tuple(recovery_row(fabric, seconds, restart_s) for seconds in sorted({*RECOVERIES_S, recovery_s})),
    )


def harmonic_number(number: int) -> float:
    """Return 1 + 1/2 + ... + 1/N: the expected maximum of N exponential delays over their mean.

    >>> round(harmonic_number(1024), 1), round(harmonic_number(131072), 2)
    (7.5, 12.36)
    """
    if number < 1000:
        return sum(1 / term for term in range(1, number + 1))
    return math.log(number) + EULER + 1 / (2 * number)


def late_step(chance: float, transfers: int) -> float:
    """Return the chance that at least one of the transfers of a step is late.

    >>> [f"{late_step(p, 131072):.0%}" for p in (1e-6, 1e-5, 1e-4)]
    ['12%', '73%', '100%']
    """
    return -math.expm1(transfers * math.log1p(-chance))


def _check_inputs(paths: int, recovery_s: float, restart_s: float) -> None:
    if not 1 <= paths <= MOST_PATHS:
        raise mistake(WHERE, f"{paths:,} paths per connection", fix="use 1 (one flow) to 4096; MRC uses 128 to 256")
    for name, value in (("--recovery-s", recovery_s), ("--restart-s", restart_s)):
        if not 0 <= value <= MAX_SECONDS:
            raise mistake(WHERE, f"{name} {value:g} is out of range", fix=f"use seconds from 0 to {MAX_SECONDS:g}")


def _plane_choices(box: str, nic_gbps: float) -> dict[int, Switch]:
    """Return the configurations of the box that carry the NIC, by their number of planes."""
    configurations = find_switches(box, where=WHERE)
    split = {nic_gbps / switch.port_gbps: switch for switch in configurations}
    choices = {int(planes): switch for planes, switch in split.items() if planes >= 1 and planes == int(planes)}
    if not choices:
        speeds = ", ".join(f"{switch.port_gbps:g}" for switch in configurations)
        problem = f"a NIC of {nic_gbps:g} Gb/s is not a whole number of ports of {box}"
        raise mistake(
            WHERE,
            problem,
            why=f"its port speeds are {speeds} Gb/s",
            fix=f"use --nic-gbps {configurations[0].port_gbps:g}",
        )
    return choices


def _fewest_tiers(gpus: int, radix: int, planes: int) -> int:
    tiers = range(2, MOST_TIERS + 1)
    return next((count for count in tiers if most_hosts(radix, ClosShape(planes=planes, tiers=count)) >= gpus), 0)


def _plane_row(gpus: int, nic_gbps: float, switch: Switch, planes: int) -> PlaneRow:
    """Return the row of one number of planes; where no number of tiers joins the GPUs, its counts are 0."""
    tiers = _fewest_tiers(gpus, switch.radix, planes)
    if tiers:
        return _row_of(size_fabric(gpus, nic_gbps, switch, ClosShape(planes=planes, tiers=tiers), where=WHERE))
    shape = ClosShape(planes=planes, tiers=MOST_TIERS)
    down, up = split_t0(switch.radix, MOST_TIERS, 1.0)
    return PlaneRow(
        planes=planes,
        switch=switch.name,
        radix=switch.radix,
        oversubscription=1.0,
        most_hosts=_hosts_by_tiers(switch.radix, shape),
        tiers=0,
        hops=0,
        switches=0,
        switches_per_host=0.0,
        optics_per_host=0.0,
        full_switches_per_host=float(_switches_per_host(switch.radix, shape)),
        hosts_one_switch_away=down,
        lost_per_nic_link=1 / planes,
        lost_per_t0_t1_link=1 / up,
    )


def _row_of(fabric: Fabric) -> PlaneRow:
    """Count the row on the fabric; only its maximum hosts and the full fabric are formulas."""
    # 31 ports down and 32 up count as full bisection.
    ratio = max(1.0, fabric.oversubscription)
    shape = ClosShape(planes=fabric.planes, tiers=fabric.tiers, oversubscription=ratio, rails=fabric.rails)
    lost = failure_loss(fabric)
    return PlaneRow(
        planes=fabric.planes,
        switch=fabric.switch.name,
        radix=fabric.switch.radix,
        oversubscription=ratio,
        most_hosts=_hosts_by_tiers(fabric.switch.radix, shape),
        tiers=fabric.tiers,
        hops=fabric.hops,
        switches=fabric.switches,
        switches_per_host=fabric.switches / fabric.hosts,
        optics_per_host=2 * sum(tier_links(fabric)) / fabric.planes / fabric.hosts,
        full_switches_per_host=float(_switches_per_host(fabric.switch.radix, shape)),
        hosts_one_switch_away=lost.t0_hosts,
        lost_per_nic_link=lost.nic_link,
        lost_per_t0_t1_link=lost.t0_t1_link,
    )


def _hosts_by_tiers(radix: int, shape: ClosShape) -> tuple[int, ...]:
    return tuple(most_hosts(radix, replace(shape, tiers=count)) for count in range(2, MOST_TIERS + 1))


def _switches_per_host(radix: int, shape: ClosShape) -> Fraction:
    return Fraction(shape.planes * (2 * shape.tiers - 1), radix)


def _load_rows(fabric: Fabric, paths: int) -> tuple[LoadRow, ...]:
    """Return the rows of units per uplink: hosts of a full T0 times units per host and plane, over its uplinks."""
    share = fabric.t0_down / fabric.t0_up
    per_plane = max(1.0, paths / fabric.planes)
    kinds = (
        ("one flow per port (ECMP)", share),
        (f"{QPS} queue pairs per port", share * QPS),
        (f"{paths} paths, {per_plane:g} in a plane", share * per_plane),
        ("every packet by itself", share * PACKETS),
    )
    return tuple(_load_row(label, units, fabric) for label, units in kinds)


def _load_row(what: str, units: float, fabric: Fabric) -> LoadRow:
    return LoadRow(
        what=what,
        units_per_link=units,
        idle_share=idle_share(units),
        max_to_mean=max_to_mean(units, fabric.t0_up),
        worst_of_fabric=max_to_mean(units, fabric.t0_up, groups=fabric.planes * fabric.t0),
    )


def recovery_row(fabric: Fabric, recovery_s: float, restart_s: float) -> RecoveryRow:
    """Return the cost of network failures and of flaps when each is bypassed after `recovery_s`."""
    cost = bypass_cost(fabric, FailureAnswer(recovery_s=recovery_s, restart_s=restart_s))
    return RecoveryRow(
        recovery_s=recovery_s,
        seconds_per_event=cost.seconds_per_event,
        lost_share=cost.lost_share,
        lost_gpu_hours_per_day=cost.lost_gpu_hours_per_day,
        flap_share=None if recovery_s > GIVE_UP_S else flap_share(fabric, recovery_s),
        restarts=recovery_s > GIVE_UP_S,
    )


# Balls into bins: the load of the busiest link over the mean when choices are random.
# m units thrown at n links at random: Levin's identity (1981) gives the chance that no link has more than x as
# P(Poisson(m/n) <= x)^n, corrected for the total being exactly m. The correction needs the chance that n truncated
# Poissons sum to m: exact by convolution up to EXACT_UNITS, their normal approximation beyond. No sampling; seeded
# sampling agrees within 1 % (tests/network/fabric/test_loads.py).


# Enough standard deviations beyond the mean for every number of links below MOST_HOSTS squared.
SPREAD = 16.0
_TINY = 1e-300
# Convolutions of this length take about 10 ms; beyond, the approximation errs by 0.3 % at most.
EXACT_UNITS = 512


def max_to_mean(units_per_link: float, links: int, *, groups: int = 1) -> float:
    """Return the expected load of the busiest link over the mean, over `groups` independent sets of `links`.

    >>> [round(max_to_mean(units, 256), 1) for units in (1, 16, 256, 4096)]
    [4.8, 1.8, 1.2, 1.0]
    """
    if links < 1 or groups < 1 or not (math.isfinite(units_per_link) and units_per_link > 0):
        load = f"{units_per_link:g} units on each of {links:,} links"
        raise mistake("fabric", f"{load} is no load", fix="use 1 or more of each")
    if links == 1:
        return 1.0
    first_level = math.floor(units_per_link)
    last_level = math.ceil(units_per_link + SPREAD * math.sqrt(units_per_link) + SPREAD)
    levels = np.arange(first_level, last_level + 1, dtype=np.float64)
    at_most = _chance_at_most(levels, units_per_link, links) ** groups
    # E[max] is the sum over x of P(max > x), which is 1 below the mean.
    return float(first_level + np.sum(1.0 - at_most)) / units_per_link


def idle_share(units_per_link: float) -> float:
    """Return the share of links that carry nothing: 1/e for one unit per link."""
    return math.exp(-units_per_link)


def _chance_at_most(levels: NDArray[np.float64], mean: float, links: int) -> NDArray[np.float64]:
    """Return the chance that no link carries more than each level, by Levin's identity."""
    # Imported here because scipy.special takes a quarter of a second to load.
    from scipy.special import pdtr

    under = np.maximum(pdtr(levels, mean), _TINY)
    once = np.where(levels >= 1, pdtr(np.maximum(levels - 1, 0), mean), 0.0)
    twice = np.where(levels >= 2, pdtr(np.maximum(levels - 2, 0), mean), 0.0)
    if mean * links <= EXACT_UNITS and mean * links == int(mean * links):
        log_total = [_log_exact(int(level), int(mean * links), mean, links) for level in levels]
        chance: NDArray[np.float64] = np.exp(np.minimum(np.array(log_total), 0.0))
    else:
        # Mean of the Poisson truncated at the level.
        truncated_mean = mean * once / under
        spread = np.maximum(mean**2 * twice / under + truncated_mean - truncated_mean**2, _TINY)
        deviation = links * (mean - truncated_mean)
        log_chance = links * np.log(under) - deviation**2 / (2 * links * spread) + 0.5 * np.log(mean / spread)
        chance = np.exp(np.minimum(log_chance, 0.0))
    # Not every link can be below the mean.
    chance[levels < mean] = 0.0
    return chance


def _log_exact(level: int, units: int, mean: float, links: int) -> float:
    """Return the log of the chance that `units` on `links` leave no link above the level.

    It is an n-fold convolution of truncated Poisson distributions.
    """
    counts = np.arange(min(level, units) + 1)
    single = np.exp(counts * math.log(mean) - mean - np.array([math.lgamma(count + 1) for count in counts]))
    total = np.ones(1)
    for bit in bin(links)[2:]:
        total = np.convolve(total, total)[: units + 1]
        if bit == "1":
            total = np.convolve(total, single)[: units + 1]
    reached = float(total[units]) if len(total) > units else 0.0
    # The same without a level: Poisson(m) at m.
    log_unbounded = units * math.log(units) - units - math.lgamma(units + 1)
    return math.log(max(reached, _TINY)) - log_unbounded
