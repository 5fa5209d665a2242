"""Rows about max-min fair rates: the fluid engine."""

from __future__ import annotations

import functools
import re

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.fluid import Rates, solve
from phalanx.sim.matrices import permutation
from phalanx.sim.routes import Routing, by_flow, by_qp
from phalanx.sim.validate.outcome import Context, Outcome, Reader, reproduced, skipped
from phalanx.sim.validate.table import Row
from phalanx.sim.validate.words import count, pair

MEAN = 0.02 / 0.50  # the design asks for 0.50 ± 0.02
EXTREME = 0.25  # the slowest of 131,072 is one flow of one permutation: 1/7, 1/8 or 1/9 of a link
MOST_HOSTS = 131_072
PORT_GBPS = 100.0
RADIX = 512  # of 100G, where a row names none


def mean_rate(row: Row, _: Context) -> Outcome | None:
    """Mean over flows of a permutation."""
    rates = _rates(row)
    return (
        rates
        if isinstance(rates, Outcome) or rates is None
        else reproduced(row, rates.mean, "sim/fluid, one seed", tolerance=MEAN)
    )


def slowest_rate(row: Row, _: Context) -> Outcome | None:
    """The slowest flow of one."""
    rates = _rates(row)
    return (
        rates
        if isinstance(rates, Outcome) or rates is None
        else reproduced(row, rates.slowest, "sim/fluid, one seed", tolerance=EXTREME)
    )


def _rates(row: Row) -> Rates | Outcome | None:
    hosts = count(row.conditions, "hosts?")
    if not hosts:
        return None
    if hosts > MOST_HOSTS:
        return skipped(row, f"{hosts:,} hosts are more than this table is run for ({MOST_HOSTS:,})")
    qps = re.search(r"(\d+) QPs? over (\d+) planes?", row.quantity)
    routing = by_qp(int(qps[1])) if qps else by_flow()
    planes = int(qps[2]) if qps else 1
    return _solve(_spec(row.conditions, hosts, planes), hosts, routing)


def _spec(text: str, hosts: int, planes: int) -> str:
    nic = f"{hosts}x{planes * PORT_GBPS:g}G/{planes}p"
    if found := pair(text, " leaf"):
        return f"clos2:{nic}/{2 * hosts // found[0]}/wide"
    down = count(text, "hosts? per T0")
    return f"clos2:{nic}/{2 * down if down else RADIX}"


@functools.lru_cache(maxsize=8)
def _solve(spec: str, hosts: int, routing: Routing) -> Rates:
    return solve(parse_fabric(spec), permutation(hosts, 1.0), routing=routing)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^max-min mean rate", mean_rate),
    (r"^max-min slowest flow", slowest_rate),
)
