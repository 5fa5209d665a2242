"""The ledger's builder: walks the marks of a run once, and puts the time between them into accounts."""

from __future__ import annotations

import bisect
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phalanx.io.values import integer, seconds
from phalanx.record.account.memberships import JUMP_S, RecordedMembership
from phalanx.record.events import Event
from phalanx.units import HOUR_S, format_seconds

if TYPE_CHECKING:
    from phalanx.record.account.straggler_cost import StragglerTime


Floats = NDArray[np.float64]
# Points of the trail; beyond, every second one is dropped.
MOST_POINTS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """Seconds, by what they were spent on; all accounts together add up to the wall time."""

    productive: float = 0.0  # steps that stayed, without the components counted below
    init: float = 0.0  # from a launch to its first step
    compile: float = 0.0  # making kernels, in steps that stayed or before the first step
    data: float = 0.0  # in steps that stayed: waiting for the batch
    stragglers: float = 0.0  # in steps that stayed: waiting for ranks that were slower than their peers
    evaluate: float = 0.0
    checkpoint: float = 0.0  # training stood still for a checkpoint, or for a copy in memory
    guard: float = 0.0  # comparing copies of the state, or compiled with eager code
    detect: float = 0.0  # from the last sign of progress until a failure was detected
    restore: float = 0.0  # from detection, or from a planned change of members, to the next step
    lost_work: float = 0.0  # steps that were done and later undone
    stopping: float = 0.0  # from the end of the last step, without what is counted above
    other: float = 0.0  # between steps, not explained by any event

    @property
    def stepping(self) -> float:
        """Effective training time: steps that stayed, slow or not, without compiling."""
        return self.productive + self.data + self.stragglers


# Labels of the accounts in reports and `phalanx watch`; JSON and metrics use the field names.
ACCOUNT_LABELS = {
    "productive": "training steps",
    "init": "start-up",
    "compile": "compiling",
    "data": "waiting for data",
    "stragglers": "waiting for slow ranks",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    "guard": "integrity checks",
    "detect": "failure detection",
    "restore": "recovery",
    "lost_work": "lost work",
    "stopping": "shutdown",
    "other": "unexplained",
}


# Unix time, seconds of the run until then, effective seconds among them.
Point = tuple[float, float, float]


