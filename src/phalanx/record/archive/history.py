"""The history of a run: curves, meshes and events from its folder, while the run grows and afterwards.

No file is loaded completely. Long ranges are drawn from blocks (blocks.py), short ones from the events themselves.
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

# Steps of a curve that are drawn from the events: 10 MB, parsed in about 0.2 s.
RAW_STEPS = 16_384
RAW_MESH_STEPS = 32_768  # of all ranks together
MOST_POINTS = 20_000
MOST_HELD_BYTES = 32 * 2**20  # indexes in memory: 100 ranks of 100,000 steps
# Means for meshes: 1,200 such ranks; further ranks are read again for each mesh.
MOST_DIGEST_BYTES = 96 * 2**20
# Bytes that one mesh may read of ranks without an index, about 4 s.
MOST_SCAN_BYTES = 256 * 2**20
MOST_SUPERVISOR = 50_000
# With more ranks than this, meshes show some of them, evenly spread.
MANY_RANKS = 1024
SAMPLE_RANKS = 256
# Ranks whose newest blocks are read at once: 10 MB.
GLANCE_RANKS = 4096
LOOK_RANKS, LOOK_BYTES = 16, 8 * 2**20
# Steps and seconds that a killed rank may not have written.
FEW, FEW_S = 10, 5.0
T = TypeVar("T")
TORN = "torn last line"
TOO_LONG = "not read for the mesh: without an index, and too long to be read for all ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One series of one rank in buckets of steps.

    A bucket has its first step, the time of its last step, and its minimum, maximum and mean.
    """

    name: str
    unit: str
    step: tuple[int, ...]
    t: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    mean: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One series of many ranks: the mean `values[row][column]`.

    `ranks` has the rank of each row, `step` the first step of each column. With more than MANY_RANKS ranks, a sample
    of them, evenly spread.
    """

    name: str
    unit: str
    ranks: tuple[int, ...]
    step: tuple[int, ...]
    t: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]


class RunHistory:
    """Reads a run on demand, only as far as needed. Not thread-safe."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ranks: tuple[int, ...] = ()
        # Ranks that meshes show: all, or an evenly spread sample of very many.
        self.sample: tuple[int, ...] = ()
        # The observer: the lowest rank that has a record. Its events represent the run.
        self.witness = 0
        self._parts: dict[int, list[int]] = {}
        self._files: OrderedDict[int, RankFile] = OrderedDict()
        self._cache = RowCache()
        self._starts: tuple[Start, ...] = ()
        self._starts_known = False  # since the last refresh
        # Ranks refreshed since the last refresh of the history.
        self._fresh: set[int] = set()
        self._digests: dict[int, Digest] = {}
        self._digested_bytes = 0
        self._newest: dict[tuple[str, ...], dict[str, NDArray[np.float64]]] = {}  # since the last refresh
        self._answers: dict[Hashable, Any] = {}  # results of `once` since the last refresh
        # Ranks whose digests are known to be current since the last refresh.
        self._checked: set[int] = set()
        self._budget = MOST_SCAN_BYTES
        self._held: dict[int, int] = {}  # bytes in memory, by rank
        self._troubles: dict[int, Counter[str]] = {}
        self._supervisor = EventReader(run.supervisor)
        self._reported: list[Event] = []
        self._plan_seen: tuple[object, tuple[tuple[int, float], ...]] = (None, ())

    @classmethod
    def open(cls, run: Run) -> RunHistory:
        """Open the history of a run; it works for any folder, and `damage` lists what is missing."""
        history = cls(run)
        history.refresh()
        return history

    def refresh(self) -> bool:
        """Look for new data; return True if there was any. Ranks other than the observer are read on demand."""
        self._parts = self.run.event_parts()
        new, self.ranks = tuple(self._parts) != self.ranks, tuple(self._parts)
        self.sample = spread_ranks(self.ranks, SAMPLE_RANKS) if len(self.ranks) > MANY_RANKS else self.ranks
        self.witness = next(self.run.recorded(), self.ranks[0] if self.ranks else 0)
        self._fresh.clear()
        self._checked.clear()
        self._newest.clear()
        self._answers.clear()
        new_events = self._supervisor.read()[-MOST_SUPERVISOR:]
        self._reported = (self._reported + new_events)[-MOST_SUPERVISOR:]
        self._starts_known = False
        return (bool(self.ranks) and self._rank_file(self._rank_or_witness(None)).changed) or new or bool(new_events)

    def once(self, question: Hashable, work_out: Callable[[], T]) -> T:
        """Compute a value derived from this history at most once between two refreshes."""
        if question not in self._answers:
            self._answers[question] = work_out()
        answer: T = self._answers[question]
        return answer

    def _membership_starts(self) -> tuple[Start, ...]:
        """Return the starts of the memberships, from the events of rank 0, which is in all of them.

        A membership that starts earlier also undoes steps of ranks that had left. If rank 0 has no record, the
        observer's events are used. They are not read for this where no index covers them: then the starts are as known
        before.
        """
        observer_file = self._files[self.witness] if self.witness in self._fresh else None
        if not self._starts_known and observer_file is not None and observer_file.unread <= MOST_BYTES:
            events = observer_file.events(("run_start",))
            starts = [(integer(event, "epoch"), integer(event, "step")) for event in events]
            self._starts = tuple(
                (generation, step) for generation, step in starts if generation is not None and step is not None
            )
            self._starts_known = True
        return self._starts

    def _rank_file(self, rank: int) -> RankFile:
        """Return a rank's events, refreshed once between two refreshes of the history."""
        file = self._files.pop(rank, None) or RankFile(self.run.events(rank), self._parts[rank], self._cache)
        self._files[rank] = file
        # The observer's own events repeat the undone steps.
        if rank != self.witness:
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
        """Drop the least recently used ranks from memory, but remember their troubles."""
        held_bytes = sum(self._held.values())
        while held_bytes > MOST_HELD_BYTES and len(self._files) > 1:
            rank, dropped = self._files.popitem(last=False)
            self._fresh.discard(rank)
            held_bytes -= self._held.pop(rank)
            self._troubles[rank] = dropped.troubles()

    @property
    def first_step(self) -> int | None:
        """The first recorded step; None if there is none."""
        return self._edge_step("first")

    @property
    def last_step(self) -> int | None:
        """The last recorded step; None if there is none."""
        return self._edge_step("last")

    def _edge_step(self, which: str) -> int | None:
        if not self.ranks:
            return None
        kept_blocks = self._rank_file(self._rank_or_witness(None)).kept()
        stay = kept_blocks.blocks["steps"] > 0
        if not stay.any():
            return None
        if which == "first":
            return int(kept_blocks.blocks["first"][stay][0])
        return int(np.minimum(kept_blocks.blocks["last"], kept_blocks.below - 1)[stay][-1])

    # ---- numbers over time -------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Return the series that this run has."""
        if not self.ranks:
            return ()
        counts = self._rank_file(self._rank_or_witness(None)).kept().blocks["series"]["count"].sum(axis=0)
        names = [series.name for number, series in enumerate(SERIES) if counts[number]]
        return (*names, MFU) if "tokens_per_s" in names and self._mfu_scales() else tuple(names)

    def curve(
        self,
        name: str,
        *,
        rank: int | None = None,
        first: int | None = None,
        last: int | None = None,
        points: int = 800,
    ) -> Curve:
        """Return a series of a rank (default: the observer) in at most `points` buckets of steps."""
        column = self._series_column(name)
        spans = Spans.none()
        if (rank := self._rank_or_witness(rank)) in self._parts:
            spans = self._column_spans(self._rank_file(rank), column, _step_span(first, last), raw_steps=RAW_STEPS)
        buckets = bucket_spans(spans, max(1, min(points, MOST_POINTS)))
        scale = self._series_scale(name, buckets.first)
        return Curve(
            name=name,
            unit=unit_of(name),
            step=tuple(buckets.first.tolist()),
            t=tuple(buckets.t.tolist()),
            low=_values_or_none(buckets.low * scale),
            high=_values_or_none(buckets.high * scale),
            mean=_values_or_none(buckets.mean * scale),
        )

    def by_step(
        self, names: Sequence[str] = (), *, rank: int | None = None, first: int | None = None, last: int | None = None
    ) -> dict[str, list[float | int | None]]:
        """Return columns of a rank with a row per recorded step, `step` first; None where a series has no value."""
        low, high = self.first_step, self.last_step
        chosen = tuple(names) or self.names()
        columns: dict[str, list[float | int | None]] = {"step": [], **{name: [] for name in chosen}}
        if low is None or high is None:
            return columns
        low, high = max(low, low if first is None else first), min(high, high if last is None else last)
        # A longer curve would be drawn from means of blocks.
        for begin in range(low, high + 1, RAW_STEPS):
            end = min(begin + RAW_STEPS - 1, high)
            values_by_step = {}
            for name in chosen:
                curve = self.curve(name, rank=rank, first=begin, last=end, points=RAW_STEPS)
                values_by_step[name] = dict(zip(curve.step, curve.mean, strict=True))
            steps = sorted(set().union(*values_by_step.values()))
            columns["step"] += steps
            for name in chosen:
                columns[name] += [values_by_step[name].get(step) for step in steps]
        return columns

    def mesh(self, name: str, *, columns: int = 120, first: int | None = None, last: int | None = None) -> Mesh:
        """Return a series of all ranks in at most `columns` columns.

        If a step was repeated within a block, that block's mean includes the undone step.
        """
        return self.meshes((name,), columns=columns, first=first, last=last)[0]

    def meshes(
        self, names: Sequence[str], *, columns: int = 120, first: int | None = None, last: int | None = None
    ) -> tuple[Mesh, ...]:
        """Return several series of all ranks; the events of each rank are read once for all of them."""
        series_columns = [self._series_column(name) for name in names]
        self._budget = MOST_SCAN_BYTES
        span = _step_span(first, last)
        rows = [[self._mesh_row(rank, column, span) for column in series_columns] for rank in self.sample]
        return tuple(
            self._make_mesh(name, [row[number] for row in rows], columns=columns) for number, name in enumerate(names)
        )

    @property
    def is_sampled(self) -> bool:
        """True if there are so many ranks that meshes show a sample of them."""
        return len(self.sample) < len(self.ranks)

    def newest(self, *names: str) -> dict[str, NDArray[np.float64]]:
        """Return means over the newest steps (at most 256) of every rank, in the order of `ranks`, from indexes alone.

        NaN for a rank without an index. Made for very many ranks: 16,384 of them take about half a second.
        """
        if names in self._newest:
            return self._newest[names]
        columns = [self._series_column(name) for name in names]
        parts = []
        for begin in range(0, len(self.ranks), GLANCE_RANKS):
            ranks = self.ranks[begin : begin + GLANCE_RANKS]
            blocks = newest_blocks(str(self.run.path), ranks)
            series = blocks["series"][:, columns]
            parts.append(np.where(series["count"] > 0, series["mean"], np.nan).astype(np.float64))
        means = np.concatenate(parts) if parts else np.zeros((0, len(names)))
        self._newest[names] = {name: means[:, number] for number, name in enumerate(names)}
        return self._newest[names]

    def _make_mesh(self, name: str, rows: Sequence[Spans], *, columns: int) -> Mesh:
        mesh_columns = columns_of(rows, max(1, min(columns, MOST_POINTS)))
        scale = self._series_scale(name, mesh_columns.first)
        values = tuple(_values_or_none(row * scale) for row in mesh_columns.values)
        step, t = tuple(mesh_columns.first.tolist()), tuple(mesh_columns.t.tolist())
        return Mesh(name=name, unit=unit_of(name), ranks=self.sample, step=step, t=t, values=values)

    def _mesh_row(self, rank: int, column: int, span: tuple[int, int]) -> Spans:
        """Return one rank's row of a mesh."""
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
        """Return True if a digest matches the files as they were at the last refresh, or as they are now."""
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
        """Return a series as spans of steps: one per event if there are few steps, one per block if there are many."""
        kept_blocks = file.kept()
        blocks = kept_blocks.blocks
        inside = (blocks["last"] >= span[0]) & (blocks["first"] <= span[1])
        numbers = np.flatnonzero(inside)
        if int(blocks["steps"][numbers].sum()) <= raw_steps:
            return join_spans([Spans.of_rows(file.rows(int(number)), column, span) for number in numbers])
        cut = numbers[kept_blocks.is_cut[numbers]][: RAW_STEPS // 256]
        parts = [Spans.of_rows(file.rows(int(number)), column, span).merged() for number in cut]
        inside[cut] = False
        return join_spans([Spans.of_blocks(blocks, column, kept_blocks.below, inside), *parts])

    def _series_column(self, name: str) -> int:
        """Return the column of a series; raise UserError for an unknown name."""
        if name == MFU:
            return COLUMN["tokens_per_s"]
        if name not in COLUMN:
            close = nearest(name, [*COLUMN, MFU])
            fix = f"did you mean {close}?" if close else "ask for its names"
            raise mistake(self.run.name, f"has no series {name[:60]!r}", fix=fix)
        return COLUMN[name]

    def _series_scale(self, name: str, first: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the factor for each bucket of a series, by its first step."""
        if name != MFU:
            return np.ones(len(first))
        scales = self._mfu_scales()
        begins = np.array([begin for begin, _ in scales], dtype=np.int64)
        per_token = np.array([float("nan"), *(scale for _, scale in scales)])
        factors: NDArray[np.float64] = per_token[np.searchsorted(begins, first, side="right")]
        return factors

    def _mfu_scales(self) -> tuple[tuple[int, float], ...]:
        """Return the first step of each layout, and its MFU at one token per second, by its own plan and devices."""
        # Imported here because it imports this module.
        from phalanx.record.account.memberships import layout_spans

        try:
            changed = self.run.plan_json.stat().st_mtime_ns
        except OSError:
            changed = 0
        memberships = sum(event["event"] == "epoch" for event in self._reported)
        stamp = changed, memberships, len(self.events("run_start")), self.last_step is None
        if stamp != self._plan_seen[0]:
            scale_by_step = [(span.first, span.mfu_per_token) for span in layout_spans(self.run, self)]
            scales = tuple((first, scale if scale is not None else float("nan")) for first, scale in scale_by_step)
            self._plan_seen = stamp, scales if any(scale == scale for _, scale in scales) else ()
        return self._plan_seen[1]

    # ---- events ------------------------------------------------------------------------------------------------------

    def events(self, *kinds: str, rank: int | None = None) -> list[Event]:
        """Return the rare events of a rank, oldest first: of these kinds, or all but step, monitor and peers."""
        return self._rank_file(rank).events(kinds) if (rank := self._rank_or_witness(rank)) in self._parts else []

    def supervisor(self) -> list[Event]:
        """Return the events of the coordinator."""
        return list(self._reported)

    def latest(self, kind: str, rank: int | None = None) -> Event | None:
        """Return the last event of a kind."""
        return self._rank_file(rank).latest(kind) if (rank := self._rank_or_witness(rank)) in self._parts else None

    def steps(self, rank: int, first: int, last: int) -> Iterator[Event]:
        """Return the step events of a short range that stayed."""
        return self._rank_file(rank).steps(first, last) if rank in self._parts else iter(())

    def steps_with(self, kind: str, rank: int | None = None) -> tuple[int, ...]:
        """Return the steps for which a rank has an event of a rare kind, without reading the events."""
        steps = self._rank_file(rank).steps_with(kind) if (rank := self._rank_or_witness(rank)) in self._parts else ()
        return tuple(sorted(step for step in steps if step >= 0))

    def at_step(self, kind: str, step: int, rank: int | None = None) -> Event | None:
        """Return the newest event of a rare kind for a step."""
        return (
            self._rank_file(rank).at_step(kind, step) if (rank := self._rank_or_witness(rank)) in self._parts else None
        )

    def damage(self) -> list[Damage]:
        """Return everything that could not be read in the parts of the run read so far."""
        for rank, file in self._files.items():
            self._troubles[rank] = file.troubles() | self._troubles.get(rank, Counter())
        start = self.latest("run_start") or {}
        problems = folder_damage(self.run, self.ranks)
        problems += supervisor_damage(self.run, self.ranks, generation=integer(start, "epoch") or 0)
        problems += of_ranks(self._troubles)
        skipped = self._supervisor.skipped
        # No process will complete the last line.
        if self.run.status().get("state") in ENDED:
            torn = {rank: Counter({TORN: file.torn}) for rank, file in self._files.items() if file.torn}
            problems += [*of_ranks(torn), *of_ranks(self._short_records())]
            skipped += self._supervisor.is_torn
        if skipped:
            message = "lines that are no events"
            problems.append(Damage(where=self.run.supervisor.name, what=message, count=skipped))
        return problems

    def look(self) -> None:
        """Read the first ranks so that `damage` covers them.

        At most LOOK_RANKS ranks and LOOK_BYTES, which takes a tenth of a second.
        """
        remaining_bytes = LOOK_BYTES
        for rank in self.ranks[:LOOK_RANKS]:
            file = self._rank_file(rank)
            if (unread := file.unread) <= remaining_bytes:
                remaining_bytes -= unread
                file.kept()

    def _short_records(self) -> dict[int, Counter[str]]:
        """Return the ranks of the last membership that were read and whose record ends long before the others'."""
        newest_epoch = next((event for event in reversed(self._reported) if event["event"] == "epoch"), {})
        world = integer(newest_epoch, "world") or self.run.world() or 0
        ends = {rank: file.end for rank, file in self._files.items() if rank < world and file.unread <= MOST_BYTES}
        last, last_s = (max((end[which] for end in ends.values()), default=0) for which in (0, 1))
        short = {rank: last - step for rank, (step, t) in ends.items() if last - step > FEW and last_s - t > FEW_S}
        return {
            rank: Counter({f"the record ends {plural(gap, 'step')} before that of others": 1})
            for rank, gap in short.items()
        }


def spread_ranks(ranks: Sequence[int], count: int) -> tuple[int, ...]:
    """Return at most `count` of the ranks, evenly spread, including the first.

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
