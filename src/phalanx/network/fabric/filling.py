"""How many switches of each tier a partly filled plane needs.

The rule: whole T0s, equal pods, and in every tier above so few switches that each switch below still has the same
number of links to each of them (their number divides its uplinks). Equal links are what ECMP, spraying and static
routes all assume; the price is ports that stay empty. Where a few T0s more per pod make the numbers divide better,
the filling with the fewest switches in all is taken.
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
            yield per_pod, pods
            continue
        for per_block in _even(pods, radix // 2, 1):
            yield per_pod, per_block, math.ceil(pods / per_block)


def _even(number: int, limit: int, step: int) -> list[int]:
    """Sizes of equal blocks, the smallest that does to the largest allowed, rounded to ever more factors of two."""
    least = math.ceil(number / math.ceil(number / limit))
    factors = [step << power for power in range(limit.bit_length())]
    sizes = {factor * math.ceil(least / factor) for factor in factors} | {limit}
    return sorted(size for size in sizes if size <= limit)


def _count(joined: Sequence[int], up: int, radix: int, *, wide: bool) -> Counts:
    """Switches from the bottom up. joined[j]: switches of tier j that meet in the tier above, in each group."""
    switches, ups, group = [math.prod(joined)], [up], 1
    for level, below in enumerate(joined):
        top = level == len(joined) - 1
        ports = radix if top else radix // 2
        above = ups[-1] if wide else _divisor_from(ups[-1], math.ceil(below * ups[-1] / ports))
        group *= above
        switches.append(math.prod(joined[level + 1 :]) * group)
        ups.append(0 if top else below * ups[-1] // above)
    return Counts(switches=tuple(switches), up=tuple(ups), pods=math.prod(joined[1:]))


@functools.cache
def _divisor_from(number: int, least: int) -> int:
    """The smallest divisor of a number that is not below `least`."""
    return next(one for one in range(max(1, least), number + 1) if number % one == 0)
