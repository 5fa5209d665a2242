"""Rows about random loss on every NIC: the packet engine in steady state."""

from __future__ import annotations

import functools
import math

import numpy as np

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.matrices import shift
from phalanx.sim.packets.faults import Fault
from phalanx.sim.packets.run import run
from phalanx.sim.packets.transport import MRC
from phalanx.validate.network.outcome import (
    Context,
    Outcome,
    Reader,
    Simulation,
    Wanted,
    calibrated,
    reproduced,
    skipped,
)
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import count, number, said

# arXiv:2605.04333 section 5.2.7 is its Cluster C: 400G NICs in four planes. Small T0s, so that every flow goes over T1.
# Nothing but the loss is in a flow's way, so more hosts than these give the same mean.
FABRIC, PLANES, T0_HOSTS, MOST_HOSTS = "clos2:{hosts}x400G/4p/16/wide", 4, 8, 16
NBYTES = 1e9  # "large messages"
SAMPLE_S = 1e-3
TOLERANCE = 0.07 / 0.33  # the design asks for 0.33 ± 0.07
CALIBRATED = 1.0  # per cent: `Transport.probe_s` was set there
CPU_S = 6.0  # of a pair of runs, measured on 2026-11-15


def lossy(row: Row, context: Context) -> Outcome:
    """Mean throughput of one step of a ring over T1s, as a share of the same without loss."""
    percent, hosts = _asked(row)
    if reason := context.refuses(_simulation(percent, hosts)):
        return skipped(row, reason)
    ours = _mean_s(hosts, 0.0) / _mean_s(hosts, percent / 100)
    note = f"sim/packets, {NBYTES / 1e9:g} GB per connection, {hosts} hosts"
    if percent == CALIBRATED:
        return calibrated(row, ours, f"{note}; the time between probes was set here", tolerance=TOLERANCE)
    return reproduced(row, ours, note, tolerance=TOLERANCE)


def _asked(row: Row) -> tuple[float, int]:
    percent = number(row.quantity, r"at ([\d.]+) percent loss")
    hosts = said(count(row.conditions, "(?:GPUs?|hosts?)"), "how many GPUs")
    return min(said(percent, "how many per cent are lost"), 99.0), max(2, min(hosts, MOST_HOSTS))


@functools.lru_cache(maxsize=16)
def _mean_s(hosts: int, loss: float) -> float:
    each = 1 - math.sqrt(1 - loss)  # on the sender's and on the receiver's NIC link, so that a path loses `loss`
    faults = tuple(
        Fault(part="nic", number=host, plane=plane, loss=each) for host in range(hosts) for plane in range(PLANES)
    )
    fabric = parse_fabric(FABRIC.format(hosts=hosts))
    step = min(T0_HOSTS, hosts // 2)
    traffic = shift(hosts, NBYTES, step=step)
    lost = faults if loss else ()
    found = run(fabric, traffic, transport=MRC, faults=lost, sample_s=SAMPLE_S, limit_s=10.0, each_plane=True)
    if found.stopped == "interrupted":
        raise KeyboardInterrupt
    return float(np.mean(found.fct_s))


def wanted(row: Row) -> Simulation | None:
    """What a row would have simulated."""
    return _simulation(*_asked(row))


def _simulation(percent: float, hosts: int) -> Simulation:
    return Simulation(key=("loss", percent, hosts), cpu_s=CPU_S)


READERS: tuple[tuple[str, Reader], ...] = ((r"^MRC fraction at [\d.]+ percent loss", lossy),)
WANTED: tuple[tuple[str, Wanted], ...] = ((r"^MRC fraction at [\d.]+ percent loss", wanted),)
