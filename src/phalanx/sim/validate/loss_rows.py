"""Rows about random loss on every NIC: the packet engine, only when asked for (five CPU-seconds each)."""

from __future__ import annotations

import functools
import math

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.matrices import shift
from phalanx.sim.packets.faults import Fault
from phalanx.sim.packets.run import run
from phalanx.sim.packets.transport import MRC
from phalanx.sim.validate.outcome import Context, Outcome, Reader, reproduced, skipped
from phalanx.sim.validate.table import Row
from phalanx.sim.validate.words import count, number

# arXiv:2605.04333 section 5.2.7 is its Cluster C: 400G NICs in four planes. Small T0s, so that every flow goes over T1.
FABRIC = "clos2:{hosts}x400G/4p/16/wide"
PLANES, T0_HOSTS = 4, 8
NBYTES = 128e6  # "large messages": a round trip is a thousandth of the transfer
MOST_HOSTS = 128
TOLERANCE = 0.07 / 0.33  # the design asks for 0.33 ± 0.07


def lossy(row: Row, context: Context) -> Outcome | None:
    """Mean throughput of one step of a ring over T1s, as a share of the same without loss."""
    percent, hosts = number(row.quantity, r"at ([\d.]+) percent loss"), count(row.conditions, "GPUs?")
    if percent is None or not hosts or hosts > MOST_HOSTS or not 0 <= percent < 100:
        return None
    if not context.simulate:
        return skipped(row, "needs --simulate")
    ours = _mean_s(hosts, 0.0) / _mean_s(hosts, percent / 100)
    return reproduced(row, ours, f"sim/packets, {NBYTES / 1e6:g} MB per connection", tolerance=TOLERANCE)


@functools.lru_cache(maxsize=16)
def _mean_s(hosts: int, loss: float) -> float:
    each = 1 - math.sqrt(1 - loss)  # on the sender's and on the receiver's NIC link, so that a path loses `loss`
    faults = tuple(
        Fault(part="nic", number=host, plane=plane, loss=each) for host in range(hosts) for plane in range(PLANES)
    )
    fabric = parse_fabric(FABRIC.format(hosts=hosts))
    step = min(T0_HOSTS, hosts // 2)
    return run(fabric, shift(hosts, NBYTES, step=step), transport=MRC, faults=faults if loss else ()).mean_s


READERS: tuple[tuple[str, Reader], ...] = ((r"^MRC fraction at [\d.]+ percent loss", lossy),)
