"""What ranks say of their devices and of their neighbours: `monitor` and `peers` events, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.record.account.energy import MOST_J
from phalanx.record.values import integer, number, printable
from phalanx.spec.facts.log import MonitorFacts, PeerFacts
from phalanx.spec.log.shape import Columns
from phalanx.spec.log.sums import Histogram, Hours

MOST_SOURCES = 16
MOST_BYTES = 1e18  # a damaged number


class Gaps:
    """Distances between two events of a rank, within a formation."""

    __slots__ = ("epoch", "last_s")

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.last_s: float | None = None

    def take(self, times: Sequence[float], epochs: Sequence[Any], into: Histogram) -> None:
        """Some more events."""
        if self.last_s is not None and epochs[0] == self.epoch:
            times = (self.last_s, *times)
            epochs = (self.epoch, *epochs)
        pairs = zip(times, times[1:], epochs, epochs[1:], strict=False)
        into.add([later - sooner for sooner, later, before, now in pairs if before == now])
        self.epoch, self.last_s = epochs[-1], times[-1]


class Meter:
    """The energy counter of one rank: it begins anew in every formation."""

    __slots__ = ("_epoch", "_last", "_total")

    def __init__(self) -> None:
        self._total = self._last = 0.0
        self._epoch: Any = None

    def take(self, epochs: Sequence[Any], values: Sequence[Any]) -> None:
        """Some more readings; the same rule as record.account.energy.counted."""
        for epoch, value in zip(epochs, values, strict=True):
            if value is None or not 0.0 <= value <= MOST_J:
                continue
            if value < self._last or (epoch != self._epoch and epoch is not None and self._epoch is not None):
                self._total += self._last
            self._last, self._epoch = value, self._epoch if epoch is None else epoch

    @property
    def energy_j(self) -> float:
        """Until now."""
        return self._total + self._last


class Monitors:
    """Of all ranks together."""

    def __init__(self) -> None:
        self._gaps, self._hours = Histogram(), Hours()
        self._sources: dict[str, set[str]] = {"utilization": set(), "energy": set(), "memory_pressure": set()}
        self._limit: float | None = None
        self._pressure = [0.0, 0.0]
        self._used = 0.0

    def take(self, columns: Columns, gaps: Gaps, meter: Meter) -> None:
        """Some more of a rank."""
        epochs, times = columns.get("epoch"), columns.get("t")
        gaps.take(times, epochs, self._gaps)
        self._hours.add(times, columns.get("utilization"))
        meter.take(epochs, columns.get("energy_j"))
        for name, found in self._sources.items():
            for source in set(columns.get(f"{name}_source")) - {None}:
                if len(found) < MOST_SOURCES:
                    found.add(printable(source, most=40))
        limits = [one for one in columns.get("memory_limit_bytes") if one is not None and 0 < one < MOST_BYTES]
        self._limit = min([*limits, *([] if self._limit is None else [self._limit])], default=None)
        self._used = max([self._used, *(one for one in columns.get("memory_bytes") if one and one < MOST_BYTES)])
        known = [one for one in columns.get("memory_pressure") if one is not None and 0.0 <= one <= 1e6]
        self._pressure[0] += sum(known)
        self._pressure[1] += len(known)

    def facts(self, *, ranks: int, peak: float, retries: int | None, energy_j: float) -> MonitorFacts | None:
        """None where no rank has told anything."""
        if not ranks:
            return None
        total, count = self._pressure
        return MonitorFacts(
            ranks=ranks,
            gap_s=self._gaps.quantile(0.99),
            utilization=self._hours.mean,
            lowest_hour=self._hours.lowest(),
            utilization_sources=tuple(sorted(self._sources["utilization"])),
            # The peak that steps tell of, where they do: a sample every ten seconds misses it.
            memory_peak_bytes=peak or self._used or None,
            memory_limit_bytes=self._limit,
            pressure_mean=total / count if count else None,
            pressure_source=", ".join(sorted(self._sources["memory_pressure"])),
            allocation_retries=retries,
            energy_sources=tuple(sorted(self._sources["energy"])),
            energy_j=energy_j or None,
        )


class Peers:
    """Of all ranks together."""

    def __init__(self) -> None:
        self._gaps, self._p99 = Histogram(), Histogram()
        self._answered = self._lost = 0

    def take(self, columns: Columns, gaps: Gaps) -> None:
        """Some more of a rank."""
        gaps.take(columns.get("t"), columns.get("epoch"), self._gaps)
        told = [pair for pairs in columns.get("pairs") for pair in pairs if isinstance(pair, dict)]
        self._p99.add([p99_s for pair in told if (p99_s := number(pair, "p99_s")) is not None])
        for pair in told:
            self._answered += min(max(integer(pair, "count") or 0, 0), 10**9)
            self._lost += min(max(integer(pair, "lost") or 0, 0), 10**9)

    def facts(self, *, ranks: int) -> PeerFacts | None:
        """None where no rank has told anything."""
        if not ranks:
            return None
        sent = self._answered + self._lost
        return PeerFacts(
            ranks=ranks,
            gap_s=self._gaps.quantile(0.99),
            lost_share=self._lost / sent if sent else None,
            p99_s=self._p99.quantile(0.5),
        )
