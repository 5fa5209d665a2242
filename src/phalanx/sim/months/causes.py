"""What fails and how often: the causes of one published run, scaled to the failures a cluster expects.

`data/failures.csv` holds the 419 interruptions of Llama 3 405B by cause (arXiv 2407.21783, Table 5). Their mix is a
calibration: it is applied to any cluster, at the rate the plan takes for that cluster.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.network.fabric.recovery import SWITCH_BACK_S
from phalanx.units import DAY_S

BLOCK = 4096  # failures drawn at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One kind of failure. `share` is of all failures; shares add up to 1."""

    name: str
    share: float
    unit: str  # what has the failure: a device, a host, a link (one NIC per device)
    units: float = 0.0  # so many of them; 0 is as many as the job has devices, hosts or NICs
    takes_host: bool = False  # the host leaves the job until it is repaired
    outage_s: float = 0.0  # until it is back; 0 of a link is drawn
    stall_s: float | None = None  # the job stands still and goes on: other paths take over. None: it falls
    pace: float = 1.0  # then, until it is back
    silent: bool = False  # nobody notices before weights are compared
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
    """The causes of Llama 3's interruptions with their shares.

    >>> {one.name: round(419 * one.share, 1) for one in usual_mix()}["device"]  # 148 + 17 + 6
    171.0
    """
    text = (importlib.resources.files("phalanx.sim.months") / "data" / "failures.csv").read_text(encoding="utf-8")
    counts = dict.fromkeys(_TRAITS, 0.0)
    for row in csv.DictReader(io.StringIO(text)):
        counts[row["cause"]] += float(row["count"])
    total = sum(counts.values())
    return tuple(_sourced(trait(counts[name] / total), counts[name], total) for name, trait in _TRAITS.items())


def _sourced(cause: Cause, count: float, total: float) -> Cause:
    return replace(cause, source=f"{count:g} of {total:g} interruptions of Llama 3 (arXiv 2407.21783 Table 5)")


def arrivals(
    mix: Sequence[Cause], *, mtbf_s: float, shape: float, random: np.random.Generator
) -> Iterator[tuple[float, Cause]]:
    """Seconds to the next failure of the job and its cause, without end.

    `shape` 1 is a Poisson process. Below 1 the gaps are Weibull with the same mean: failures come in bursts, as in nine
    years of Los Alamos clusters (Schroeder and Gibson, DSN 2006: Weibull with decreasing hazard).
    """
    # Uniform numbers by our own formulas: numpy keeps those the same from version to version, its distributions not
    # (NEP 19), and a seed is to be the same run everywhere.
    ends = np.cumsum([one.share for one in mix])[:-1]
    scale_s = mtbf_s / math.gamma(1.0 + 1.0 / shape)
    while True:
        gaps_s = scale_s * (-np.log1p(-random.random(BLOCK))) ** (1.0 / shape)
        kinds = np.searchsorted(ends, random.random(BLOCK), side="right")
        yield from ((float(gap_s), mix[kind]) for gap_s, kind in zip(gaps_s, kinds, strict=True))


def per_day(mtbf_s: float) -> float:
    """Failures of a day; 0 when there are none."""
    return DAY_S / mtbf_s if math.isfinite(mtbf_s) else 0.0
