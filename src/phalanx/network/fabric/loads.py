"""Balls into bins: how much more than its share the busiest link carries when choices are random.

m units thrown at n links at random: Levin's identity (1981) gives the chance that no link has more than x as
P(Poisson(m/n) <= x)^n, corrected for the total being exactly m. The correction needs the chance that n truncated
Poissons sum to m: exact by convolution up to EXACT_UNITS, their normal approximation beyond. No sampling; against
seeded sampling it is within 1 % (tests/network/fabric/test_loads.py).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake

# Enough standard deviations beyond the mean for every number of links below MOST_HOSTS squared.
SPREAD = 16.0
_TINY = 1e-300
EXACT_UNITS = 512  # convolutions of this length take some 10 ms; beyond, the approximation errs by 0.3 % at most


def max_to_mean(units_per_link: float, links: int, *, groups: int = 1) -> float:
    """Expected load of the busiest link over the mean, over `groups` independent sets of `links`.

    >>> [round(max_to_mean(units, 256), 1) for units in (1, 16, 256, 4096)]
    [4.8, 1.8, 1.2, 1.0]
    """
    if links < 1 or groups < 1 or not (math.isfinite(units_per_link) and units_per_link > 0):
        what = f"{units_per_link:g} units on each of {links:,} links"
        raise mistake("fabric", f"{what} is no load", fix="use 1 or more of each")
    if links == 1:
        return 1.0
    first = math.floor(units_per_link)
    last = math.ceil(units_per_link + SPREAD * math.sqrt(units_per_link) + SPREAD)
    levels = np.arange(first, last + 1, dtype=np.float64)
    at_most = _chance_at_most(levels, units_per_link, links) ** groups
    # E[max] is the sum over x of P(max > x); below the mean that is 1
    return float(first + np.sum(1.0 - at_most)) / units_per_link


def idle_share(units_per_link: float) -> float:
    """Share of links that nothing falls on: 1/e for one unit per link."""
    return math.exp(-units_per_link)


def _chance_at_most(levels: NDArray[np.float64], mean: float, links: int) -> NDArray[np.float64]:
    from scipy.special import pdtr  # a quarter of a second: only when asked for

    under = np.maximum(pdtr(levels, mean), _TINY)
    once = np.where(levels >= 1, pdtr(np.maximum(levels - 1, 0), mean), 0.0)
    twice = np.where(levels >= 2, pdtr(np.maximum(levels - 2, 0), mean), 0.0)
    if mean * links <= EXACT_UNITS and mean * links == int(mean * links):
        log_total = [_log_exact(int(level), int(mean * links), mean, links) for level in levels]
        chance: NDArray[np.float64] = np.exp(np.minimum(np.array(log_total), 0.0))
    else:
        kept = mean * once / under  # mean of the Poisson cut off at the level
        spread = np.maximum(mean**2 * twice / under + kept - kept**2, _TINY)
        off = links * (mean - kept)
        log_chance = links * np.log(under) - off**2 / (2 * links * spread) + 0.5 * np.log(mean / spread)
        chance = np.exp(np.minimum(log_chance, 0.0))
    chance[levels < mean] = 0.0  # not every link can be below the mean
    return chance


def _log_exact(level: int, units: int, mean: float, links: int) -> float:
    """Log of the chance that `units` on `links` leave none above the level: n-fold convolution of cut-off Poissons."""
    counts = np.arange(min(level, units) + 1)
    one = np.exp(counts * math.log(mean) - mean - np.array([math.lgamma(count + 1) for count in counts]))
    total = np.ones(1)
    for bit in bin(links)[2:]:
        total = np.convolve(total, total)[: units + 1]
        if bit == "1":
            total = np.convolve(total, one)[: units + 1]
    reached = float(total[units]) if len(total) > units else 0.0
    whole = units * math.log(units) - units - math.lgamma(units + 1)  # the same without a level: Poisson(m) at m
    return math.log(max(reached, _TINY)) - whole
