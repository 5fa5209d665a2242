"""The memberships of a run, one timeline of the marks their ranks recorded, and the spans of steps per layout.

The observer of a membership (`witness` in the code) is the lowest rank with a record that did not fail in it; its
events stand for all ranks. Event files call the generation of a membership `epoch`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, printable, seconds
from phalanx.record.events import MOST_LINE_BYTES, Event, event_files_of, parse_event
from phalanx.record.host_file import open_events
from phalanx.record.run import Run
from phalanx.record.run_files import read_json

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory


NEVER_UNDONE = 2**63
# Ranks that are searched for one that did not fail: more than a rack of them.
MOST_WITNESSES = 2048
LATEST_S = 1e11  # a later time is invalid: the year 5138
# A gap this long between two events of one membership means that the clock was set.
JUMP_S = 30 * 86400.0
# Two threads of a rank may write out of order by this much.
UNEVEN_S = 1e-3

# Lines of other kinds are skipped unparsed: a timeline may have 100 kB, and telemetry carries no account.
REPORTED = frozenset(
    b"ready run_start compile_check step evaluate checkpoint sample stop run_end".split()
    + b"host epoch restore incident end".split()
)
_KIND = re.compile(rb'"event"\s*:\s*"([^"\\]*)"')


@dataclass(kw_only=True, slots=True)
class RecordedMembership:
    """One generation, and the steps that later memberships undid."""

    generation: int
    world: int
    from_step: int | None = None
    fallen: set[int] = field(default_factory=set)
    recorded: tuple[int, ...] = ()  # ranks that have a record
    floor: int = NEVER_UNDONE  # steps from here on were undone by a later membership

    @property
    def witness(self) -> int:
        """The rank whose events are read for this membership."""
        present_ranks = [rank for rank in self.recorded if rank < self.world]
        return next(
            (rank for rank in present_ranks or range(self.world) if rank not in self.fallen),
            present_ranks[0] if present_ranks else 0,
        )


def read_memberships(run: Run, *, starts: Callable[[int], Iterable[Event]] | None = None) -> list[RecordedMembership]:
    """Return all memberships in order; for a run without a coordinator, one per start.

    `starts` returns the `run_start` events of a rank if the caller knows them, so that the events are not read again.
    """
    starts_of = starts or functools.partial(_start_events, run)
    memberships = (
        _supervised_memberships(run, starts_of) if run.supervisor.is_file() else list(_started_memberships(run))
    )
    floor = NEVER_UNDONE
    for membership in reversed(memberships):
        membership.floor = floor
        floor = floor if membership.from_step is None else min(floor, membership.from_step)
    return memberships


def _supervised_memberships(run: Run, starts: Callable[[int], Iterable[Event]]) -> list[RecordedMembership]:
    memberships: dict[int, RecordedMembership] = {}
    recorded = tuple(itertools.islice(run.recorded(), MOST_WITNESSES))
    for _, event in MarkReader().read(event_files_of(run.supervisor)):
        kind, generation = event["event"], integer(event, "epoch")
        if kind == "epoch" and generation is not None:
            world = max(1, integer(event, "world") or 1)
            memberships[generation] = RecordedMembership(generation=generation, world=world, recorded=recorded)
        elif kind == "restore" and generation in memberships:
            memberships[generation].from_step = integer(event, "step")
        elif kind == "incident" and generation in memberships:
            other_ranks = event.get("others")
            ranks = [event.get("rank"), *(other_ranks if isinstance(other_ranks, list) else ())]
            memberships[generation].fallen.update(rank for rank in ranks if isinstance(rank, int))
    for rank in sorted({membership.witness for membership in memberships.values()}):
        for event in starts(rank):
            generation = integer(event, "epoch")
            if generation in memberships and memberships[generation].witness == rank:
                # The step of an older checkpoint, if a damaged one was skipped.
                memberships[generation].from_step = integer(event, "step")
    return list(memberships.values())


def _started_memberships(run: Run) -> Iterator[RecordedMembership]:
    for count, event in enumerate(_start_events(run, next(run.recorded(), 0))):
        world = max(1, integer(event, "world") or 1)
        yield RecordedMembership(generation=count, world=world, from_step=integer(event, "step"))


def _start_events(run: Run, rank: int) -> Iterator[Event]:
    marks = MarkReader().read(files_of(run, rank), only=b"run_start")
    return (event for _, event in marks if event["event"] == "run_start")


def files_of(run: Run, rank: int) -> list[Path]:
    """Return the event files of a rank, oldest first: the parts closed for their size, then the growing file."""
    return event_files_of(run.events(rank))


# ---- the timeline of marks -------------------------------------------------------------------------------------------

# Time, number of the membership (-1: the coordinator), event.
Mark = tuple[float, int, Event]


def merged_marks(run: Run, known: Sequence[RecordedMembership], lines: MarkReader) -> Iterator[Mark]:
    """Yield the marks of the coordinator and of the observers in the order of time."""
    if not run.supervisor.is_file():
        return _unsupervised_marks(run, lines)
    numbers = {membership.generation: count for count, membership in enumerate(known)}
    files = [
        _rank_marks(run, rank, known, numbers, lines) for rank in sorted({membership.witness for membership in known})
    ]
    supervisor = ((time_s, -1, event) for time_s, event in lines.read(event_files_of(run.supervisor)))
    # At equal times, ranks before the coordinator's `end`.
    return heapq.merge(*files, supervisor, key=lambda mark: mark[0])


def _rank_marks(
    run: Run, rank: int, known: Sequence[RecordedMembership], numbers: Mapping[int, int], lines: MarkReader
) -> Iterator[Mark]:
    """Yield the events of a rank in the memberships that it observes."""
    observed = {generation: count for generation, count in numbers.items() if known[count].witness == rank}
    generation: int | None = None
    for time_s, event in lines.read(files_of(run, rank)):
        generation = integer(event, "epoch") if "epoch" in event else generation
        count = observed.get(generation, -1) if generation is not None else -1
        if count >= 0:
            yield time_s, count, event


def _unsupervised_marks(run: Run, lines: MarkReader) -> Iterator[Mark]:
    """Yield the events of rank 0 or the lowest rank with a record; a `ready` after a start begins a membership."""
    count, started = 0, False
    for time_s, event in lines.read(files_of(run, next(run.recorded(), 0))):
        if event["event"] == "ready" and started:
            count, started = count + 1, False
        elif event["event"] == "run_start":
            count, started = count + started, True
        yield time_s, count, event


class MarkReader:
    """Reads events line by line; counts and skips lines that are not events with a valid time.

    Times come out in order: a clock that was set back, or that leapt within a membership, is counted and compensated.
    """

    def __init__(self, kinds: frozenset[bytes] = REPORTED) -> None:
        self._kinds = kinds
        self.unreadable = 0
        self.jumps = 0

    def read(self, paths: Iterable[Path], *, only: bytes = b"") -> Iterator[tuple[float, Event]]:
        """Yield time and event of every line of an accounted kind; lines without `only` are skipped unparsed."""
        clock = Clock()
        for path in paths:
            for line in raw_lines(path):
                event = self._parse_mark(line) if only in line else None
                if event is not None:
                    yield clock.time(event), event
        self.jumps = max(self.jumps, clock.jumps)  # files of one machine show the same jump

    def _parse_mark(self, line: bytes) -> Event | None:
        kind = _KIND.search(line[:200])
        if kind is not None and kind.group(1) not in self._kinds:
            return None
        event = parse_event(line, strict=True)
        if event is None or not is_timed(event):
            self.unreadable += bool(line.strip())
            return None
        return event


class Clock:
    """The times of one file's events, corrected so that they only go forward."""

    def __init__(self) -> None:
        self._shift_s = 0.0
        self._last_s: float | None = None
        self.jumps = 0

    def time(self, event: Event) -> float:
        """Return the time of an event on the clock with which the file began."""
        now_s = float(event["t"]) + self._shift_s
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            leapt = gap_s > JUMP_S and event["event"] in ("step", "evaluate", "checkpoint")
            if leapt or gap_s < -UNEVEN_S:
                self.jumps += abs(gap_s) > 1.0
                now_s = self._last_s + (seconds(event, "duration_s") or 0.0)
                self._shift_s = now_s - float(event["t"])
        self._last_s = now_s if self._last_s is None else max(now_s, self._last_s)
        return self._last_s

    @property
    def last_s(self) -> float:
        """The newest time; 0 before the first."""
        return 0.0 if self._last_s is None else self._last_s

    @property
    def is_even(self) -> bool:
        """True if the times are those of the events: the clock has not been corrected."""
        return self._shift_s == 0.0

    def follow(self, time_s: float) -> None:
        """Advance to this time after events that were in order."""
        self._last_s = time_s


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, if it exists; an overlong line comes in pieces."""
    try:
        file = open_events(path, buffering=-1)
    except OSError:
        return
    with file:
        try:
            while line := file.readline(MOST_LINE_BYTES):
                yield line
        except OSError:  # a failing disk, or a folder of that name
            return


def is_timed(event: Event) -> bool:
    """Return True if an event has a valid time."""
    time_s = number(event, "t")
    return time_s is not None and 0.0 <= time_s <= LATEST_S


# ---- the steps of each layout ----------------------------------------------------------------------------------------
# Prediction and measurement are compared per layout. A run that is resumed in another layout, or continues with fewer
# Prediction and measurement are compared per layout. A run that is resumed in another layout, or continues with fewer
# ranks, has several. A step counts for the membership whose step stayed. Each span has its layout's plan; a layout
# that was not planned, as after a lost rank, has none.

MOST_PLANS = 1000
PLAN = re.compile(r"plan-([1-9]\d{0,5})\.json")
Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSpan:
    """Steps `first` to `last` that stayed, all done in one layout."""

    layout: Table
    world: int
    first: int
    last: int
    generations: tuple[int, ...]  # memberships that did the steps
    plan: Table  # of this layout; empty if there is none
    # The plan that the run had then, of any layout: it has the count of FLOPs, the devices and their price.
    under: Table

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """The layout's short name."""
        return layout_name(self.layout) or "layout not recorded"

    @property
    def mfu_per_token(self) -> float | None:
        """MFU at one token per second: the plan's count of FLOPs over the peak of the devices of these ranks."""
        return measured_mfu(self.under, 1.0, world=self.world)


