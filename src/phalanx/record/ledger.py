"""The ledger of a run: every second between launch and end in exactly one account, from its records alone.

One timeline is walked once, from mark to mark: the supervisor's events and those of one witness per formation, the
lowest rank that did not fall in it. Whether a step stayed is known beforehand from where later formations went on, so
nothing has to be remembered of the steps: a run of a million of them needs as much memory as one of ten.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from phalanx.errors import UserError
from phalanx.record.events import MOST_LINE_BYTES, Event
from phalanx.record.run import Run
from phalanx.units import format_seconds

TOLERANCE = 0.01  # of the wall clock
NEVER_UNDONE = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """Seconds, by what they were spent on."""

    productive: float = 0.0  # steps that stayed
    init: float = 0.0  # from a launch to its first step
    evaluate: float = 0.0
    checkpoint: float = 0.0  # training stood still for one, or for a copy in memory
    guard: float = 0.0  # copies of the state were compared
    detect: float = 0.0  # from the last sign of progress until a failure was noticed
    restore: float = 0.0  # from there, or from a planned change of members, to the next step
    lost_work: float = 0.0  # steps that were done and then undone
    stopping: float = 0.0  # from the last step's end, without what is counted above
    other: float = 0.0  # between steps, with nothing to say what for


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Where the time went. `overlap_s` are seconds that two marks both claim: clocks that jumped, or a wrong record."""

    wall_s: float
    accounts: Accounts
    overlap_s: float
    steps: int  # that stayed
    steps_lost: int
    incidents: int
    formations: int
    unreadable_lines: int

    @property
    def effective(self) -> float:
        """Effective training time: the share of the wall clock spent on steps that stayed."""
        return self.accounts.productive / self.wall_s if self.wall_s else 0.0

    @property
    def closes(self) -> bool:
        """Whether the accounts add up to the wall clock, within 1 %, and no second is in two of them."""
        total_s = float(sum(asdict(self.accounts).values()))
        return max(abs(total_s - self.wall_s), self.overlap_s) <= TOLERANCE * self.wall_s

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"effective": self.effective, "closes": self.closes}

    def __str__(self) -> str:
        spent = sorted(asdict(self.accounts).items(), key=lambda one: -one[1])
        parts = [f"{name.replace('_', ' ')} {format_seconds(seconds)}" for name, seconds in spent if seconds >= 0.0005]
        closes = "" if self.closes else f"; does not close, {format_seconds(self.overlap_s)} are claimed twice"
        return f"{format_seconds(self.wall_s)} ({self.effective:.1%} effective): {', '.join(parts)}{closes}"


def ledger(run: Run) -> Ledger:
    """Account for the whole of a run; for one that still goes on, until its last event."""
    formations, lines = _formations(run), _Lines()
    book = _Book(launched_s=_launched(run), formations=formations, supervised=_supervisor(run).is_file())
    for time_s, formation, event in _timeline(run, formations, lines):
        book.take(time_s, formation, event)
    return book.close(unreadable_lines=lines.unreadable)


# ---- who was there ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Formation:
    """One epoch, as far as its members' steps depend on others."""

    epoch: int
    world: int
    from_step: int | None = None
    fallen: set[int] = field(default_factory=set)
    floor: int = NEVER_UNDONE  # steps from here on were undone by a later one

    @property
    def witness(self) -> int:
        """The rank whose events are read."""
        return next((rank for rank in range(self.world) if rank not in self.fallen), 0)


def _formations(run: Run) -> list[_Formation]:
    """All of them, in order; of a run without a supervisor, its starts."""
    found = _supervised(run) if _supervisor(run).is_file() else list(_started(run))
    floor = NEVER_UNDONE
    for one in reversed(found):
        one.floor = floor
        floor = floor if one.from_step is None else min(floor, one.from_step)
    return found


def _supervised(run: Run) -> list[_Formation]:
    found: dict[int, _Formation] = {}
    for event in _Lines().read(_supervisor(run)):
        kind, epoch = event["event"], _integer(event, "epoch")
        if kind == "epoch" and epoch is not None:
            found[epoch] = _Formation(epoch=epoch, world=_integer(event, "world") or 1)
        elif kind == "restore" and epoch in found:
            found[epoch].from_step = _integer(event, "step")
        elif kind == "incident" and epoch in found:
            others = event.get("others")
            ranks = [event.get("rank"), *(others if isinstance(others, list) else ())]
            found[epoch].fallen.update(rank for rank in ranks if isinstance(rank, int))
    for rank in sorted({one.witness for one in found.values()}):
        for event in _starts(run, rank):
            epoch = _integer(event, "epoch")
            if epoch in found and found[epoch].witness == rank:
                found[epoch].from_step = _integer(event, "step")  # where a damaged checkpoint made it fall back to
    return list(found.values())


