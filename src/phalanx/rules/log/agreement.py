"""Comparisons across ranks: digests of the weights, skipped steps, and clocks."""

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

# Digests that are remembered, about 25 MB; beyond that, those of every second step.
MOST_HELD = 2**17
MOST_MEMBERSHIPS = 16_384
# Steps of the observer (the lowest rank on record) whose time is remembered.
MOST_TIMES = 4_096
MOST_OFFSETS = 64  # clock offsets per rank
# Different distances between digests; skipped steps that are compared.
MOST_GAPS = 1_000
# Seconds by which clocks of hosts may differ, and more: a difference of a second is already a finding (TEL005).
LATE_S = 5.0

Key = tuple[int, int]  # generation, step
Holder = tuple[int, ...]  # ranks with the same holder hold the same weights


class LoggedMemberships:
    """The memberships in the supervisor's log: which ranks hold the same weights, and when each membership ended."""

    def __init__(self, planned: Mapping[str, Any]) -> None:
        self._planned = planned  # the plan's layout, for memberships without a layout
        self._reported: dict[int, Mapping[str, Any]] = {}
        self._generations: list[int] = []
        self._begins: list[float] = []

    def tell(self, generation: int, layout: Mapping[str, Any]) -> None:
        """Store the layout of a membership."""
        if len(self._reported) < MOST_MEMBERSHIPS:
            self._reported[generation] = layout

    def layout(self, generation: int) -> Mapping[str, Any]:
        """Return the layout of a membership; empty where none was logged."""
        return self._reported.get(generation, {})

    def begin(self, generation: int, time_s: float) -> None:
        """Note the time at which a membership began: its members have left the previous one."""
        if len(self._generations) < MOST_MEMBERSHIPS and (not self._generations or generation > self._generations[-1]):
            self._generations.append(generation)
            self._begins.append(time_s)

    def over_s(self, generation: int) -> float:
        """Return the time at which the next membership began; infinite if none did."""
        place = bisect_right(self._generations, generation)
        return self._begins[place] if place < len(self._begins) else math.inf

    def knows(self, generation: int) -> bool:
        """Return whether there is a layout for a membership."""
        return bool(self._reported.get(generation) or self._planned)

    def holder(self, generation: int, rank: int) -> Holder | None:
        """Return the weights that a rank holds as a key; None where no other rank is known to hold the same.

        Along data and context, weights are copies, except with ZeRO and experts, where they are parts. This holds
        for any ZeRO stage: the weights that a rank updates and digests are its shard (docs/decisions/0010).
        """
        layout = self._reported.get(generation) or self._planned
        if not layout or (integer(layout, "expert") or 1) > 1:
            return None
        # The place on each axis is a digit of the rank in a mixed radix; the first axis varies fastest.
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
    """Compares the digests that ranks wrote for the same step of the same membership.

    Only weights that several ranks hold are remembered: a shard that one rank holds cannot be compared.
    """

    def __init__(self) -> None:
        self._held: dict[
            Key, dict[Holder, tuple[int, int]]
        ] = {}  # the first rank that reported the digest, and its hash
        self._count = 0  # number of digests in `_held`
        self._compared: set[Key] = set()  # steps with reports of two ranks
        self._differing: set[Key] = set()
        self._gone = (0, 0)  # numbers of compared and of differing steps that were dropped
        self._mask = 0  # steps are kept whose mixed bits have none of these bits set
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
        """Add the digests of one rank."""
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
                # Hash of 64 bits: a few bytes instead of a hundred.
                report = (rank, hash(digest))
                self._add_digest((generation, step), holder, report, Spot(file=file, line=lines[place]))

    def past(self, count: int, spot: Spot) -> None:
        """Count steps of a membership that was over."""
        self.stale += count
        self.stale_spot = self.stale_spot or spot
        self.is_reported = True

    def _add_digest(self, key: Key, holder: Holder, said: tuple[int, int], spot: Spot) -> None:
        by_holder = self._held.setdefault(key, {})
        before = by_holder.get(holder)
        # The same rank again: a step that was repeated.
        if before is None or before[0] == said[0]:
            self._count += before is None
            by_holder[holder] = said
        else:
            self._compared.add(key)
            if before[1] != said[1]:
                self._differing.add(key)
                self.differing_spot = self.differing_spot or spot
        while self._count > MOST_HELD and self._mask < 2**20:
            self._forget_half()

    def _forget_half(self) -> None:
        """Drop every second step; the counts of compared steps stay."""
        self._mask = 2 * self._mask + 1
        dropped = {key for key in self._held if _mixed_bits(key[1]) & self._mask}
        self._count -= sum(len(self._held.pop(key)) for key in dropped)
        self._gone = (self._gone[0] + len(dropped & self._compared), self._gone[1] + len(dropped & self._differing))
        self._compared -= dropped
        self._differing -= dropped

    def facts(self) -> DigestFacts | None:
        """Return the facts; None where no rank wrote a digest."""
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
    """Return well-mixed bits of a step.

    Digests come every hundred steps or so, so the low bits of the step itself would keep all or none.
    """
    # Fibonacci hashing: the constant is 2^64 divided by the golden ratio.
    return (step * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFF


class Clocks:
    """Estimates how far the clocks of ranks are apart, from the times at which they log the same step."""

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        self._every = 1

    def know(self, columns: EventColumns) -> None:
        """Store the times of the observer, the lowest rank on record."""
        for step, generation, time_s in self._picked_steps(columns):
            self._times[generation, step] = time_s
        while len(self._times) > MOST_TIMES:
            self._every *= 2
            self._times = {key: time_s for key, time_s in self._times.items() if key[1] % self._every == 0}

    def compare(self, columns: EventColumns, offsets: list[float]) -> None:
        """Compare another rank's times; the seconds by which it is ahead are added to `offsets`."""
        if len(offsets) >= MOST_OFFSETS:
            return
        times = ((generation, step, time_s) for step, generation, time_s in self._picked_steps(columns))
        offsets += [
            time_s - self._times[generation, step]
            for generation, step, time_s in times
            if (generation, step) in self._times
        ]

    def _picked_steps(self, columns: EventColumns) -> Iterable[tuple[int, int, float]]:
        steps, generations, times = columns.get("step"), columns.get("epoch"), columns.get("t")
        first = -steps[0] % self._every
        picked = zip(
            steps[first :: self._every], generations[first :: self._every], times[first :: self._every], strict=True
        )
        # If steps are missing, steps other than multiples appear; they have no counterpart.
        return [(step, generation or 0, time_s) for step, generation, time_s in picked]


def clock_skew(offsets: Iterable[Sequence[float]]) -> float | None:
    """Return the largest clock offset from the observer.

    The offset of a rank is a median, since a single step may be logged late.
    """
    rank_offsets = [abs(statistics.median(samples)) for samples in offsets if samples]
    return max(rank_offsets, default=None)


def skips_differ(
    skips: Mapping[int, Mapping[Key, Spot]], spans: Mapping[int, Mapping[int, tuple[int, int]]]
) -> Spot | None:
    """Return a step that one rank skipped and another did not, although it logged the steps around it; else None."""
    keys = {key for rank_skips in skips.values() for key in rank_skips}
    for key in sorted(keys)[:MOST_GAPS]:
        reporting_ranks = [rank for rank, span in spans.items() if _spans_step(span, key)]
        skipped = [rank for rank in reporting_ranks if key in skips.get(rank, ())]
        if skipped and len(skipped) < len(reporting_ranks):
            return skips[skipped[0]][key]
    return None


def _spans_step(span: Mapping[int, tuple[int, int]], key: Key) -> bool:
    first, last = span.get(key[0], (0, -1))
    return first <= key[1] <= last