def measured_mfu(plan: Table, tokens_per_s: float | None, *, world: int | None = None) -> float | None:
    """Return the MFU at a measured rate, by the plan's count of FLOPs; None if the plan or the rate is missing.

    The peak is that of `world` ranks if given: fewer than planned after a loss. The result is the planned MFU times
    the ratio of the rates, since the FLOPs per token and the peak of a device are the plan's in both.
    """
    prediction, planned_world = at(plan, "prediction"), world_of(at(plan, "layout"))
    planned_mfu, rate = number(prediction, "mfu"), number(prediction, "tokens_per_s")
    if not planned_mfu or not rate or tokens_per_s is None or tokens_per_s < 0.0:
        return None
    return planned_mfu * tokens_per_s / rate * (planned_world / world if planned_world and world else 1.0)


def world_of(layout: Table) -> int | None:
    """Return the number of ranks of a layout; None if it has no valid `data` axis."""
    sizes = [integer(layout, axis) for axis in ("data", "tensor", "context", "pipeline")]
    return math.prod(max(1, size or 1) for size in sizes) if sizes[0] else None


def layout_name(layout: Table) -> str:
    """Return a layout's name as in the plan (`plan.layout.Layout.name`); empty if it has no `data` axis.

    >>> layout_name({"data": 2, "shard": 2, "tensor": 1, "context": 1, "pipeline": 2, "zero": 2, "micro_batch": 2})
    'TP1·CP1·PP2·DP2 (ZeRO-2, EP1) mbs2 no-recompute'
    """
    data = integer(layout, "data")
    if data is None:
        return ""
    size = {
        axis: integer(layout, axis) or 1 for axis in ("tensor", "context", "pipeline", "virtual_pipeline", "expert")
    }
    zero, shard = integer(layout, "zero") or 0, integer(layout, "shard") or data
    grouped = f"/{shard}" if zero and shard < data * size["context"] else ""
    stages = f"PP{size['pipeline']}" + (f"·VPP{size['virtual_pipeline']}" if size["virtual_pipeline"] > 1 else "")
    head = f"TP{size['tensor']}·CP{size['context']}·{stages}·DP{data} (ZeRO-{zero}{grouped}, EP{size['expert']})"
    recompute = printable(layout.get("recompute") or "none", most=40)
    words = [f"mbs{integer(layout, 'micro_batch') or 1}", "no-recompute" if recompute == "none" else recompute]
    if size["pipeline"] > 1 and layout.get("schedule") in ("gpipe", "zero-bubble"):
        words.append(str(layout["schedule"]))
    for key, word in (("offload", "offload"), ("compression", "grads")):
        if layout.get(key) not in (None, "none"):
            words.append(f"{word}-{printable(layout[key], most=40)}")
    return " ".join([head, *words])


