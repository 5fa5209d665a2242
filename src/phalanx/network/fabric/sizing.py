"""The size of a fabric that joins N hosts: a folded Clos of a chosen shape; UserError where the switch cannot build it.

Full, L tiers of radix k join 2·(k/2)^L hosts, and each plane has (2L-1)·(k/2)^(L-1) switches (arXiv:2605.04333
section 2). Partly filled planes are counted by fill_plane below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import UserError, mistake
from phalanx.network.fabric.fabric_types import Fabric, Switch
from phalanx.units import plural

MOST_TIERS = 4
# Beyond any plan and within exact integers: a larger number is a typing error.
MOST_HOSTS = 10**9
LEAST_RADIX, MOST_RADIX = 4, 65536  # two ports down and two up; 128 times the widest box
# A NIC as fast as the fastest switch (Tomahawk 6), 64 times the fastest NIC sold.
MOST_NIC_GBPS = 102_400.0
MOST_PLANES = 1024  # lanes of the widest chip
MOST_NAME = 120  # characters of a fabric or a box: a cell of a table
MOST_WATTS, MOST_USD = 1e6, 1e9  # of one switch: a megawatt and a billion dollars are typing errors
WHERE = "fabric"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosShape:
    """The choices about a fabric other than its hosts and its switch."""

    planes: int
    tiers: int
    oversubscription: float = 1.0
    rails: int = 1
    # As many switches above a tier as uplinks, one link to each, though fewer switches would do.
    wide: bool = False


def split_t0(radix: int, tiers: int, oversubscription: float) -> tuple[int, int]:
    """Return a T0's ports down and up; the ratio never exceeds the oversubscription.

    >>> split_t0(512, 2, 1.0), split_t0(64, 2, 3.0), split_t0(64, 2, 2.0), split_t0(64, 1, 1.0)
    ((256, 256), (48, 16), (42, 22), (64, 0))
    """
    if tiers == 1:
        return radix, 0
    # The epsilon: 512 / (1 + 341/171) is 171, and not slightly more.
    up = math.ceil(radix / (1 + oversubscription) - 1e-9)
    return radix - up, up


def most_hosts(radix: int, shape: ClosShape) -> int:
    """Return the largest number of hosts that a shape of this radix joins.

    >>> [most_hosts(k, ClosShape(planes=1, tiers=t)) for k, t in ((512, 2), (256, 2), (144, 2), (64, 3), (64, 4))]
    [131072, 32768, 10368, 65536, 2097152]
    """
    down, _ = split_t0(radix, shape.tiers, shape.oversubscription)
    if shape.tiers == 1:
        return down
    if shape.tiers == 2:
        return down * whole_groups(radix, shape.rails)
    above: int = (radix // 2) ** (shape.tiers - 3)
    return down * whole_groups(radix // 2, shape.rails) * radix * above


def size_fabric(
    hosts: int, nic_gbps: float, switch: Switch, shape: ClosShape, *, name: str = "", where: str = WHERE
) -> Fabric:
    """Return the smallest fabric of this shape for `hosts` NICs; raises UserError where the switch cannot build it."""
    check_fabric(hosts, nic_gbps, shape, where=where)
    if abs(nic_gbps / shape.planes - switch.port_gbps) > 1e-6:
        raise _wrong_speed(nic_gbps, shape, switch, where)
    if shape.planes > MOST_PLANES:
        raise mistake(where, f"{shape.planes:,} planes", fix=f"use at most {MOST_PLANES:,}; 8 are built")
    if switch.radix < LEAST_RADIX:
        raise mistake(where, f"a switch of {switch.radix} ports cannot branch", fix=f"use {LEAST_RADIX} ports or more")
    if switch.radix > MOST_RADIX:
        raise mistake(where, f"no switch has {switch.radix:,} ports", fix=f"use at most {MOST_RADIX:,}; 512 are sold")
    if most_hosts(switch.radix, shape) < hosts:
        raise too_many(hosts, switch, shape, where=where)
    down, up = split_t0(switch.radix, shape.tiers, shape.oversubscription)
    # Server i has NIC r on T0 r of its group.
    t0 = shape.rails * math.ceil(hosts / (shape.rails * down))
    counts = fill_plane(t0, up, switch.radix, tiers=shape.tiers, rails=shape.rails, wide=shape.wide)
    return Fabric(
        name=name or _fabric_name(hosts, nic_gbps, switch, shape),
        hosts=hosts,
        nic_gbps=nic_gbps,
        planes=shape.planes,
        tiers=shape.tiers,
        switch=switch,
        oversubscription=down / up if up else 1.0,
        rails=shape.rails,
        t0_down=down,
        t0_up=up,
        t0=counts.of_tier(0),
        t1=counts.of_tier(1),
        t2=counts.of_tier(2),
        t3=counts.of_tier(3),
        pods=counts.pods,
        t1_up=counts.up_of_tier(1),
        t2_up=counts.up_of_tier(2),
    )


def check_fabric(hosts: int, nic_gbps: float, shape: ClosShape, *, where: str = WHERE) -> None:
    """Raise UserError for hosts, NIC speeds and shapes that no switch can build."""
    if not 2 <= hosts <= MOST_HOSTS:
        fix = "use 2 or more" if hosts < 2 else f"use at most {MOST_HOSTS:,}; the largest fabric reported has 131,072"
        raise mistake(where, f"{hosts:,} GPUs are not a fabric", fix=fix)
    if not (math.isfinite(nic_gbps) and nic_gbps > 0):
        raise mistake(where, f"a NIC of {nic_gbps:g} Gb/s carries nothing", fix="use 100, 200, 400, 800 or 1600")
    if nic_gbps > MOST_NIC_GBPS:
        fix = f"use at most {MOST_NIC_GBPS:,.0f}; 1,600 are sold"
        raise mistake(where, f"no NIC has {nic_gbps:g} Gb/s", why="that is beyond the fastest switch", fix=fix)
    if shape.planes < 1:
        raise mistake(where, plural(shape.planes, "plane"), fix="use 1, 2, 4 or 8")
    if not 1 <= shape.tiers <= MOST_TIERS:
        raise mistake(
            where, plural(shape.tiers, "tier"), why="a path of five tiers crosses nine switches", fix="use 1 to 4"
        )
    _check_ratio(shape, where)
    _check_rails(hosts, shape, where)


def _check_ratio(shape: ClosShape, where: str) -> None:
    ratio = shape.oversubscription
    if not (math.isfinite(ratio) and 1 <= ratio <= 64):
        why = "below 1 a T0 has more uplinks than hosts can fill" if ratio < 1 else "beyond 64 hardly anything goes up"
        raise mistake(where, f"an oversubscription of {ratio:g}", why=why, fix="use 1 (full bisection), 2 or 4")
    if ratio > 1 and shape.tiers == 1:
        raise mistake(where, "one tier has no uplinks to oversubscribe", fix="use 2 tiers, or an oversubscription of 1")


def _check_rails(hosts: int, shape: ClosShape, where: str) -> None:
    """Raise UserError for rails that do not divide the hosts, or that no switch joins."""
    rails = shape.rails
    if rails < 1:
        raise mistake(where, plural(rails, "rail"), fix="use 1 for none, or the GPUs of a server, as 8")
    if rails > 1 and shape.tiers == 1:
        raise mistake(
            where,
            f"one tier with {plural(rails, 'rail')} is {rails} islands, not one fabric",
            why="no switch joins the rails, so only NVLink inside a server does",
            fix="use 2 tiers, or 1 rail",
        )
    if hosts % rails:
        lower = hosts - hosts % rails
        near = f"{lower:,} or {lower + rails:,}" if lower else f"{rails:,}"
        why = f"a server has one GPU on each of {plural(rails, 'rail')}"
        raise mistake(where, f"{hosts:,} GPUs are not whole servers of {rails}", why=why, fix=f"use {near} GPUs")


def _wrong_speed(nic_gbps: float, shape: ClosShape, switch: Switch, where: str) -> UserError:
    planes = nic_gbps / switch.port_gbps
    fits = planes >= 1 and planes == int(planes)
    fix = f"use {plural(int(planes), 'plane')}" if fits else f"use a NIC of a multiple of {switch.port_gbps:g} Gb/s"
    return mistake(
        where,
        f"{plural(shape.planes, 'plane')} make ports of {nic_gbps / shape.planes:g} Gb/s of a {nic_gbps:g} Gb/s NIC",
        why=f"{switch.name} has ports of {switch.port_gbps:g} Gb/s",
        fix=fix,
    )


def too_many(hosts: int, switch: Switch, shape: ClosShape, *, where: str = WHERE, fix: str = "") -> UserError:
    """Return the error for more hosts than the radix can join."""
    most = most_hosts(switch.radix, shape)
    return mistake(
        where,
        f"{hosts:,} GPUs do not fit: {plural(shape.tiers, 'tier')} of {switch.name} join at most {most:,}",
        why=_reach_text(switch, shape, most),
        fix=fix or _deeper_text(hosts, switch, shape) or "use a switch with more ports, or more planes",
    )


def _reach_text(switch: Switch, shape: ClosShape, most: int) -> str:
    """Explain the largest number of hosts by the formula or by ports."""
    radix = switch.radix
    limit = ""
    if switch.lanes > radix:
        limit = f"; it has {switch.lanes} lanes of {switch.port_gbps:g}G but only {radix} logical ports"
    if shape.tiers == 1:
        return f"one switch has {radix} ports{limit}"
    if shape.oversubscription == 1 and shape.rails == 1:
        return f"at full bisection it is 2·({radix}/2)^{shape.tiers} = {most:,}{limit}"
    down, _ = split_t0(radix, shape.tiers, shape.oversubscription)
    return f"{most // down:,} T0s with {down} ports down{limit}"


def _deeper_text(hosts: int, switch: Switch, shape: ClosShape) -> str:
    """Return the advice to use more tiers, if some number of tiers joins the hosts; else an empty string."""
    for tiers in range(shape.tiers + 1, MOST_TIERS + 1):
        most = most_hosts(switch.radix, replace(shape, tiers=tiers))
        if most >= hosts:
            return f"use {plural(tiers, 'tier')}, which join up to {most:,}"
    return ""


def _fabric_name(hosts: int, nic_gbps: float, switch: Switch, shape: ClosShape) -> str:
    ratio = "" if shape.oversubscription == 1 else f"/{shape.oversubscription:g}:1"
    rails = "" if shape.rails == 1 else f"/{shape.rails}r"
    wide = "/wide" if shape.wide else ""
    return f"clos{shape.tiers}:{hosts}x{nic_gbps:g}G/{shape.planes}p/{switch.radix}{ratio}{rails}{wide}"


# The number of switches of each tier in a partly filled plane.
# The rule: whole T0s, equal pods, and above them as few switches as have enough ports. A switch of the top tier has
# equally many links to every switch below (so traffic that goes up by any link can come down), and a switch of a
# middle tier has equally many from every switch below as every other of its tier (so pods stay equal). ECMP, spraying
# and static routes assume that; the price is unused ports. Pods are as few as possible, since a failed T1 costs a
# large pod a smaller share. Where a few more T0s per pod make the numbers divide better, the filling with the fewest
# switches is used.


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchCounts:
    """Switches of one plane by tier, uplinks of one switch by tier, and pods."""

    switches: tuple[int, ...]
    up: tuple[int, ...]
    pods: int

    def of_tier(self, tier: int) -> int:
        """Return the number of switches of a tier; 0 where the plane has no such tier."""
        return self.switches[tier] if tier < len(self.switches) else 0

    def up_of_tier(self, tier: int) -> int:
        """Return the uplinks of a switch of that tier; 0 at the top."""
        return self.up[tier] if tier < len(self.up) else 0


def fill_plane(t0: int, up: int, radix: int, *, tiers: int, rails: int = 1, wide: bool = False) -> SwitchCounts:
    """Return the filling with the fewest switches for at least `t0` T0s with `up` uplinks each.

    >>> fill_plane(512, 256, 512, tiers=2).switches, fill_plane(256, 256, 512, tiers=2).switches  # full, and half full
    ((512, 256), (256, 128))
    """
    if tiers == 1:
        return SwitchCounts(switches=(1,), up=(0,), pods=1)
    choices = (_count_switches(joined, up, radix, wide=wide) for joined in _nested_splits(t0, radix, tiers, rails))
    return min(choices, key=lambda counts: (sum(counts.switches), counts.switches[0]))


def whole_groups(number: int, rails: int) -> int:
    """Return the largest multiple of `rails` up to `number`: a group of rails lies in one pod."""
    return number - number % rails


def _nested_splits(t0: int, radix: int, tiers: int, rails: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to nest the T0s: T0s per pod, pods per block of the next level, and switches below the top tier."""
    if tiers == 2:
        yield (t0,)
        return
    for per_pod in _even_blocks(t0, whole_groups(radix // 2, rails), rails):
        pods = math.ceil(t0 / per_pod)
        if tiers == 3:
            nested: list[tuple[int, ...]] = [(per_pod, pods)]
        else:
            nested = [
                (per_pod, block_size, math.ceil(pods / block_size)) for block_size in _even_blocks(pods, radix // 2, 1)
            ]
        yield from (sizes for sizes in nested if sizes[-1] <= radix)


def _even_blocks(number: int, limit: int, step: int) -> list[int]:
    """Return sizes of the fewest equal blocks: the smallest that suffices, rounded up to multiples of powers of two."""
    least = math.ceil(number / math.ceil(number / limit))
    factors = [step << power for power in range(limit.bit_length())]
    sizes = {factor * math.ceil(least / factor) for factor in factors} | {limit}
    return sorted(size for size in sizes if size <= limit)


def _count_switches(joined: Sequence[int], up: int, radix: int, *, wide: bool) -> SwitchCounts:
    """Count the switches from the bottom up.

    joined[j] is the number of switches of tier j that meet in the tier above, in each group.
    """
    switches, ups, group = [math.prod(joined)], [up], 1
    for level, below in enumerate(joined):
        top = level == len(joined) - 1
        if wide:
            above = ups[-1]
        elif top:
            # As many links to each switch below as the ports allow.
            above = math.ceil(ups[-1] / (radix // below))
        else:
            above = _divisor_from(ups[-1], math.ceil(below * ups[-1] / (radix // 2)))
        group *= above
        switches.append(math.prod(joined[level + 1 :]) * group)
        ups.append(0 if top else below * ups[-1] // above)
    return SwitchCounts(switches=tuple(switches), up=tuple(ups), pods=math.prod(joined[1:]))


@functools.cache
def _divisor_from(number: int, least: int) -> int:
    """Return the smallest divisor of a number that is at least `least`."""
    return next(candidate for candidate in range(max(1, least), number + 1) if number % candidate == 0)