def _started(run: Run) -> Iterator[_Formation]:
    for number, event in enumerate(_starts(run, 0)):
        yield _Formation(epoch=number, world=_integer(event, "world") or 1, from_step=_integer(event, "step"))


def _starts(run: Run, rank: int) -> Iterator[Event]:
    return (event for event in _Lines().read(run.events(rank), only=b"run_start") if event["event"] == "run_start")


# ---- what they saw ---------------------------------------------------------------------------------------------------

_Mark = tuple[float, int, Event]  # time, number of the formation (-1: the supervisor), event


def _timeline(run: Run, formations: Sequence[_Formation], lines: _Lines) -> Iterator[_Mark]:
    """The marks of supervisor and witnesses in the order of time."""
    if not _supervisor(run).is_file():
        return _unsupervised(run, lines)
    numbers = {one.epoch: number for number, one in enumerate(formations)}
    files = [_marks(run, rank, formations, numbers, lines) for rank in sorted({one.witness for one in formations})]
    supervisor = ((_time(event), -1, event) for event in lines.read(_supervisor(run)))
    return heapq.merge(*files, supervisor, key=lambda mark: mark[0])  # at the same time, ranks before its end


def _marks(
    run: Run, rank: int, formations: Sequence[_Formation], numbers: Mapping[int, int], lines: _Lines
) -> Iterator[_Mark]:
    """Events of a rank in the formations it is the witness of."""
    epoch: int | None = None
    for event in lines.read(run.events(rank)):
        epoch = _integer(event, "epoch") if "epoch" in event else epoch
        number = numbers.get(epoch, -1) if epoch is not None else -1
        if number >= 0 and formations[number].witness == rank:
            yield _time(event), number, event


def _unsupervised(run: Run, lines: _Lines) -> Iterator[_Mark]:
    """Rank 0 alone; a formation ends where the next start is made ready."""
    number, started = 0, False
    for event in lines.read(run.events(0)):
        if event["event"] == "ready" and started:
            number, started = number + 1, False
        elif event["event"] == "run_start":
            number, started = number + started, True
        yield _time(event), number, event


class _Lines:
    """Reads events line by line; what is no event with a time is counted and left out."""

    def __init__(self) -> None:
        self.unreadable = 0

    def read(self, path: Path, *, only: bytes = b"") -> Iterator[Event]:
        """The events of a file, if there is one; lines without `only` are not looked at."""
        try:
            file = path.open("rb")
        except OSError:
            return
        with file:
            while line := file.readline(MOST_LINE_BYTES):
                event = _parse(line) if only in line else None
                if event is not None:
                    yield event
                elif line.strip():
                    self.unreadable += 1


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(event, dict) and isinstance(event.get("event"), str) and _number(event, "t") is not None
    return event if known else None


# ---- what it was spent on --------------------------------------------------------------------------------------------