class EffectiveTrail:
    """The growth of the accounts over time: a bounded number of points, evenly thinned."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._every, self._count = 1, 0
        self._last: Point | None = None

    def add(self, point: Point) -> None:
        """Append the next point in time."""
        self._last = point
        if self._count % self._every == 0:
            self.points.append(point)
            if len(self.points) >= MOST_POINTS:
                self.points, self._every = self.points[::2], 2 * self._every
        self._count += 1

    def add_all(self, time_s: Floats, wall_s: Floats, effective_s: Floats) -> None:
        """Append many points at once; the same ones are kept as with single calls."""
        done, last = 0, len(time_s) - 1
        while done <= last:
            # Steps to the next point that is kept, or to the newest.
            skip = min(-self._count % self._every, last - done)
            done, self._count = done + skip, self._count + skip
            self.add((float(time_s[done]), float(wall_s[done]), float(effective_s[done])))
            done += 1

    def close(self) -> list[Point]:
        """Return all kept points and the newest one."""
        last = [self._last] if self._last is not None and self.points[-1] != self._last else []
        return [*self.points, *last]


@dataclass(kw_only=True, slots=True)
class Recovery:
    """From the last step before a failure to the first one after it, as Unix times."""

    generation: int
    before_s: float
    after_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStretch:
    """Consecutive steps of one membership with no other event between; 0 where an event has no value."""

    time_s: Floats  # Unix times, ascending
    step: NDArray[np.int64]
    taken_s: Floats
    copied_s: Floats
    compared_s: Floats
    compile_s: Floats
    data_s: Floats


class LedgerBuilder:
    """Builds the accounts of a ledger.

    All time before `_at_s` is in an account; the next mark decides the account of the time up to it.
    """

    def __init__(
        self,
        *,
        launches: Sequence[float],
        memberships: Sequence[RecordedMembership],
        supervised: bool,
        waited: StragglerTime,
    ) -> None:
        self._launches, self._memberships, self._supervised = sorted(launches), memberships, supervised
        self._waited = waited  # seconds of each step that slow ranks cost
        self._numbers = {membership.generation: count for count, membership in enumerate(memberships)}
        self._spent_s = dict.fromkeys((field.name for field in fields(Accounts)), 0.0)
        self.wall_s = self.overlap_s = 0.0
        # off, init, training or down: the phase until the next step.
        self._phase = "off"
        self._began_s = self._at_s = self._last_s = 0.0
        self._newest = -1  # newest generation's number
        self.steps = self.lost = self.incidents = self.jumps = 0
        self.trail = EffectiveTrail()
        self.recoveries: list[Recovery] = []
        self._recovering: deque[Recovery] = deque()
        self._stepped_s: float | None = None  # end of the last step
        self._loose_s = 0.0  # seconds since then in `other`

    def take(self, time_s: float, generation: int, event: Event) -> None:
        """Take the next mark."""
        if self._phase != "off" and self._is_new_launch(time_s, event):
            self._end_launch(self._last_s)  # the previous launch ended without an event
        if self._phase == "off" and not self._begins_launch(time_s, generation, event):
            return
        self._last_s = max(self._last_s, time_s)
        if generation < 0:
            self._supervisor_says(time_s, event)
        # Otherwise the mark is of a membership that has been replaced.
        elif generation >= self._newest:
            self._rank_says(time_s, self._membership_at(generation), event)

    def take_steps(self, generation: int, steps: StepStretch) -> bool:
        """Take consecutive steps with no mark between; return False if they must be taken one by one.

        The same arithmetic as `_take_step`, for all steps at once. The previous mark must be a step too: then no part
        of a copy, and no time in `other`, lies before the first step.
        """
        at_s, end_s = self._at_s, float(steps.time_s[-1])
        membership = self._membership_at(generation)
        plain = self._phase == "training" and generation >= self._newest and at_s == self._stepped_s
        launched = bisect_right(self._launches, end_s) != bisect_right(self._launches, self._last_s)
        pending = bool(self._recovering) and self._recovering[0].generation < membership.generation
        if not plain or launched or pending or int(steps.step.max()) >= membership.floor:
            return False
        gap_s = np.diff(steps.time_s, prepend=at_s)
        if float(gap_s.min()) < 0.0 or float(gap_s.max()) > JUMP_S:
            return False
        self._spend_steps(steps, gap_s)
        self._at_s = self._last_s = self._stepped_s = end_s
        self._loose_s, self.steps = 0.0, self.steps + len(steps.step)
        return True

    def _spend_steps(self, steps: StepStretch, gap_s: Floats) -> None:
        spent, time_s = self._spent_s, steps.time_s
        stepping_s = spent["productive"] + spent["data"] + spent["stragglers"]
        before_s = gap_s - steps.copied_s - steps.taken_s - steps.compared_s
        self.overlap_s += float(np.maximum(-before_s, 0.0).sum())
        at_s = time_s - gap_s
        moved_s = at_s + np.maximum(before_s, 0.0)
        spent["other"] += float((moved_s - at_s).sum())
        at_s, moved_s = moved_s, np.minimum(moved_s + steps.copied_s, time_s)
        spent["checkpoint"] += float((moved_s - at_s).sum())
        at_s, until_s, grown_s = moved_s, np.maximum(moved_s, time_s - steps.compared_s), np.zeros(len(time_s))
        waited_s = self._waited.of_steps(steps.step)
        for account, claimed_s in (("compile", steps.compile_s), ("data", steps.data_s), ("stragglers", waited_s)):
            moved_s = np.minimum(at_s + claimed_s, until_s)
            spent[account] += float((moved_s - at_s).sum())
            grown_s += 0.0 if account == "compile" else moved_s - at_s
            at_s = moved_s
        spent["productive"] += float((until_s - at_s).sum())
        spent["guard"] += float((time_s - until_s).sum())
        wall_s, grown_s = self.wall_s + time_s - self._began_s, stepping_s + np.cumsum(grown_s + until_s - at_s)
        self.trail.add_all(time_s, wall_s, grown_s)

    def close(self) -> Accounts:
        """Finish at the last mark, and return the accounts."""
        if self._phase != "off":
            self._end_launch(self._last_s)
        return Accounts(**{name: round(spent_s, 6) for name, spent_s in self._spent_s.items()})

    def _membership_at(self, count: int) -> RecordedMembership:
        """Return a membership by number; if its start was not recorded, one of which no step is known to be undone."""
        return (
            self._memberships[count]
            if count < len(self._memberships)
            else RecordedMembership(generation=count, world=1)
        )

    # ---- launches

    def _is_new_launch(self, time_s: float, event: Event) -> bool:
        launch_s = self._newest_launch(time_s)
        return launch_s is not None or (
            not self._supervised and event["event"] == "ready" and self._phase == "training"
        )

    def _newest_launch(self, time_s: float) -> float | None:
        """Return the newest launch since the last mark; earlier ones in between left no mark."""
        count = bisect_right(self._launches, time_s)
        return self._launches[count - 1] if count and self._launches[count - 1] > self._last_s else None

    def _begins_launch(self, time_s: float, generation: int, event: Event) -> bool:
        """Start a launch at the first mark of an agent or rank; late marks of a rank that ends start none."""
        if event["event"] == "step" and (generation == self._newest or not self._supervised):
            # The clocks of coordinator and rank disagree about the end, or the start was not recorded.
            self._began_s = self._at_s = max(self._last_s, time_s - (seconds(event, "duration_s") or 0.0))
            self._phase = "training"
            return True
        if generation >= 0 and event["event"] not in ("ready", "run_start"):
            return False
        launched, ready_s = self._newest_launch(time_s), seconds(event, "seconds") or 0.0
        is_credible = launched is not None and time_s <= launched + JUMP_S
        self._began_s = launched if is_credible and launched is not None else max(self._last_s, time_s - ready_s)
        self._at_s, self._phase = self._began_s, "init"
        return True

    def _end_launch(self, time_s: float) -> None:
        self._spend_until(time_s, self._idle_account)
        self.wall_s += self._at_s - self._began_s
        self._phase = "off"
        self._note_point(self._at_s, self.wall_s)

    # ---- marks

    def _supervisor_says(self, time_s: float, event: Event) -> None:
        if event["event"] == "epoch":
            if self._phase == "training":
                self._spend_until(time_s, "restore")
                self._phase = "down"
            self._newest = self._numbers.get(integer(event, "epoch") or 0, self._newest)
        elif event["event"] == "incident":
            self.incidents += 1
            before_s = time_s if self._stepped_s is None else self._stepped_s
            self.recoveries.append(Recovery(generation=integer(event, "epoch") or 0, before_s=before_s))
            self._recovering.append(self.recoveries[-1])
            if self._phase == "training":
                self._spend_until(max(self._at_s, time_s - (seconds(event, "waited_s") or 0.0)), "detect")
                self._spend_until(time_s, "restore")
                self._phase = "down"
        elif event["event"] == "end":
            self._spend_until(time_s, "stopping" if self._phase == "training" else self._idle_account)
            self._end_launch(time_s)

    def _rank_says(self, time_s: float, membership: RecordedMembership, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._take_step(time_s, membership, event)
        elif kind == "evaluate":
            self._spend_claimed(time_s, "evaluate", seconds(event, "seconds"))
        elif kind == "checkpoint":
            self._spend_until(time_s, "checkpoint")
        elif kind == "compile_check":
            self._spend_until(max(self._at_s, time_s - (seconds(event, "seconds") or 0.0)), self._idle_account)
            self._spend_until(min(self._at_s + (seconds(event, "compile_s") or 0.0), time_s), "compile")
            self._spend_until(time_s, "guard")
        elif kind in ("stop", "sample", "run_end"):
            self._spend_until(time_s, "stopping")
            if kind == "run_end" and not self._supervised:
                self._end_launch(time_s)
        elif kind in ("ready", "run_start"):
            self._spend_until(time_s, self._idle_account)

    def _take_step(self, time_s: float, membership: RecordedMembership, event: Event) -> None:
        """Take a step with its recorded duration; the time before it since the last mark belongs to other accounts."""
        stays = (integer(event, "step") or 0) < membership.floor
        self.steps, self.lost = self.steps + stays, self.lost + (not stays)
        copied_s, compared_s = seconds(event, "hold_s") or 0.0, seconds(event, "guard_s") or 0.0
        taken_s = seconds(event, "duration_s")
        gap_s = time_s - self._at_s
        copied_s -= self._copied_before(copied_s - max(0.0, gap_s - (taken_s or 0.0) - compared_s))
        before_s = 0.0 if taken_s is None else gap_s - copied_s - taken_s - compared_s
        if self._phase == "training":
            self.overlap_s += max(-before_s, 0.0)
        self._spend_until(self._at_s + max(before_s, 0.0), self._idle_account)
        if copied_s:
            self._spend_until(min(self._at_s + copied_s, time_s), "checkpoint")
        self._spend_step(max(self._at_s, time_s - compared_s), event, stays=stays)
        if compared_s or time_s > self._at_s:
            self._spend_until(time_s, "guard")
        self._phase, self._stepped_s, self._loose_s = "training", time_s, 0.0
        while self._recovering and self._recovering[0].generation < membership.generation:
            self._recovering.popleft().after_s = time_s
        self._note_point(time_s, self.wall_s + self._at_s - self._began_s)

    def _copied_before(self, excess_s: float) -> float:
        """Return the part of a copy longer than the gap before the step that is in an account already.

        A mark between the copy and the step takes the time up to it: a checkpoint takes all of it, an evaluation
        leaves the time that is not its own in `other`, and that part is moved back to `checkpoint` here.
        """
        if self._phase != "training" or self._stepped_s is None:
            return 0.0
        found_s = max(0.0, min(excess_s, self._at_s - self._stepped_s))
        moved_s = min(found_s, self._loose_s)
        self._spent_s["other"] -= moved_s
        self._spent_s["checkpoint"] += moved_s
        return found_s

    def _spend_step(self, until_s: float, event: Event, *, stays: bool) -> None:
        """Account for a step: an undone one is lost; one that stayed gives its recorded delays to their accounts."""
        if not stays:
            self._spend_until(until_s, "lost_work")
            return
        held_up = (
            ("compile", seconds(event, "compile_s")),
            ("data", seconds(event, "data_s")),
            ("stragglers", self._waited.of_step(integer(event, "step") or 0)),
        )
        for account, claimed_s in held_up:
            if claimed_s:
                self._spend_until(min(self._at_s + claimed_s, until_s), account)
        self._spend_until(until_s, "productive")

    def _note_point(self, time_s: float, wall_s: float) -> None:
        spent = self._spent_s
        self.trail.add((time_s, wall_s, spent["productive"] + spent["data"] + spent["stragglers"]))

    # ---- accounts

    @property
    def _idle_account(self) -> str:
        """The account for time that no step and no other event claims."""
        return {"init": "init", "down": "restore"}.get(self._phase, "other")

    def _spend_claimed(self, time_s: float, account: str, claimed_s: float | None) -> None:
        """Account for the time up to a mark that states how many seconds of it were its own."""
        gap_s = time_s - self._at_s
        if claimed_s is not None and claimed_s < gap_s:
            self._spend_until(time_s - claimed_s, self._idle_account)
        self._spend_until(time_s, account)
        self.overlap_s += max((claimed_s or 0.0) - gap_s, 0.0)

    def _spend_until(self, time_s: float, account: str) -> None:
        """Put the time up to a mark into an account; a mark earlier than the last one counts as overlap."""
        gap_s = time_s - self._at_s
        # A clock jump, not a month of waiting: in no account.
        if abs(gap_s) > JUMP_S:
            self.jumps += 1
            self._began_s += max(gap_s, 0.0)
        elif gap_s >= 0.0:
            self._spent_s[account] += gap_s
            self._loose_s += gap_s if account == "other" else 0.0
        else:
            self.overlap_s -= gap_s
        if gap_s > 0.0:
            self._at_s = time_s


# ---- effective training time as a curve: cumulative, and over the last hour ------------------------------------------


# A run shorter than this many hours gets a shorter window.
LEAST_WINDOWS = 4
LEAST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """Effective training time as a share, at moments `t`; unpacks as (t, cumulative, last_hour)."""

    t: tuple[float, ...]  # Unix time
    cumulative: tuple[float, ...]
    last_hour: tuple[float, ...]  # over the last `window_s`
    window_s: float

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return iter((self.t, self.cumulative, self.last_hour))

    @property
    def window(self) -> str:
        """The window of `last_hour` in words."""
        return "the last hour" if self.window_s >= HOUR_S else f"the last {format_seconds(self.window_s)}"


def from_trail(trail: Sequence[Point], points: int = 400) -> Effective:
    """Return at most `points` moments of a run from a ledger's trail; pauses between launches do not count."""
    wall_s = trail[-1][1] if trail else 0.0
    window_s = min(HOUR_S, max(LEAST_S, wall_s / LEAST_WINDOWS))
    points_shown = [point for point in _thin_trail(trail, max(2, points)) if point[1] > 0.0]
    walls = [wall for _, wall, _ in trail]
    return Effective(
        t=tuple(point[0] for point in points_shown),
        cumulative=tuple(_time_share(spent_s, wall_s) for _, wall_s, spent_s in points_shown),
        last_hour=tuple(_recent_share(point, trail, walls, window_s) for point in points_shown),
        window_s=window_s,
    )


def _thin_trail(trail: Sequence[Point], points: int) -> list[Point]:
    if len(trail) <= points:
        return list(trail)
    return [trail[round(number * (len(trail) - 1) / (points - 1))] for number in range(points)]


def _recent_share(point: Point, trail: Sequence[Point], walls: Sequence[float], window_s: float) -> float:
    """Return the share over the last `window_s`; time between two points of the trail is taken as evenly spent."""
    _, wall_s, spent_s = point
    since_s = wall_s - window_s
    if since_s <= 0.0:
        return _time_share(spent_s, wall_s)
    index = bisect.bisect_left(walls, since_s)
    _, after_wall, after_spent = trail[min(index, len(trail) - 1)]
    _, before_wall, before_spent = trail[index - 1] if index else (0.0, 0.0, 0.0)
    gap_s = after_wall - before_wall
    fraction = (since_s - before_wall) / gap_s if gap_s > 0.0 else 1.0
    return _time_share(spent_s - before_spent - fraction * (after_spent - before_spent), window_s)


def _time_share(spent_s: float, wall_s: float) -> float:
    return min(1.0, max(0.0, spent_s / wall_s)) if wall_s > 0.0 else 0.0
