"""How many switches of each tier a partly filled plane needs.

The rule: whole T0s, equal pods, and above them as few switches as have the ports, such that a switch of the top tier
has equally many links to every switch below (so what goes up by any link can come down), and a switch of a middle tier
equally many from every switch below as every other of its tier (so pods stay equal). ECMP, spraying and static routes
all assume that; the price is ports that stay empty. Pods are as few as can be, since a large pod has many T1s to lose
one of; where a few T0s more per pod make the numbers divide better, the filling with the fewest switches is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Switches of one plane by tier, uplinks of one switch by tier, and pods."""

    switches: tuple[int, ...]
    up: tuple[int, ...]
    pods: int

    def of_tier(self, tier: int) -> int:
        """Switches of a tier; 0 where there is none."""
        return self.switches[tier] if tier < len(self.switches) else 0

    def up_of_tier(self, tier: int) -> int:
        """Uplinks of a switch of that tier; 0 at the top."""
        return self.up[tier] if tier < len(self.up) else 0


def fill(t0: int, up: int, radix: int, *, tiers: int, rails: int = 1, wide: bool = False) -> Counts:
    """The filling with the fewest switches for at least `t0` T0s with `up` uplinks each.

    >>> fill(512, 256, 512, tiers=2).switches, fill(256, 256, 512, tiers=2).switches  # full, and half full
    ((512, 256), (256, 128))
    """
    if tiers == 1:
        return Counts(switches=(1,), up=(0,), pods=1)
    choices = (_count(joined, up, radix, wide=wide) for joined in _splits(t0, radix, tiers, rails))
    return min(choices, key=lambda one: (sum(one.switches), one.switches[0]))


def whole(number: int, rails: int) -> int:
    """What is left of a number in whole groups of rails: a group lies in one pod."""
    return number - number % rails


def _splits(t0: int, radix: int, tiers: int, rails: int) -> Iterator[tuple[int, ...]]:
    """Ways to nest the T0s: T0s per pod, pods per block of the next level, and what the top tier joins."""
    if tiers == 2:
        yield (t0,)
        return
    for per_pod in _even(t0, whole(radix // 2, rails), rails):
        pods = math.ceil(t0 / per_pod)
        if tiers == 3:
            nested: list[tuple[int, ...]] = [(per_pod, pods)]
        else:
            nested = [(per_pod, size, math.ceil(pods / size)) for size in _even(pods, radix // 2, 1)]
        yield from (one for one in nested if one[-1] <= radix)


def _even(number: int, limit: int, step: int) -> list[int]:
    """Sizes of the fewest equal blocks: the smallest that does, rounded to ever more factors of two."""
    least = math.ceil(number / math.ceil(number / limit))
    factors = [step << power for power in range(limit.bit_length())]
    sizes = {factor * math.ceil(least / factor) for factor in factors} | {limit}
    return sorted(size for size in sizes if size <= limit)


def _count(joined: Sequence[int], up: int, radix: int, *, wide: bool) -> Counts:
    """Switches from the bottom up. joined[j]: switches of tier j that meet in the tier above, in each group."""
    switches, ups, group = [math.prod(joined)], [up], 1
    for level, below in enumerate(joined):
        top = level == len(joined) - 1
        if wide:
            above = ups[-1]
        elif top:
            above = math.ceil(ups[-1] / (radix // below))  # as many links to each one below as the ports allow
        else:
            above = _divisor_from(ups[-1], math.ceil(below * ups[-1] / (radix // 2)))
        group *= above
        switches.append(math.prod(joined[level + 1 :]) * group)
        ups.append(0 if top else below * ups[-1] // above)
    return Counts(switches=tuple(switches), up=tuple(ups), pods=math.prod(joined[1:]))


@functools.cache
def _divisor_from(number: int, least: int) -> int:
    """The smallest divisor of a number that is not below `least`."""
    return next(one for one in range(max(1, least), number + 1) if number % one == 0)
