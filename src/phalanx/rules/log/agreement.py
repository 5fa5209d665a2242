"""What ranks must agree on: digests of the weights, steps that were skipped, and the time."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.io.files import Spot
from phalanx.io.values import integer
from phalanx.record.account.rank_places import AXES
from phalanx.record.event_schema import EventColumns
from phalanx.rules.facts.log_facts import DigestFacts

MOST_HELD = 2**17  # digests that are remembered, some 25 MB; then those of every second step
MOST_MEMBERSHIPS = 16_384
MOST_TIMES = 4_096  # steps of the witness whose time is
MOST_OFFSETS = 64  # of a rank
MOST_GAPS = 1_000  # different distances; skipped steps that are compared
LATE_S = 5.0  # by which clocks of hosts may differ, and more: those that differ by a second are a finding (TEL005)

Key = tuple[int, int]  # generation, step
Holder = tuple[int, ...]  # ranks of the same holder hold the same weights


class LoggedMemberships:
    """What the supervisor told of memberships: who holds the same weights, and since when an older one is over."""

    def __init__(self, planned: Mapping[str, Any]) -> None:
        self._planned = planned  # the plan's layout, where no membership is known
        self._reported: dict[int, Mapping[str, Any]] = {}
        self._generations: list[int] = []
        self._begins: list[float] = []

    def tell(self, generation: int, layout: Mapping[str, Any]) -> None:
        """The layout of a membership."""
        if len(self._reported) < MOST_MEMBERSHIPS:
            self._reported[generation] = layout

    def layout(self, generation: int) -> Mapping[str, Any]:
        """Of a membership; empty where nobody told."""
        return self._reported.get(generation, {})

    def begin(self, generation: int, time_s: float) -> None:
        """Its members may go: all of them have left what they did before."""
        if len(self._generations) < MOST_MEMBERSHIPS and (not self._generations or generation > self._generations[-1]):
            self._generations.append(generation)
            self._begins.append(time_s)

    def over_s(self, generation: int) -> float:
        """When the next membership began."""
        place = bisect_right(self._generations, generation)
        return self._begins[place] if place < len(self._begins) else math.inf

    def knows(self, generation: int) -> bool:
        """Whether there is a layout."""
        return bool(self._reported.get(generation) or self._planned)

    def holder(self, generation: int, rank: int) -> Holder | None:
        """Whose weights a rank holds; None where no other rank is known to hold the same.

        Along data and context, weights are copies, but for ZeRO and experts, where they are parts. ZeRO of any stage:
        the weights that a rank updates and digests are its shard (docs/decisions/0010).
        """
        layout = self._reported.get(generation) or self._planned
        if not layout or (integer(layout, "expert") or 1) > 1:
            return None
        places, sizes = {}, {}
        for axis in AXES:
            sizes[axis] = max(1, integer(layout, axis) or 1)
            places[axis], rank = rank % sizes[axis], rank // sizes[axis]
        split = (places["tensor"], places["pipeline"])
        if (integer(layout, "zero") or 0) < 1:
            return split if sizes["data"] * sizes["context"] > 1 else None
        shard = max(1, integer(layout, "shard") or 1)
        first = places["data"] % shard
        return (*split, places["context"], first) if first + shard < sizes["data"] else None


class Digests:
    """Compares what ranks wrote for the same step of the same membership.

    Only weights that several ranks hold are remembered: of a shard that one rank holds there is nothing to compare.
    """

    def __init__(self) -> None:
        self._held: dict[Key, dict[Holder, tuple[int, int]]] = {}  # the first rank that said it, and a hash
        self._count = 0  # of digests in it
        self._compared: set[Key] = set()  # steps of which two reports met
        self._differing: set[Key] = set()
        self._gone = (0, 0)  # how many of these were let go of
        self._mask = 0  # steps are kept whose mixed number has none of these bits
        self._gaps: Counter[int] = Counter()
        self._last: int | None = None
        self._alone = 0
        self.differing_spot: Spot | None = None
        self.stale = 0
        self.stale_spot: Spot | None = None
        self.is_reported = False

    def take(
        self,
        columns: EventColumns,
        rank: int,
        file: str,
        lines: Sequence[int],
        *,
        where: LoggedMemberships,
        witness: bool,
    ) -> None:
        """The steps of a rank that have one."""
        self.is_reported = True
        steps, generations = columns.get("step"), columns.get("epoch")
        for place, digest in enumerate(columns.get("digest")):
            if digest is None:
                continue
            generation, step = generations[place] or 0, steps[place]
            if witness:
                if self._last is not None and step > self._last and len(self._gaps) < MOST_GAPS:
                    self._gaps[step - self._last] += 1
                self._last = step
            holder = where.holder(generation, rank)
            if holder is None:
                self._alone += where.knows(generation)
            elif not _mixed_bits(step) & self._mask:
                said = (rank, hash(digest))  # of 64 bits: a few bytes instead of a hundred
                self._add_digest((generation, step), holder, said, Spot(file=file, line=lines[place]))

    def past(self, count: int, spot: Spot) -> None:
        """Steps of a membership that was over."""
        self.stale += count
        self.stale_spot = self.stale_spot or spot
        self.is_reported = True

    def _add_digest(self, key: Key, holder: Holder, said: tuple[int, int], spot: Spot) -> None:
        held = self._held.setdefault(key, {})
        before = held.get(holder)
        if before is None or before[0] == said[0]:  # the same rank again: a step that was done again
            self._count += before is None
            held[holder] = said
        else:
            self._compared.add(key)
            if before[1] != said[1]:
                self._differing.add(key)
                self.differing_spot = self.differing_spot or spot
        while self._count > MOST_HELD and self._mask < 2**20:
            self._forget_half()

    def _forget_half(self) -> None:
        """Every second step; what was compared of them was."""
        self._mask = 2 * self._mask + 1
        gone = {key for key in self._held if _mixed_bits(key[1]) & self._mask}
        self._count -= sum(len(self._held.pop(key)) for key in gone)
        self._gone = (self._gone[0] + len(gone & self._compared), self._gone[1] + len(gone & self._differing))
        self._compared -= gone
        self._differing -= gone

    def facts(self) -> DigestFacts | None:
        """None where no rank wrote a digest."""
        if not self.is_reported:
            return None
        every = self._gaps.most_common(1)[0][0] if self._gaps else None
        return DigestFacts(
            compared=self._gone[0] + len(self._compared),
            every_steps=every,
            differing=self._gone[1] + len(self._differing),
            differing_spot=self.differing_spot,
            alone=self._alone,
            stale=self.stale,
            stale_spot=self.stale_spot,
        )


def _mixed_bits(step: int) -> int:
    """Digests come every hundred steps or so: the low bits of the number itself would keep all or none."""
    return (step * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFF


class Clocks:
    """How far the clocks of ranks are apart, by the times at which they tell of the same step."""

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        self._every = 1

    def know(self, columns: EventColumns) -> None:
        """The witness's times."""
        for step, generation, time_s in self._picked_steps(columns):
            self._times[generation, step] = time_s
        while len(self._times) > MOST_TIMES:
            self._every *= 2
            self._times = {key: time_s for key, time_s in self._times.items() if key[1] % self._every == 0}

    def compare(self, columns: EventColumns, offsets: list[float]) -> None:
        """Another rank's; what it is ahead by goes into `offsets`."""
        if len(offsets) >= MOST_OFFSETS:
            return
        found = ((generation, step, time_s) for step, generation, time_s in self._picked_steps(columns))
        offsets += [
            time_s - self._times[generation, step]
            for generation, step, time_s in found
            if (generation, step) in self._times
        ]

    def _picked_steps(self, columns: EventColumns) -> Iterable[tuple[int, int, float]]:
        steps, generations, times = columns.get("step"), columns.get("epoch"), columns.get("t")
        first = -steps[0] % self._every
        picked = zip(
            steps[first :: self._every], generations[first :: self._every], times[first :: self._every], strict=True
        )
        # Where steps are missing, others than multiples come: they meet none.
        return [(step, generation or 0, time_s) for step, generation, time_s in picked]


def clock_skew(offsets: Iterable[Sequence[float]]) -> float | None:
    """The clock that is farthest from the witness's: a rank's median, since a single step may be told of late."""
    found = [abs(statistics.median(some)) for some in offsets if some]
    return max(found, default=None)


def skips_differ(
    skips: Mapping[int, Mapping[Key, Spot]], spans: Mapping[int, Mapping[int, tuple[int, int]]]
) -> Spot | None:
    """A step that one rank skipped and another, that tells of the steps around it, did not."""
    keys = {key for some in skips.values() for key in some}
    for key in sorted(keys)[:MOST_GAPS]:
        reported = [rank for rank, span in spans.items() if _spans_step(span, key)]
        skipped = [rank for rank in reported if key in skips.get(rank, ())]
        if skipped and len(skipped) < len(reported):
            return skips[skipped[0]][key]
    return None


def _spans_step(span: Mapping[int, tuple[int, int]], key: Key) -> bool:
    first, last = span.get(key[0], (0, -1))
    return first <= key[1] <= last