def layout_spans(run: Run, history: RunHistory, known: Sequence[RecordedMembership] | None = None) -> list[LayoutSpan]:
    """Return the layout spans of a run in order: one if nothing changed, none before the first step."""
    first, last = history.first_step, history.last_step
    if first is None or last is None:
        return []
    # Cached in the history: a report calls this ten times, and each call looks at up to MOST_WITNESSES ranks.
    if known is None:
        stamp = history.run.plan_json.stat().st_mtime_ns if history.run.plan_json.exists() else 0
        return list(history.once(("layout spans", first, last, stamp), lambda: _find_spans(run, history, first, last)))
    return _find_spans(run, history, first, last, known)


def _find_spans(
    run: Run, history: RunHistory, first: int, last: int, known: Sequence[RecordedMembership] | None = None
) -> list[LayoutSpan]:
    if known is None:
        known = read_memberships(run, starts=lambda rank: history.events("run_start", rank=rank))
    events_by_generation = {
        integer(event, "epoch"): event for event in history.supervisor() if event["event"] == "epoch"
    }
    plans = _Plans(run)
    spans: list[LayoutSpan] = []
    for membership in known:
        event = events_by_generation.get(membership.generation, {})
        plan, under = plans.of(event)
        layout = at(event, "layout") or at(under, "layout")
        # A start without a recorded number of ranks counts as one rank: the layout is more reliable.
        reported_world = integer(event, "world") or (membership.world if membership.world > 1 else None)
        world = reported_world or world_of(layout) or run.world() or 1
        begin = first if membership.from_step is None and not spans else membership.from_step
        end = min(membership.floor - 1, last)
        if begin is None or begin > end:
            continue
        span = LayoutSpan(
            layout=layout,
            world=world,
            first=max(first, begin),
            last=end,
            generations=(membership.generation,),
            plan=plan,
            under=under,
        )
        if spans and _goes_on(spans[-1], span):
            before = spans.pop()
            span = LayoutSpan(
                layout=layout,
                world=world,
                first=before.first,
                last=end,
                generations=(*before.generations, membership.generation),
                plan=plan,
                under=under,
            )
        spans.append(span)
    if spans:
        return spans
    plan = plans.newest
    world = run.world() or 1
    return [
        LayoutSpan(
            layout=at(plan, "layout"), world=world, first=first, last=last, generations=(), plan=plan, under=plan
        )
    ]