class _Book:
    """Walks the marks. Everything before `_at_s` is in an account; the next mark says what the time up to it was."""

    def __init__(self, *, launched_s: float | None, formations: Sequence[_Formation], supervised: bool) -> None:
        self._launched_s, self._formations, self._supervised = launched_s, formations, supervised
        self._numbers = {one.epoch: number for number, one in enumerate(formations)}
        self._spent_s = dict.fromkeys((one.name for one in fields(Accounts)), 0.0)
        self._wall_s = self._overlap_s = 0.0
        self._phase = "off"  # off, init, training, down: what goes on until the next step
        self._began_s = self._at_s = self._last_s = 0.0
        self._newest = -1  # formation
        self._steps = self._lost = self._incidents = 0

    def take(self, time_s: float, formation: int, event: Event) -> None:
        """The next mark."""
        if self._phase != "off" and self._is_new_launch(time_s, event):
            self._end(self._last_s)  # nobody was left to say that the launch before had ended
        if self._phase == "off" and not self._begins(time_s, formation, event):
            return
        self._last_s = max(self._last_s, time_s)
        if formation < 0:
            self._supervisor_says(time_s, event)
        elif formation >= self._newest:  # else somebody speaks from the past
            self._rank_says(time_s, self._formations[formation], event)

    def close(self, *, unreadable_lines: int) -> Ledger:
        """The end of the record."""
        if self._phase != "off":
            self._end(self._last_s)
        return Ledger(
            wall_s=round(self._wall_s, 6),
            accounts=Accounts(**{name: round(seconds, 6) for name, seconds in self._spent_s.items()}),
            overlap_s=round(self._overlap_s, 6),
            steps=self._steps,
            steps_lost=self._lost,
            incidents=self._incidents,
            formations=len(self._formations),
            unreadable_lines=unreadable_lines,
        )

    # ---- launches

    def _is_new_launch(self, time_s: float, event: Event) -> bool:
        launched = self._launched_s
        known = launched is not None and self._last_s < launched <= time_s
        return known or (not self._supervised and event["event"] == "ready" and self._phase == "training")

    def _begins(self, time_s: float, formation: int, event: Event) -> bool:
        """A launch begins with what an agent or a rank first says; a rank that ends late begins none."""
        if formation >= 0 and event["event"] not in ("ready", "run_start"):
            return False
        launched, ready_s = self._launched_s, _number(event, "seconds") or 0.0
        known = launched is not None and self._last_s < launched <= time_s
        self._began_s = launched if known and launched is not None else max(self._last_s, time_s - ready_s)
        self._at_s, self._phase = self._began_s, "init"
        return True

    def _end(self, time_s: float) -> None:
        self._until(time_s, self._waiting)
        self._wall_s += time_s - self._began_s
        self._phase = "off"

    # ---- marks

    def _supervisor_says(self, time_s: float, event: Event) -> None:
        if event["event"] == "epoch":
            if self._phase == "training":
                self._until(time_s, "restore")
                self._phase = "down"
            self._newest = self._numbers.get(_integer(event, "epoch") or 0, self._newest)
        elif event["event"] == "incident":
            self._incidents += 1
            if self._phase == "training":
                self._until(max(self._at_s, time_s - (_number(event, "waited_s") or 0.0)), "detect")
                self._until(time_s, "restore")
                self._phase = "down"
        elif event["event"] == "end":
            self._until(time_s, "stopping" if self._phase == "training" else self._waiting)
            self._end(time_s)

    def _rank_says(self, time_s: float, formation: _Formation, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._step(time_s, formation, event)
        elif kind == "evaluate":
            self._spend(time_s, "evaluate", _number(event, "seconds"))
        elif kind == "checkpoint":
            self._until(time_s, "checkpoint")
        elif kind in ("stop", "sample", "run_end"):
            self._until(time_s, "stopping")
            if kind == "run_end" and not self._supervised:
                self._end(time_s)
        else:
            self._until(time_s, self._waiting)

    def _step(self, time_s: float, formation: _Formation, event: Event) -> None:
        """A step tells how long it took; what came before it in the same gap was waiting for it."""
        stays = (_integer(event, "step") or 0) < formation.floor
        self._steps, self._lost = self._steps + stays, self._lost + (not stays)
        copied_s, compared_s = _number(event, "hold_s") or 0.0, _number(event, "guard_s") or 0.0
        taken_s = _number(event, "duration_s")
        gap_s = time_s - self._at_s
        before_s = 0.0 if taken_s is None else gap_s - copied_s - taken_s - compared_s
        if self._phase == "training":
            self._overlap_s += max(-before_s, 0.0)
        self._until(self._at_s + max(before_s, 0.0), self._waiting)
        self._until(min(self._at_s + copied_s, time_s), "checkpoint")
        self._until(max(self._at_s, time_s - compared_s), "productive" if stays else "lost_work")
        self._until(time_s, "guard")
        self._phase = "training"

    # ---- accounts

    @property
    def _waiting(self) -> str:
        """What time is that no step, and nothing else, claims."""
        return {"init": "init", "down": "restore"}.get(self._phase, "other")

    def _spend(self, time_s: float, account: str, claimed_s: float | None) -> None:
        """Time up to a mark that says how much of it was its own."""
        gap_s = time_s - self._at_s
        if claimed_s is not None and claimed_s < gap_s:
            self._until(time_s - claimed_s, self._waiting)
        self._until(time_s, account)
        self._overlap_s += max((claimed_s or 0.0) - gap_s, 0.0)

    def _until(self, time_s: float, account: str) -> None:
        """Put the time up to a mark into an account; a mark from before the last one claims what is claimed."""
        gap_s = time_s - self._at_s
        self._overlap_s += max(-gap_s, 0.0)
        self._spent_s[account] += max(gap_s, 0.0)
        self._at_s = max(self._at_s, time_s)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _supervisor(run: Run) -> Path:
    return run.path / "supervisor.jsonl"


def _launched(run: Run) -> float | None:
    """When the last launch of the run began."""
    try:
        launch = run.launch()
    except UserError:
        return None
    return _number(launch, "launched") or _number(launch, "started")


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time(event: Event) -> float:
    return float(event["t"])
