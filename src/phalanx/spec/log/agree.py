"""What ranks must agree on: digests of the weights, steps that were skipped, and the time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.record.account.places import AXES
from phalanx.record.values import integer
from phalanx.spec.facts.log import DigestFacts
from phalanx.spec.log.shape import Columns
from phalanx.spec.outcome import Spot

MOST_DIGESTS = 16_384  # (epoch, step) pairs that are remembered; then every second one
MOST_TIMES = 4_096  # steps of the witness whose time is
MOST_OFFSETS = 64  # of a rank
MOST_GAPS = 1_000  # different distances; skipped steps that are compared

Key = tuple[int, int]  # epoch, step
Holder = tuple[int, ...]  # ranks of the same holder hold the same weights


class Layouts:
    """Which ranks hold the same weights, formation by formation; the plan's layout where no formation is known."""

    def __init__(self, planned: Mapping[str, Any]) -> None:
        self._planned = planned
        self._told: dict[int, Mapping[str, Any]] = {}

    def tell(self, epoch: int, layout: Mapping[str, Any]) -> None:
        """The layout of a formation."""
        if len(self._told) < MOST_DIGESTS:
            self._told[epoch] = layout

    def holder(self, epoch: int, rank: int) -> Holder:
        """Along data and context, weights are copies, but for ZeRO and experts, where they are parts.

        ZeRO of any stage: the weights that a rank updates and digests are its shard (docs/decisions/0010).
        """
        layout = self._told.get(epoch) or self._planned
        if not layout:
            return (rank,)
        places: dict[str, int] = {}
        for axis in AXES:
            size = max(1, integer(layout, axis) or 1)
            places[axis], rank = rank % size, rank // size
        split: tuple[int, ...] = (places["tensor"], places["pipeline"])
        if (integer(layout, "expert") or 1) > 1:
            return (*split, places["context"], places["data"])
        if (integer(layout, "zero") or 0) >= 1:
            return (*split, places["context"], places["data"] % max(1, integer(layout, "shard") or 1))
        return split


class Digests:
    """Compares what ranks wrote for the same step of the same formation."""

    def __init__(self) -> None:
        self._held: dict[Key, dict[Holder, str]] = {}
        self._ranks: Counter[Key] = Counter()
        self._mask = 0  # steps are kept whose mixed number has none of these bits
        self._gaps: Counter[int] = Counter()
        self._last: int | None = None
        self.differing = 0
        self.differing_spot: Spot | None = None
        self.stale = 0
        self.stale_spot: Spot | None = None
        self.is_told = False

    def take(
        self, columns: Columns, rank: int, file: str, lines: Sequence[int], *, where: Layouts, witness: bool
    ) -> None:
        """The steps of a rank that have one."""
        self.is_told = True
        steps, epochs = columns.get("step"), columns.get("epoch")
        for place, digest in enumerate(columns.get("digest")):
            if digest is None:
                continue
            epoch, step = epochs[place] or 0, steps[place]
            if witness:
                self._distance(step)
            if not _mixed(step) & self._mask:
                self._add((epoch, step), where.holder(epoch, rank), digest, Spot(file=file, line=lines[place]))

    def _distance(self, step: int) -> None:
        if self._last is not None and step > self._last and len(self._gaps) < MOST_GAPS:
            self._gaps[step - self._last] += 1
        self._last = step

    def _add(self, key: Key, holder: Holder, digest: str, spot: Spot) -> None:
        said = self._held.setdefault(key, {})
        self._ranks[key] += 1
        if said.setdefault(holder, digest[:64]) != digest[:64]:
            self.differing += 1
            self.differing_spot = self.differing_spot or spot
        while len(self._held) > MOST_DIGESTS and self._mask < 2**20:
            self._mask = 2 * self._mask + 1
            self._held = {key: said for key, said in self._held.items() if not _mixed(key[1]) & self._mask}
            self._ranks = Counter({key: count for key, count in self._ranks.items() if key in self._held})

    def facts(self) -> DigestFacts | None:
        """None where no rank wrote a digest."""
        if not self.is_told:
            return None
        every = self._gaps.most_common(1)[0][0] if self._gaps else None
        compared = sum(count > 1 for count in self._ranks.values()) * (self._mask + 1)
        return DigestFacts(
            compared=compared,
            every_steps=every,
            differing=self.differing,
            differing_spot=self.differing_spot,
            stale=self.stale,
            stale_spot=self.stale_spot,
        )


def _mixed(step: int) -> int:
    """Digests come every hundred steps or so: the low bits of the number itself would keep all or none."""
    return (step * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFF


class Clocks:
    """How far the clocks of ranks are apart, by the times at which they tell of the same step."""

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        self._every = 1

    def know(self, columns: Columns) -> None:
        """The witness's times."""
        for step, epoch, time_s in self._picked(columns):
            self._times[epoch, step] = time_s
        while len(self._times) > MOST_TIMES:
            self._every *= 2
            self._times = {key: time_s for key, time_s in self._times.items() if key[1] % self._every == 0}

    def compare(self, columns: Columns, offsets: list[float]) -> None:
        """Another rank's; what it is ahead by goes into `offsets`."""
        if len(offsets) >= MOST_OFFSETS:
            return
        found = ((epoch, step, time_s) for step, epoch, time_s in self._picked(columns))
        offsets += [time_s - self._times[epoch, step] for epoch, step, time_s in found if (epoch, step) in self._times]

    def _picked(self, columns: Columns) -> Iterable[tuple[int, int, float]]:
        steps, epochs, times = columns.get("step"), columns.get("epoch"), columns.get("t")
        first = -steps[0] % self._every
        picked = zip(
            steps[first :: self._every], epochs[first :: self._every], times[first :: self._every], strict=True
        )
        # Where steps are missing, others than multiples come: they meet none.
        return [(step, epoch or 0, time_s) for step, epoch, time_s in picked]


def skew(offsets: Iterable[Sequence[float]]) -> float | None:
    """The clock that is farthest from the witness's: a rank's median, since a single step may be told of late."""
    found = [abs(statistics.median(some)) for some in offsets if some]
    return max(found, default=None)


def skips_differ(
    skips: Mapping[int, Mapping[Key, Spot]], spans: Mapping[int, Mapping[int, tuple[int, int]]]
) -> Spot | None:
    """A step that one rank skipped and another, that tells of the steps around it, did not."""
    keys = {key for some in skips.values() for key in some}
    for key in sorted(keys)[:MOST_GAPS]:
        told = [rank for rank, span in spans.items() if _spans(span, key)]
        skipped = [rank for rank in told if key in skips.get(rank, ())]
        if skipped and len(skipped) < len(told):
            return skips[skipped[0]][key]
    return None


def _spans(span: Mapping[int, tuple[int, int]], key: Key) -> bool:
    first, last = span.get(key[0], (0, -1))
    return first <= key[1] <= last