def plan_at_step(run: Run, history: RunHistory, step: int | None) -> Table:
    """Return the plan of the layout that did a step; empty if that layout was not planned."""
    all_spans = layout_spans(run, history)
    spans = [span for span in all_spans if step is not None and span.first <= step <= span.last] or all_spans[-1:]
    return spans[0].plan if spans else _Plans(run).newest


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch of a run: its seconds, its number of ranks, and its plan."""

    seconds: float
    world: int
    plan: Table


def read_launches(run: Run, history: RunHistory) -> list[Launch]:
    """Return the launches that the coordinator recorded, oldest first.

    Their seconds give the share of each launch in the run.
    """
    plans, launches = _Plans(run), []
    began: list[tuple[float, Table, int]] = []  # start time, plan, number of ranks
    timed_events = [(time_s, event) for event in history.supervisor() if (time_s := number(event, "t")) is not None]
    launch_times = run.launches()
    ends = [time_s for time_s, event in timed_events if event["event"] == "end"]
    for time_s, event in timed_events:
        if event["event"] != "epoch":
            continue
        under, world = plans.of(event)[1], max(1, integer(event, "world") or 1)
        if event.get("reason") == "start" or not began:
            launched = max((launch_s for launch_s in launch_times if launch_s <= time_s), default=time_s)
            began.append((launched, under, world))
        else:
            # Devices that a launch has lost are still rented.
            began[-1] = (began[-1][0], began[-1][1], max(world, began[-1][2]))
    newest_s = max(
        [*(time_s for time_s, _ in timed_events), number(history.latest("step") or {}, "t") or 0.0], default=0.0
    )
    for count, (launched, under, world) in enumerate(began):
        until = began[count + 1][0] if count + 1 < len(began) else newest_s
        end_s = next((time_s for time_s in ends if launched < time_s <= until), until)
        launches.append(Launch(seconds=max(0.0, end_s - launched), world=world, plan=under))
    return launches


def _goes_on(before: LayoutSpan, after: LayoutSpan) -> bool:
    return before.layout == after.layout and before.world == after.world and before.under == after.under


class _Plans:
    """The plans that a run had, oldest first: plan-1.json and so on, then plan.json."""

    def __init__(self, run: Run) -> None:
        numbers = sorted(int(match.group(1)) for match in map(PLAN.fullmatch, _folder_names(run)) if match)[:MOST_PLANS]
        self._plans = [_read_table(run, f"plan-{number}.json") for number in numbers] + [_read_table(run, "plan.json")]
        # Plans are used in the order in which they were made.
        self._at = 0

    @property
    def newest(self) -> Table:
        return self._plans[-1]

    def of(self, event: Table) -> tuple[Table, Table]:
        """Return the plan of a membership's layout, empty if it has another, and the plan it was made under.

        An `epoch` event names the plan it was made under; in older records that is the next plan with its layout.
        """
        plan_number, layout = integer(event, "plan"), at(event, "layout")
        if plan_number is not None and 1 <= plan_number <= len(self._plans):
            self._at = plan_number - 1
        elif layout:
            later = range(self._at, len(self._plans))
            self._at = next((count for count in later if _is_of(self._plans[count], layout)), self._at)
        else:
            # A record without layouts: only the newest plan is certain.
            self._at = len(self._plans) - 1
        plan = self._plans[self._at]
        return (plan if not layout or _is_of(plan, layout) else {}), plan


def _is_of(plan: Table, layout: Table) -> bool:
    plan_layout = at(plan, "layout")
    return bool(plan_layout) and all(
        plan_layout.get(key) == value for key, value in layout.items() if key in plan_layout
    )


def _folder_names(run: Run) -> list[str]:
    try:
        return os.listdir(run.path)
    except OSError:
        return []


def _read_table(run: Run, name: str) -> Table:
    try:
        return read_json(run.path / name)
    except PhalanxError:
        return {}
