"""Simulate one run over months: an event kernel, a ledger of the time, and the run itself.

The kernel is a heap of (time, order, action), and a clock that jumps from one action to the next.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from phalanx.network.fabric.failure_budget import CABLE_S, FLAP_S, FLAP_SHARE
from phalanx.sim.months.causes import Cause, failure_arrivals
from phalanx.sim.months.policy import UNNOTICED_S, MonthsPolicy, RunProgress
from phalanx.units import DAY_S


class MonthsClock:
    """A clock of simulated seconds. Actions at the same time run in the order in which they were scheduled.

    >>> clock, times = MonthsClock(), []
    >>> clock.after(5.0, lambda: times.append(clock.now_s))
    >>> clock.after(2.0, lambda: clock.after(1.0, lambda: times.append(clock.now_s)))
    >>> clock.run(until_s=10.0)
    >>> times, clock.now_s, clock.events
    ([3.0, 5.0], 10.0, 3)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action in `seconds` from now; an infinite time means never."""
        if math.isfinite(seconds):
            heapq.heappush(self._heap, (self.now_s + seconds, next(self._order), action))

    def run(self, *, until_s: float) -> None:
        """Run every action before `until_s`."""
        while self._heap and self._heap[0][0] < until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
        self.now_s = until_s


# The ledger of a run: seconds lost, by cause and phase; with the effective training time they add up to the wall
# time.


PHASES = ("checkpoint", "copies", "detect", "restart", "redone", "waiting", "stalled", "degraded", "stopped")
SAVING, PLANNED, SHORT = "saving", "planned", "no spare"  # causes that are not failures
# Two more, which occur where lost model replicas are left out.
EXCHANGE, ABSENT = "separate replicas", "replica left out"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """The result of one simulated run. `lost_s`, by (cause, phase), and `done_s` add up to `wall_s`."""

    wall_s: float
    done_s: float  # training at the planned pace that was not lost again
    lost_s: Mapping[tuple[str, str], float]
    interruptions: Mapping[str, int]  # by cause, planned ones included
    borne: int  # network failures that the job survived
    failures: int  # all failures, survived and silent ones included
    spares_used: int
    most_spares: int  # in use at once
    longest_gap_s: float  # without a step
    gave_up: int  # incidents with more failures in a row than fault.restarts allows
    events: int

    @property
    def effective(self) -> float:
        """The share of the time that trained."""
        return self.done_s / self.wall_s

    @property
    def unexpected(self) -> int:
        """The number of interruptions that were not planned."""
        return sum(count for cause, count in self.interruptions.items() if cause != PLANNED)


@dataclass(slots=True)
class TimeLedger:
    """The ledger of a run in progress."""

    lost_s: Counter[tuple[str, str]] = field(default_factory=Counter)
    interruptions: Counter[str] = field(default_factory=Counter)
    borne: int = 0
    failures: int = 0
    spares_used: int = 0
    most_spares: int = 0
    longest_gap_s: float = 0.0
    gave_up: int = 0

    def lose(self, cause: str, phase: str, seconds: float) -> None:
        """Add seconds that did not train to a cause and phase."""
        if seconds:
            self.lost_s[cause, phase] += seconds  # type: ignore[assignment]  # a Counter of floats

    def close(self, *, wall_s: float, done_s: float, events: int) -> RunOutcome:
        """Return the outcome at the end of the run."""
        return RunOutcome(
            wall_s=wall_s,
            done_s=done_s,
            lost_s=dict(self.lost_s),
            interruptions=dict(self.interruptions),
            borne=self.borne,
            failures=self.failures,
            spares_used=self.spares_used,
            most_spares=self.most_spares,
            longest_gap_s=self.longest_gap_s,
            gave_up=self.gave_up,
            events=events,
        )


# One run over days, failure by failure: the job fails, notices, waits for hosts, restarts, and loses work.
# Every method that changes how time is spent first settles the time since the last change. A failure during a
# recovery starts that recovery anew. While the job waits for hosts or is stopped its devices are idle, and no
# failures occur.


NEVER = float("inf")


def simulate_run(policy: MonthsPolicy, *, days: float, random: np.random.Generator) -> RunOutcome:
    """Simulate one run of `days`. The same random source gives the same run."""
    run = _Run(policy, random)
    run.clock.run(until_s=days * DAY_S)
    return run.close()


def simulate_runs(policy: MonthsPolicy, *, days: float, count: int, seed: int) -> Iterator[RunOutcome]:
    """Yield runs that differ only by their random numbers; run `i` is the same for every `count`."""
    for index in range(count):
        # PCG64 by name, as numpy may change its default generator.
        random = np.random.Generator(np.random.PCG64([seed, index]))
        yield simulate_run(policy, days=days, random=random)


class _Run:
    """The state of a run: training or not, since when, in which phase, with how many hosts."""

    def __init__(self, policy: MonthsPolicy, random: np.random.Generator) -> None:
        self.clock = MonthsClock()
        self._policy, self._ledger = policy, TimeLedger()
        # Separate random sources, so that every policy meets the same failures and differences are due to the
        # policies.
        failing, self._planning, self._random = random.spawn(3)
        self._progress = RunProgress(policy.saving)
        self._up, self._since_s, self._fell_s = True, 0.0, 0.0
        self._cause, self._phase, self._generation, self._in_a_row = "", "", 0, 0
        self._missing, self._idle = 0, policy.spares
        # Model replicas that are left out and will return; how often one was.
        self._absent, self._absences = 0, 0
        self._outage_until_s = 0.0
        # Parts that failed without interrupting the job, and are not back yet.
        self._narrow: list[Cause] = []
        # Newest checkpoint from before a corruption that is not noticed yet.
        self._sound_s: float | None = None
        self._arrivals = failure_arrivals(policy.mix, mtbf_s=policy.mtbf_s, shape=policy.shape, random=failing)
        self._next_failure()
        self._next_planned()

    def close(self) -> RunOutcome:
        """Settle the open time and return the outcome."""
        self._book_time()
        if not self._up:
            self._end_gap()
        return self._ledger.close(wall_s=self.clock.now_s, done_s=self._progress.done_s, events=self.clock.events)

    # Failures and planned restarts.

    def _next_failure(self) -> None:
        if self._policy.mtbf_s < NEVER:
            gap_s, cause = next(self._arrivals)
            self.clock.after(gap_s, partial(self._take_failure, cause))

    def _take_failure(self, cause: Cause) -> None:
        """Apply a failure of one cause; while the job waits for hosts or is stopped, none occurs."""
        self._next_failure()
        if not self._up and self._phase in ("waiting", "stopped"):
            return
        self._book_time()
        self._ledger.failures += 1
        if cause.silent:
            self._corrupt_weights(cause)
        elif cause.stall_s is not None:
            self._bear_stall(cause, cause.stall_s)
        else:
            self._outage_until_s = max(self._outage_until_s, self.clock.now_s + cause.outage_s)
            if not self._leave_out(cause):
                self._interrupt_run(cause, noticed_s=self._policy.detect_s)

    def _corrupt_weights(self, cause: Cause) -> None:
        """Corrupt the weights; training continues until it is noticed. On idle devices it has no effect."""
        if self._up and self._sound_s is None:
            self._sound_s = self._progress.newest_s
            digest_s = self._policy.digest_s
            unnoticed_s = self._random.random() * digest_s if digest_s < NEVER else UNNOTICED_S
            self.clock.after(unnoticed_s, partial(self._find_corruption, cause))

    def _find_corruption(self, cause: Cause) -> None:
        """Roll back to the checkpoint before the corruption, unless another failure has already done so."""
        self._book_time()
        if self._sound_s is not None:
            self._ledger.lose(cause.name, "redone", self._progress.roll_back(self._sound_s))
            self._sound_s = None
            self._interrupt_run(cause, noticed_s=0.0)

    def _bear_stall(self, cause: Cause, stall_s: float) -> None:
        """Stall until other paths take over; the network is narrower until the part is back."""
        self._ledger.borne += 1
        self._narrow.append(cause)
        away_s = cause.outage_s or (FLAP_S if self._random.random() < FLAP_SHARE else CABLE_S)
        self.clock.after(away_s, partial(self._widen_network, cause))
        if self._up and stall_s > 0:
            self._spend_phase(cause.name, "stalled", stall_s, then=self._resume_training)

    def _widen_network(self, cause: Cause) -> None:
        self._book_time()
        self._narrow.remove(cause)

    def _next_planned(self) -> None:
        if self._policy.planned_per_day > 0:
            gap_s = -math.log1p(-self._planning.random()) * DAY_S / self._policy.planned_per_day
            self.clock.after(gap_s, self._begin_maintenance)

    def _begin_maintenance(self) -> None:
        """Save, wait until the checkpoint is safe, and restart; a job that is down anyway needs no extra restart."""
        self._next_planned()
        self._book_time()
        if self._up:
            self._ledger.interruptions[PLANNED] += 1
            self._save_and_restart(PLANNED)

    def _save_and_restart(self, cause: str) -> None:
        """Wait for a checkpoint, then restart from it."""
        saving = self._policy.saving
        self._spend_phase(cause, "checkpoint", saving.blocking_s + saving.lag_s, then=self._after_save)

    def _after_save(self) -> None:
        self._progress.save()
        self._begin_restart()

    # Recovery.

    def _interrupt_run(self, cause: Cause, *, noticed_s: float) -> None:
        """Interrupt the job: lose the work since the newest state, remove the host, and start detection or stop."""
        self._ledger.interruptions[cause.name] += 1
        self._in_a_row += 1
        self._ledger.gave_up += self._in_a_row == self._policy.restarts
        self._ledger.lose(cause.name, "redone", self._progress.restore(self.clock.now_s))
        if self._sound_s is not None and self._progress.done_s <= self._sound_s:
            self._sound_s = None
        if cause.takes_host:
            self._take_host()
        if self._policy.recovery == "stop":
            self._spend_phase(cause.name, "stopped", NEVER, then=self._resume_training)
        else:
            self._spend_phase(cause.name, "detect", noticed_s, then=self._after_notice)

    def _leave_out(self, cause: Cause) -> bool:
        """Return True if the other model replicas continue without the failed one until it is rebuilt."""
        leaving = self._policy.leaving
        if leaving is None or not self._up or cause.outage_s or self._absent:
            # One at a time, as in the trainer: if a second one is lost, all restart.
            return False
        if cause.takes_host and not self._idle:
            # No spare host can replace it: the job shrinks, or waits.
            return False
        self._ledger.interruptions[cause.name] += 1
        if cause.takes_host:
            self._take_host()
        self._absent, self._absences = 1, self._absences + 1
        self._spend_phase(cause.name, "detect", self._policy.detect_s, then=partial(self._go_without, cause.name))
        return True

    def _go_without(self, cause: str) -> None:
        leaving = self._policy.leaving
        assert leaving is not None
        self.clock.after(self._policy.restart_s, partial(self._rejoin_replica, cause, self._absences))
        self._spend_phase(cause, "restart", leaving.stall_s, then=self._resume_training)

    def _rejoin_replica(self, cause: str, absence: int) -> None:
        """A replica is rebuilt; in a restart of all replicas it returns with the others."""
        self._book_time()
        if self._absent and absence == self._absences:
            self._absent = 0
            if self._up and self._policy.leaving is not None:
                self._spend_phase(cause, "restart", self._policy.leaving.rejoin_s, then=self._resume_training)

    def _spend_phase(self, cause: str, phase: str, seconds: float, *, then: Callable[[], None]) -> None:
        """Spend seconds in a phase, which replaces the phase in progress."""
        if self._up:
            self._fell_s = self.clock.now_s
        self._up, self._cause, self._phase = False, cause, phase
        self._generation += 1
        self.clock.after(seconds, partial(self._run_next, self._generation, then))

    def _run_next(self, generation: int, action: Callable[[], None]) -> None:
        if generation == self._generation:
            self._book_time()
            action()

    def _after_notice(self) -> None:
        """Restart if there are enough hosts and the network works, else wait."""
        outage_s = self._outage_until_s - self.clock.now_s
        if not self._policy.pace(self._missing):
            self._spend_phase(self._cause, "waiting", NEVER, then=self._after_notice)
        elif outage_s > 0:
            self._spend_phase(self._cause, "waiting", outage_s, then=self._after_notice)
        else:
            self._begin_restart()

    def _begin_restart(self) -> None:
        self._absent = 0
        self._spend_phase(self._cause, "restart", self._policy.restart_s, then=self._resume_training)

    def _resume_training(self) -> None:
        self._end_gap()
        # The next step is almost always done before the next failure.
        self._up, self._in_a_row = True, 0

    def _end_gap(self) -> None:
        self._ledger.longest_gap_s = max(self._ledger.longest_gap_s, self.clock.now_s - self._fell_s)

    # Hosts.

    def _take_host(self) -> None:
        """Remove a host; a spare replaces it if there is one. Under "shrink" it never returns."""
        if self._idle:
            self._idle -= 1
            self._ledger.spares_used += 1
            self._ledger.most_spares = max(self._ledger.most_spares, self._policy.spares - self._idle)
        else:
            self._missing += 1
        if self._policy.recovery != "shrink":
            self.clock.after(self._policy.repair_s, self._return_host)

    def _return_host(self) -> None:
        """Return a repaired host to a gap in the job, which saves and restarts with it if that makes it faster."""
        self._book_time()
        if not self._missing:
            self._idle += 1
            return
        before = self._policy.pace(self._missing)
        self._missing -= 1
        if self._up and self._policy.pace(self._missing) > before:
            self._save_and_restart(SHORT)
        elif self._phase == "waiting":
            self._after_notice()

    # Time.

    def _book_time(self) -> None:
        """Settle the time since the last change."""
        start_s, self._since_s = self._since_s, self.clock.now_s
        seconds = self.clock.now_s - start_s
        if self._up:
            self._book_training(start_s, seconds)
        else:
            self._ledger.lose(self._cause, self._phase, seconds)

    def _book_training(self, start_s: float, seconds: float) -> None:
        """Split a time of training into progress, saving, and losses to missing hosts, the network and replicas."""
        lose, shrunk = self._ledger.lose, self._policy.pace(self._missing)
        slowest = min(self._narrow, key=lambda cause: cause.pace, default=None)
        pace = shrunk * slowest.pace if slowest else shrunk
        leaving = self._policy.leaving
        network_pace, exchanging, absent_share = pace, 0.0, 0.0
        if leaving is not None:
            exchanging = network_pace * (1.0 - leaving.pace)
            absent_share = network_pace * leaving.pace * self._absent / leaving.replicas
            pace = network_pace - exchanging - absent_share
        speed = pace / (1.0 + self._policy.saving.copy_share)
        worked_s = self._progress.advance(start_s, seconds, speed=speed)
        lose(SAVING, "checkpoint", seconds - worked_s)
        lose(SAVING, "copies", worked_s * (pace - speed))
        lose(SHORT, "degraded", worked_s * (1.0 - shrunk))
        if slowest:
            lose(slowest.name, "degraded", worked_s * (shrunk - network_pace))
        lose(EXCHANGE, "degraded", worked_s * exchanging)
        lose(ABSENT, "degraded", worked_s * absent_share)
