"""The history of a run: curves, meshes and events from its folder, while it grows and after.

Nothing is loaded whole. Long stretches are drawn from blocks (blocks.py), short ones from the events themselves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake, nearest
from phalanx.io.values import integer
from phalanx.record.archive.blocks import MOST_BYTES
from phalanx.record.archive.damage import Damage, folder_damage, of_ranks, supervisor_damage
from phalanx.record.archive.digest import Digest, Stamp, stamp_of
from phalanx.record.archive.event_index import newest_blocks
from phalanx.record.archive.rank_file import RankFile, RowCache, Start
from phalanx.record.archive.series import COLUMN, MFU, SERIES, Spans, bucket_spans, columns_of, join_spans, unit_of
from phalanx.record.events import Event, EventReader
from phalanx.record.run import Run, list_runs, run_in
from phalanx.record.run_lock import ENDED
from phalanx.units import plural

__all__ = ["Curve", "Damage", "Mesh", "RunHistory", "list_runs", "run_in"]

RAW_STEPS = 16_384  # of a curve that are drawn from the events: 10 MB, parsed in about 0.2 s
RAW_MESH_STEPS = 32_768  # of all ranks together
MOST_POINTS = 20_000
MOST_HELD_BYTES = 32 * 2**20  # of indexes that stay in memory: 100 ranks of 100,000 steps
MOST_DIGEST_BYTES = 96 * 2**20  # of means for meshes: 1,200 such ranks; those beyond are read again for each mesh
MOST_SCAN_BYTES = 256 * 2**20  # read by one mesh of ranks without an index, about 4 s
MOST_SUPERVISOR = 50_000
MANY_RANKS = 1024  # beyond it, meshes are of some ranks, evenly spread, and not of all
SAMPLE_RANKS = 256
GLANCE_RANKS = 4096  # whose newest blocks are read at once: 10 MB
LOOK_RANKS, LOOK_BYTES = 16, 8 * 2**20
FEW, FEW_S = 10, 5.0  # steps and seconds that a killed rank may not have written
T = TypeVar("T")
TORN = "torn last line"
TOO_LONG = "not read for the mesh: without an index, and too long to be read for all ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One series of one rank, an entry per bucket of steps: its first step, the time of its last, and its values."""

    name: str
    unit: str
    step: tuple[int, ...]
    t: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    mean: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One series of the ranks: means, `values[row][column]`; `ranks` has the rank of each row, `step` the first step of
    each column. Of more than MANY_RANKS ranks, some, evenly spread."""

    name: str
    unit: str
    ranks: tuple[int, ...]
    step: tuple[int, ...]
    t: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]


class RunHistory:
    """Reads a run as far as it is asked for. Not for several threads at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ranks: tuple[int, ...] = ()
        self.sample: tuple[int, ...] = ()  # those that meshes show: all, or of very many some, evenly spread
        self.witness = 0  # the lowest rank that has a record: it speaks for the run
        self._parts: dict[int, list[int]] = {}
        self._files: OrderedDict[int, RankFile] = OrderedDict()
        self._cache = RowCache()
        self._starts: tuple[Start, ...] = ()
        self._starts_known = False  # since the last refresh
        self._fresh: set[int] = set()  # ranks looked at since the last refresh
        self._digests: dict[int, Digest] = {}
        self._digested_bytes = 0
        self._newest: dict[tuple[str, ...], dict[str, NDArray[np.float64]]] = {}  # since the last refresh
        self._answers: dict[Hashable, Any] = {}  # what was worked out since the last refresh
        self._checked: set[int] = set()  # digests known to be current since the last refresh
        self._budget = MOST_SCAN_BYTES
        self._held: dict[int, int] = {}  # bytes of each
        self._troubles: dict[int, Counter[str]] = {}
        self._supervisor = EventReader(run.supervisor)
        self._reported: list[Event] = []
        self._plan_seen: tuple[object, tuple[tuple[int, float], ...]] = (None, ())

    @classmethod
    def open(cls, run: Run) -> RunHistory:
        """The history of a run; any folder has one, `damage` says what is missing."""
        history = cls(run)
        history.refresh()
        return history

    def refresh(self) -> bool:
        """Look for what is new; whether there was anything. Ranks beside the first are read when they are asked for."""
        self._parts = self.run.event_parts()
        new, self.ranks = tuple(self._parts) != self.ranks, tuple(self._parts)
        self.sample = spread_ranks(self.ranks, SAMPLE_RANKS) if len(self.ranks) > MANY_RANKS else self.ranks
        self.witness = next(self.run.recorded(), self.ranks[0] if self.ranks else 0)
        self._fresh.clear()
        self._checked.clear()
        self._newest.clear()
        self._answers.clear()
        reported = self._supervisor.read()[-MOST_SUPERVISOR:]
        self._reported = (self._reported + reported)[-MOST_SUPERVISOR:]
        self._starts_known = False
        return (bool(self.ranks) and self._rank_file(self._rank_or_witness(None)).changed) or new or bool(reported)

    def once(self, question: Hashable, work_out: Callable[[], T]) -> T:
        """What follows from this history, worked out once between two refreshes however often it is asked for."""
        if question not in self._answers:
            self._answers[question] = work_out()
        found: T = self._answers[question]
        return found

    def _membership_starts(self) -> tuple[Start, ...]:
        """Where the memberships began, by rank 0, which is in all of them: that undoes steps of ranks that left, too.

        (By the witness, where rank 0 has no record.) It is not read for this where no index covers it: then it is as
        it was known before.
        """
        known = self._files[self.witness] if self.witness in self._fresh else None
        if not self._starts_known and known is not None and known.unread <= MOST_BYTES:
            events = known.events(("run_start",))
            reported = [(integer(event, "epoch"), integer(event, "step")) for event in events]
            self._starts = tuple(
                (generation, step) for generation, step in reported if generation is not None and step is not None
            )
            self._starts_known = True
        return self._starts

    def _rank_file(self, rank: int) -> RankFile:
        """A rank's events, looked at once between two refreshes."""
        file = self._files.pop(rank, None) or RankFile(self.run.events(rank), self._parts[rank], self._cache)
        self._files[rank] = file
        if rank != self.witness:  # that one does those steps again itself
            file.know_starts(self._membership_starts())
        if rank not in self._fresh:
            file.refresh()
            self._fresh.add(rank)
            self._held[rank] = file.held_bytes
            self._forget_oldest()
        return file

    def _rank_or_witness(self, rank: int | None) -> int:
        return self.witness if rank is None else rank

    def _forget_oldest(self) -> None:
        """Drop the ranks that nobody has asked for the longest; what was wrong with them is remembered."""
        held = sum(self._held.values())
        while held > MOST_HELD_BYTES and len(self._files) > 1:
            rank, gone = self._files.popitem(last=False)
            self._fresh.discard(rank)
            held -= self._held.pop(rank)
            self._troubles[rank] = gone.troubles()

    @property
    def first_step(self) -> int | None:
        """The first step on record."""
        return self._edge_step("first")

    @property
    def last_step(self) -> int | None:
        """The last step on record."""
        return self._edge_step("last")

    def _edge_step(self, which: str) -> int | None:
        if not self.ranks:
            return None
        kept = self._rank_file(self._rank_or_witness(None)).kept()
        stay = kept.blocks["steps"] > 0
        if not stay.any():
            return None
        if which == "first":
            return int(kept.blocks["first"][stay][0])
        return int(np.minimum(kept.blocks["last"], kept.below - 1)[stay][-1])

    # ---- numbers over time -------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """The series that this run has."""
        if not self.ranks:
            return ()
        counts = self._rank_file(self._rank_or_witness(None)).kept().blocks["series"]["count"].sum(axis=0)
        found = [series.name for number, series in enumerate(SERIES) if counts[number]]
        return (*found, MFU) if "tokens_per_s" in found and self._mfu_scales() else tuple(found)

    def curve(
        self,
        name: str,
        *,
        rank: int | None = None,
        first: int | None = None,
        last: int | None = None,
        points: int = 800,
    ) -> Curve:
        """A series of a rank (the witness's, unless told) from step `first` to `last`, in at most `points` buckets."""
        column = self._series_column(name)
        spans = Spans.none()
        if (rank := self._rank_or_witness(rank)) in self._parts:
            spans = self._column_spans(self._rank_file(rank), column, _step_span(first, last), raw_steps=RAW_STEPS)
        found = bucket_spans(spans, max(1, min(points, MOST_POINTS)))
        scale = self._series_scale(name, found.first)
        return Curve(
            name=name,
            unit=unit_of(name),
            step=tuple(found.first.tolist()),
            t=tuple(found.t.tolist()),
            low=_values_or_none(found.low * scale),
            high=_values_or_none(found.high * scale),
            mean=_values_or_none(found.mean * scale),
        )

    def by_step(
        self, names: Sequence[str] = (), *, rank: int | None = None, first: int | None = None, last: int | None = None
    ) -> dict[str, list[float | int | None]]:
        """Columns of a rank with a row per recorded step, `step` first; None where a series has no value."""
        low, high = self.first_step, self.last_step
        chosen = tuple(names) or self.names()
        columns: dict[str, list[float | int | None]] = {"step": [], **{name: [] for name in chosen}}
        if low is None or high is None:
            return columns
        low, high = max(low, low if first is None else first), min(high, high if last is None else last)
        for begin in range(low, high + 1, RAW_STEPS):  # a longer curve would be drawn from means of blocks
            end = min(begin + RAW_STEPS - 1, high)
            found = {}
            for name in chosen:
                curve = self.curve(name, rank=rank, first=begin, last=end, points=RAW_STEPS)
                found[name] = dict(zip(curve.step, curve.mean, strict=True))
            steps = sorted(set().union(*found.values()))
            columns["step"] += steps
            for name in chosen:
                columns[name] += [found[name].get(step) for step in steps]
        return columns

    def mesh(self, name: str, *, columns: int = 120, first: int | None = None, last: int | None = None) -> Mesh:
        """A series of all ranks in at most `columns` columns.

        Where a step was done again in a block, the undone one is in that block's mean too: of one column among many.
        """
        return self.meshes((name,), columns=columns, first=first, last=last)[0]

    def meshes(
        self, names: Sequence[str], *, columns: int = 120, first: int | None = None, last: int | None = None
    ) -> tuple[Mesh, ...]:
        """Several series, rank by rank: the events of a rank are read once for all of them."""
        asked = [self._series_column(name) for name in names]
        self._budget = MOST_SCAN_BYTES
        span = _step_span(first, last)
        rows = [[self._mesh_row(rank, column, span) for column in asked] for rank in self.sample]
        return tuple(
            self._make_mesh(name, [row[number] for row in rows], columns=columns) for number, name in enumerate(names)
        )

    @property
    def is_sampled(self) -> bool:
        """Whether there are so many ranks that meshes show some of them only."""
        return len(self.sample) < len(self.ranks)

    def newest(self, *names: str) -> dict[str, NDArray[np.float64]]:
        """Means of series over the newest steps (at most 256) of every rank, in the order of `ranks`, by indexes alone.

        NaN for a rank without an index. For very many ranks: 16,384 of them take about half a second.
        """
        if names in self._newest:
            return self._newest[names]
        columns = [self._series_column(name) for name in names]
        parts = []
        for begin in range(0, len(self.ranks), GLANCE_RANKS):
            some = self.ranks[begin : begin + GLANCE_RANKS]
            blocks = newest_blocks(str(self.run.path), some)
            series = blocks["series"][:, columns]
            parts.append(np.where(series["count"] > 0, series["mean"], np.nan).astype(np.float64))
        found = np.concatenate(parts) if parts else np.zeros((0, len(names)))
        self._newest[names] = {name: found[:, number] for number, name in enumerate(names)}
        return self._newest[names]

    def _make_mesh(self, name: str, rows: Sequence[Spans], *, columns: int) -> Mesh:
        found = columns_of(rows, max(1, min(columns, MOST_POINTS)))
        scale = self._series_scale(name, found.first)
        values = tuple(_values_or_none(row * scale) for row in found.values)
        step, t = tuple(found.first.tolist()), tuple(found.t.tolist())
        return Mesh(name=name, unit=unit_of(name), ranks=self.sample, step=step, t=t, values=values)

    def _mesh_row(self, rank: int, column: int, span: tuple[int, int]) -> Spans:
        """One rank's row of a mesh."""
        raw_steps = RAW_MESH_STEPS // len(self.sample)
        digest = self._digests.get(rank)
        if digest is None or not self._is_current(rank, digest):
            file = self._rank_file(rank)
            unread = file.unread
            if unread > self._budget:
                self._troubles.setdefault(rank, Counter())[TOO_LONG] = 1
                return Spans.none()
            self._budget -= unread
            digest = self._make_digest(rank, file)
        if digest.steps_in(span) > raw_steps:
            return digest.spans(column, span)
        return self._column_spans(self._rank_file(rank), column, span, raw_steps=raw_steps)

    def _is_current(self, rank: int, digest: Digest) -> bool:
        """Whether a digest is of the files as they were at the last refresh, or are now."""
        if rank not in self._checked and digest.stamp == self._rank_stamp(rank):
            self._checked.add(rank)
        return rank in self._checked

    def _rank_stamp(self, rank: int) -> Stamp:
        return *stamp_of(self.run.events(rank), len(self._parts[rank])), len(
            self._membership_starts()
        ) if rank != self.witness else 0

    def _make_digest(self, rank: int, file: RankFile) -> Digest:
        before = self._digests.pop(rank, None)
        self._digested_bytes -= before.nbytes if before is not None else 0
        digest = Digest.of(file.kept(), self._rank_stamp(rank))
        if self._digested_bytes + digest.nbytes <= MOST_DIGEST_BYTES:
            self._digests[rank] = digest
            self._digested_bytes += digest.nbytes
            self._checked.add(rank)
        return digest

    def _column_spans(self, file: RankFile, column: int, span: tuple[int, int], *, raw_steps: int) -> Spans:
        """A series as spans of steps: of one event each where they are few, of one block each where they are many."""
        kept = file.kept()
        blocks = kept.blocks
        inside = (blocks["last"] >= span[0]) & (blocks["first"] <= span[1])
        numbers = np.flatnonzero(inside)
        if int(blocks["steps"][numbers].sum()) <= raw_steps:
            return join_spans([Spans.of_rows(file.rows(int(number)), column, span) for number in numbers])
        cut = numbers[kept.is_cut[numbers]][: RAW_STEPS // 256]
        parts = [Spans.of_rows(file.rows(int(number)), column, span).merged() for number in cut]
        inside[cut] = False
        return join_spans([Spans.of_blocks(blocks, column, kept.below, inside), *parts])

    def _series_column(self, name: str) -> int:
        """Where a series stands."""
        if name == MFU:
            return COLUMN["tokens_per_s"]
        if name not in COLUMN:
            close = nearest(name, [*COLUMN, MFU])
            fix = f"did you mean {close}?" if close else "ask for its names"
            raise mistake(self.run.name, f"has no series {name[:60]!r}", fix=fix)
        return COLUMN[name]

    def _series_scale(self, name: str, first: NDArray[np.int64]) -> NDArray[np.float64]:
        """What to multiply each bucket of a series with, by its first step."""
        if name != MFU:
            return np.ones(len(first))
        scales = self._mfu_scales()
        begins = np.array([begin for begin, _ in scales], dtype=np.int64)
        per_token = np.array([float("nan"), *(scale for _, scale in scales)])
        found: NDArray[np.float64] = per_token[np.searchsorted(begins, first, side="right")]
        return found

    def _mfu_scales(self) -> tuple[tuple[int, float], ...]:
        """First step of each layout, and its MFU at one token per second: by its own plan and devices."""
        from phalanx.record.account.memberships import layout_spans  # it reads a history

        try:
            changed = self.run.plan_json.stat().st_mtime_ns
        except OSError:
            changed = 0
        formed = sum(one["event"] == "epoch" for one in self._reported)
        stamp = changed, formed, len(self.events("run_start")), self.last_step is None
        if stamp != self._plan_seen[0]:
            known = [(one.first, one.mfu_per_token) for one in layout_spans(self.run, self)]
            made = tuple((first, scale if scale is not None else float("nan")) for first, scale in known)
            self._plan_seen = stamp, made if any(scale == scale for _, scale in made) else ()
        return self._plan_seen[1]

    # ---- events ------------------------------------------------------------------------------------------------------

    def events(self, *kinds: str, rank: int | None = None) -> list[Event]:
        """The rare events of a rank, oldest first: of these kinds, or all but step, monitor and peers."""
        return self._rank_file(rank).events(kinds) if (rank := self._rank_or_witness(rank)) in self._parts else []

    def supervisor(self) -> list[Event]:
        """What the supervisor wrote."""
        return list(self._reported)

    def latest(self, kind: str, rank: int | None = None) -> Event | None:
        """The last event of a kind."""
        return self._rank_file(rank).latest(kind) if (rank := self._rank_or_witness(rank)) in self._parts else None

    def steps(self, rank: int, first: int, last: int) -> Iterator[Event]:
        """The step events of a short range, those that stayed."""
        return self._rank_file(rank).steps(first, last) if rank in self._parts else iter(())

    def steps_with(self, kind: str, rank: int | None = None) -> tuple[int, ...]:
        """The steps for which a rank has an event of a rare kind, without reading them."""
        found = self._rank_file(rank).steps_with(kind) if (rank := self._rank_or_witness(rank)) in self._parts else ()
        return tuple(sorted(step for step in found if step >= 0))

    def at_step(self, kind: str, step: int, rank: int | None = None) -> Event | None:
        """The newest event of a rare kind for a step."""
        return (
            self._rank_file(rank).at_step(kind, step) if (rank := self._rank_or_witness(rank)) in self._parts else None
        )

    def damage(self) -> list[Damage]:
        """What cannot be read, as far as the run was looked at; nothing is left out silently."""
        for rank, file in self._files.items():
            self._troubles[rank] = file.troubles() | self._troubles.get(rank, Counter())
        start = self.latest("run_start") or {}
        found = folder_damage(self.run, self.ranks)
        found += supervisor_damage(self.run, self.ranks, generation=integer(start, "epoch") or 0)
        found += of_ranks(self._troubles)
        skipped = self._supervisor.skipped
        if self.run.status().get("state") in ENDED:  # nobody is going to write more
            torn = {rank: Counter({TORN: file.torn}) for rank, file in self._files.items() if file.torn}
            found += [*of_ranks(torn), *of_ranks(self._short_records())]
            skipped += self._supervisor.is_torn
        if skipped:
            what = "lines that are no events"
            found.append(Damage(where=self.run.supervisor.name, what=what, count=skipped))
        return found

    def look(self) -> None:
        """Read ranks so that `damage` tells of them: few of them, and as much as takes a tenth of a second."""
        left = LOOK_BYTES
        for rank in self.ranks[:LOOK_RANKS]:
            file = self._rank_file(rank)
            if (unread := file.unread) <= left:
                left -= unread
                file.kept()

    def _short_records(self) -> dict[int, Counter[str]]:
        """Ranks of the last membership whose record ends long before the others', of those that were looked at."""
        reported = next((one for one in reversed(self._reported) if one["event"] == "epoch"), {})
        world = integer(reported, "world") or self.run.world() or 0
        ends = {rank: file.end for rank, file in self._files.items() if rank < world and file.unread <= MOST_BYTES}
        last, last_s = (max((end[which] for end in ends.values()), default=0) for which in (0, 1))
        short = {rank: last - step for rank, (step, t) in ends.items() if last - step > FEW and last_s - t > FEW_S}
        return {
            rank: Counter({f"the record ends {plural(gap, 'step')} before that of others": 1})
            for rank, gap in short.items()
        }


def spread_ranks(ranks: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` of the ranks, evenly spread, the first among them.

    >>> spread_ranks(range(10), 4)
    (0, 2, 5, 7)
    """
    if len(ranks) <= count:
        return tuple(ranks)
    return tuple(ranks[number * len(ranks) // count] for number in range(count))


def _step_span(first: int | None, last: int | None) -> tuple[int, int]:
    most = 2**62
    return max(-most, -most if first is None else first), min(most, most if last is None else last)


def _values_or_none(numbers: NDArray[np.float64]) -> tuple[float | None, ...]:
    return tuple(value if value == value else None for value in numbers.tolist())
