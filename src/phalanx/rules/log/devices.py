"""Summaries of `monitor` and `peers` events over all ranks: devices, energy, and pings between neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.io.values import integer, number, printable
from phalanx.record.account.cost import MOST_J
from phalanx.record.event_schema import EventColumns
from phalanx.rules.facts.log_facts import MonitorFacts, PeerFacts
from phalanx.rules.log.sums import Histogram, Hours

MOST_SOURCES = 16
MOST_BYTES = 1e18  # more is a damaged number
WIDTH = math.log(1.01)  # of a bin of gaps, on a logarithmic scale
# Seconds of a gap; a longer one is a damaged number.
LEAST_S, MOST_S = 1e-3, 1e9
# Shares of the time of a rank, and of the ranks, in which the reported gap is not exceeded.
MOST_TIME, MOST_RANKS = 0.99, 0.99


class Gaps:
    """Gaps between events of a rank, weighted by their length; silence while the rank makes steps is a gap.

    With the weight, one silence of a tenth of the run counts as too long, however many samples precede it.
    """

    __slots__ = ("_first_step_s", "_generation", "_last_s", "_last_step_s", "_taken")

    def __init__(self) -> None:
        # Bins of 1 %, few in number: the time in gaps of that length.
        self._taken: dict[int, float] = {}
        self._generation: Any = None
        self._last_s: float | None = None
        self._first_step_s: float | None = None
        self._last_step_s = 0.0

    def begin(self) -> None:
        """Begin a membership: the time between two memberships is not a gap of the sampling thread."""
        _put_gap(self._taken, self._tail_s())
        self._last_s = self._first_step_s = None

    def step(self, times: Sequence[float]) -> None:
        """Note steps at these times: there should be samples in this period too."""
        self._first_step_s = times[0] if self._first_step_s is None else self._first_step_s
        self._last_step_s = times[-1]

    def take(self, times: Sequence[float], generations: Sequence[Any]) -> None:
        """Add the times of more events, with their generations."""
        before_s = self._first_step_s if self._last_s is None else self._last_s
        if before_s is not None and (self._last_s is None or generations[0] == self._generation):
            times, generations = (before_s, *times), (generations[0], *generations)
        for sooner, later, before, now in zip(times, times[1:], generations, generations[1:], strict=False):
            if before == now:
                _put_gap(self._taken, later - sooner)
        self._generation, self._last_s = generations[-1], times[-1]

    def _tail_s(self) -> float:
        """Return the seconds from the last sample to the last step."""
        since_s = self._last_s if self._last_s is not None else self._first_step_s
        return self._last_step_s - since_s if since_s is not None and self._first_step_s is not None else 0.0

    def longest_s(self) -> float | None:
        """Return the gap that is not exceeded for 99 % of the time; None without gaps."""
        time_in_bins = dict(self._taken)
        _put_gap(time_in_bins, self._tail_s())
        total_s, longer_s = sum(time_in_bins.values()), 0.0
        for place in sorted(time_in_bins, reverse=True):
            longer_s += time_in_bins[place]
            if longer_s > (1 - MOST_TIME) * total_s:
                return float(math.exp((place + 0.5) * WIDTH))
        return None


def _put_gap(taken: dict[int, float], gap_s: float) -> None:
    if LEAST_S < gap_s < MOST_S:
        place = math.floor(math.log(gap_s) / WIDTH)
        taken[place] = taken.get(place, 0.0) + gap_s


def usual_s(gaps: Iterable[Gaps]) -> float | None:
    """Return the gap that 99 of 100 ranks do not exceed; of fewer than 100 ranks, the longest."""
    gaps_s = sorted(gap_s for rank_gaps in gaps if (gap_s := rank_gaps.longest_s()) is not None)
    return gaps_s[math.ceil(MOST_RANKS * len(gaps_s)) - 1] if gaps_s else None


class Meter:
    """The energy counter of one rank; it restarts from zero in every membership."""

    __slots__ = ("_generation", "_last", "_total")

    def __init__(self) -> None:
        self._total = self._last = 0.0
        self._generation: Any = None

    def take(self, generations: Sequence[Any], values: Sequence[Any]) -> None:
        """Add readings, by the same rule as record.account.energy.counted."""
        for generation, value in zip(generations, values, strict=True):
            if value is None or not 0.0 <= value <= MOST_J:
                continue
            if value < self._last or (
                generation != self._generation and generation is not None and self._generation is not None
            ):
                # The counter restarted: what it reached before is final.
                self._total += self._last
            self._last, self._generation = value, self._generation if generation is None else generation

    @property
    def energy_j(self) -> float:
        """The energy in joules so far."""
        return self._total + self._last


class Monitors:
    """Device samples of all ranks together."""

    def __init__(self) -> None:
        self._hours = Hours()
        self._sources: dict[str, set[str]] = {"utilization": set(), "energy": set(), "memory_pressure": set()}
        self._pressure = [0.0, 0.0]
        self._used = 0.0

    def take(self, columns: EventColumns, meter: Meter) -> None:
        """Add the samples of one rank."""
        generations, times = columns.get("epoch"), columns.get("t")
        self._hours.add(times, columns.get("utilization"))
        meter.take(generations, columns.get("energy_j"))
        for name, sources in self._sources.items():
            for source in set(columns.get(f"{name}_source")) - {None}:
                if len(sources) < MOST_SOURCES:
                    sources.add(printable(source, most=40))
        self._used = max(
            [
                self._used,
                *(used_bytes for used_bytes in columns.get("memory_bytes") if used_bytes and used_bytes < MOST_BYTES),
            ]
        )
        pressures = [
            pressure for pressure in columns.get("memory_pressure") if pressure is not None and 0.0 <= pressure <= 1e6
        ]
        self._pressure[0] += sum(pressures)
        self._pressure[1] += len(pressures)

    def facts(self, gaps: Sequence[Gaps], *, peak: float, retries: int | None, energy_j: float) -> MonitorFacts | None:
        """Return the summary; None where no rank wrote samples.

        `gaps` are those of the ranks that have samples.
        """
        if not gaps:
            return None
        total, count = self._pressure
        return MonitorFacts(
            ranks=len(gaps),
            gap_s=usual_s(gaps),
            utilization=self._hours.mean,
            lowest_hour=self._hours.lowest(),
            utilization_sources=tuple(sorted(self._sources["utilization"])),
            # Steps report the true peak where they can: a sample every ten seconds misses it.
            memory_peak_bytes=peak or self._used or None,
            held_bytes=self._used if peak and self._used else None,
            pressure_mean=total / count if count else None,
            pressure_source=", ".join(sorted(self._sources["memory_pressure"])),
            allocation_retries=retries,
            energy_sources=tuple(sorted(self._sources["energy"])),
            energy_j=energy_j or None,
        )


class PeerDelays:
    """Pings between neighbours, over all ranks."""

    def __init__(self) -> None:
        self._p99 = Histogram()
        self._answered = self._lost = 0

    def take(self, columns: EventColumns) -> None:
        """Add the reports of one rank."""
        pings = [pair for pairs in columns.get("pairs") for pair in pairs if isinstance(pair, dict)]
        self._p99.add([p99_s for pair in pings if (p99_s := number(pair, "p99_s")) is not None])
        for pair in pings:
            self._answered += min(max(integer(pair, "count") or 0, 0), 10**9)
            self._lost += min(max(integer(pair, "lost") or 0, 0), 10**9)

    def facts(self, gaps: Sequence[Gaps]) -> PeerFacts | None:
        """Return the summary; None where no rank wrote reports."""
        if not gaps:
            return None
        sent = self._answered + self._lost
        return PeerFacts(
            ranks=len(gaps),
            gap_s=usual_s(gaps),
            lost_share=self._lost / sent if sent else None,
            p99_s=self._p99.quantile(0.5),
        )
