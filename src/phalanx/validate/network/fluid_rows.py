"""Rows about max-min fair rates: the fluid engine."""

from __future__ import annotations

import functools

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.fluid import Rates, solve
from phalanx.sim.matrices import permutation
from phalanx.sim.routes import Routing, by_flow, by_qp
from phalanx.validate.network.outcome import Context, Outcome, Reader, reproduced
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, pair, said

MEAN = 0.02 / 0.50  # the design asks for 0.50 ± 0.02
EXTREME = 0.25  # the slowest of 131,072 is one flow of one permutation: 1/7, 1/8 or 1/9 of a link
MOST_HOSTS = 131_072
PORT_GBPS = 100.0
RADIX = 512  # of 100G, where a row names none


def mean_rate(row: Row, _: Context) -> Outcome:
    """Mean over flows of a permutation."""
    return reproduced(row, _rates(row).mean, "sim/fluid, one seed", tolerance=MEAN)


def slowest_rate(row: Row, _: Context) -> Outcome:
    """The slowest flow of one."""
    return reproduced(row, _rates(row).slowest, "sim/fluid, one seed", tolerance=EXTREME)


def _rates(row: Row) -> Rates:
    text = f"{row.conditions}, {row.quantity}"
    hosts = said(count(row.conditions, r"hosts?(?! per\b)"), "how many hosts")
    if hosts > MOST_HOSTS:
        raise NotSaid(f"a size that is run here: {hosts:,} hosts are more than {MOST_HOSTS:,}")
    qps = count(text, "(?:QPs?|paths?)(?: per flow| over)") or 1
    return _solve(_spec(text, hosts, count(text, "planes?") or 1), hosts, by_qp(qps) if qps > 1 else by_flow())


def _spec(text: str, hosts: int, planes: int) -> str:
    nic = f"{hosts}x{planes * PORT_GBPS:g}G/{planes}p"
    if found := pair(text, " leaf"):
        return f"clos2:{nic}/{2 * hosts // found[0]}/wide"
    down = count(text, "hosts? per T0")
    up = count(text, "T1s?") or down
    if not down or not up:
        return f"clos2:{nic}/{RADIX}"
    return f"clos2:{nic}/{down + up}/{down / up:g}:1/wide" if up != down else f"clos2:{nic}/{2 * down}"


@functools.lru_cache(maxsize=8)
def _solve(spec: str, hosts: int, routing: Routing) -> Rates:
    return solve(parse_fabric(spec), permutation(hosts, 1.0), routing=routing)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^max-min mean rate", mean_rate),
    (r"^max-min slowest flow", slowest_rate),
)
